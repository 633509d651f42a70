"""Data parallelism: each rank computes the gradients of its own rows, and all use the mean over the ranks.

Four wrappers differ in two choices only, how gradients are grouped and when a group is reduced. For a chain of eight
one-parameter layers (g: gradient ready, R: its group is reduced, |: backward ends):

                     after backward                          as soon as ready
    one a group      NaiveDDP                                OverlappedDDP
                     g7 g6 g5 g4 g3 g2 g1 g0 | R R R ...     g7 R g6 R g5 R g4 R g3 R g2 R g1 R g0 R |
    more a group     FlatDDP: all in one                     BucketedDDP: up to a size
                     g7 g6 g5 g4 g3 g2 g1 g0 | R             g7 g6 R g5 g4 R g3 g2 R g1 g0 R |

With P bytes of gradients, n groups, a bandwidth w and an overhead o of each collective, the reductions take P/w + n o;
those that run as soon as ready hide behind backward, all but the last group's P/(n w) + o (Li et al., PyTorch
Distributed, arXiv:2006.15704, section 3.2).
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.ballot import Ballot
from cs336_systems.bucket import GradBucket, Verb
from cs336_systems.comm import Group, agree, all_reduce, broadcast, default_group, fault
from cs336_systems.errors import UserError
from cs336_systems.flat import plan_buckets
from cs336_systems.grad_norm import Kept, clip_kept
from cs336_systems.structure import (
    Structure,
    guard_step,
    let_go,
    make_alike,
    require_finished,
    weak_hook,
)

MB = 10**6


class DataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of a group; the mechanism that the four wrappers share.

    On construction every rank gets rank 0's parameters and buffers. After each backward, or the last of several, call
    `finish_gradient_synchronization()`: then every `.grad` is the mean over the ranks, as one process would have
    computed it from all rows (if each rank has equally many). A parameter that no rank used has no gradient; one that
    some ranks did not use counts as zero there. Gradients that no rank has synchronised never reach an optimizer: its
    step raises. Buffers follow rank 0 at each synchronisation, so evaluation on one rank alone is safe.

    `apart` are parameters that get a bucket of their own, so that ranks of another group, whose module has other
    parameters, cut their gradients alike; `ignored` are left to another wrapper. Raises UserError, on every rank, if
    the modules differ or have changed since.
    """

    bucket_size_mb: float | None = 25.0  # a group's size in 10^6 bytes; 0: one parameter a group; None: one group
    overlap: bool = True  # whether a group is reduced as soon as it is complete
    scatters: bool = False  # whether each rank keeps a slice of the mean only
    verb: Verb = staticmethod(all_reduce)

    def __init__(
        self,
        module: nn.Module,
        group: Group | None = None,
        apart: Collection[nn.Parameter] = (),
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.module, self.group = module, default_group(group)
        self.structure = Structure(module, self.group, ignored)
        kind = f"wrapper {type(self).__name__}, buckets of {self.bucket_size_mb} MB"
        make_alike(module, kind, self.group, ignored)
        if self.bucket_size_mb is not None and self.bucket_size_mb < 0:
            raise UserError(f"a bucket of {self.bucket_size_mb} MB is less than nothing")
        cap = math.inf if self.bucket_size_mb is None else self.bucket_size_mb * MB
        together = [p for p in self.structure.trainable if p not in set(apart)]
        alone = [p for p in self.structure.trainable if p in set(apart)]
        self.buckets = [
            GradBucket(ps, self.group, self.verb, f"bucket {i}, from {self.structure.names[ps[0]]}", self.scatters)
            for i, ps in enumerate([*plan_buckets(together, cap), *plan_buckets(alone, 0)])
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.number = {bucket: i for i, bucket in enumerate(self.buckets)}
        self.next = 0  # the first bucket that has not been launched: all ranks launch in this one order
        self.arrived: set[nn.Parameter] = set()  # parameters whose gradient has come, for `overlap` to reduce
        self.again = False  # whether one of them has come twice, so that every bucket is to be reduced twice
        self.synchronised, self.accumulating = True, False
        self.after_synchronisation: list[Callable[[], None]] = []
        self.hooks = []
        for parameter in self.structure.trainable:
            self.hooks.append(parameter.register_hook(weak_hook(self._before_gradient, parameter)))
            self.hooks.append(parameter.register_post_accumulate_grad_hook(weak_hook(self._gradient_ready)))
        guard_step(self, self.bucket_of)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this wrapper synchronises the parameter's gradient."""
        return parameter in self.bucket_of

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward. It does not communicate, so one rank may evaluate alone."""
        self.structure.check_unchanged()
        if torch.is_grad_enabled() and self._forgotten():
            self.reset()
        return self.module(*inputs, **kwargs)

    def _forgotten(self) -> bool:
        """Whether zero_grad of an optimizer has dropped gradients while they are being reduced."""
        return not self.scatters and any(parameter.grad is None for parameter in self.arrived)

    def _refuse_forgotten(self) -> None:
        raise fault(
            "gradients were dropped between backward and finish_gradient_synchronization(): drop them after it, or by "
            "zero_grad() of the wrapper",
        )

    def _before_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.synchronised = False
        if parameter in self.arrived and parameter.grad is None and not self.scatters:
            self._refuse_forgotten()
        bucket = self.bucket_of[parameter]
        if self.number[bucket] < self.next:
            bucket.finish()  # a second gradient must not be added to a buffer that is being reduced

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        self.bucket_of[parameter].collect(parameter)
        self.again = self.again or parameter in self.arrived
        if self.accumulating or not self.overlap:
            return
        self.arrived.add(parameter)
        # A complete bucket whose turn has not come waits: ranks that launch in different orders would deadlock.
        while self.next < len(self.buckets) and not self.buckets[self.next].waiting:
            self.buckets[self.next].launch()
            self.next += 1
            if self.scatters and self.next > 1:
                self.buckets[self.next - 2].finish()  # and free its buffer: two at most are alive

    def finish_gradient_synchronization(self) -> None:
        """Reduce what has not been reduced, and wait for everything. Every rank must call it, before the step."""
        self.structure.check_unchanged()
        if self._forgotten():
            self._refuse_forgotten()
        self._launch(self.buckets[self.next :])  # now every rank has launched each bucket once, whatever it used
        if self.again:  # on all ranks or on none; else their collectives would not match
            agree("a second backward before finish_gradient_synchronization()", "", self.group)
            self._launch(self.buckets, keep=not self.scatters)
        self._start_anew()
        for bucket in self.buckets if self.scatters else ():  # whose shards the vote looks at
            bucket.finish()
        ballot = Ballot(self.buckets, self._shards(), self.group)
        for bucket in self.buckets:
            bucket.finish()
        for parameter in ballot.read():
            if not self.scatters:
                parameter.grad = self.bucket_of[parameter].gradient(parameter)
        for bucket in self.buckets:
            bucket.close()
        for name, buffer in self.module.named_buffers():
            broadcast(buffer, 0, self.group, f"buffer {name}").wait()
        self.synchronised = True
        for act in self.after_synchronisation:
            act()

    def _start_anew(self) -> None:
        self.next, self.again, self.arrived = 0, False, set()

    def _launch(self, buckets: list[GradBucket], keep: bool = False) -> None:
        for bucket in buckets:
            bucket.finish()
            bucket.launch(keep)
            if self.scatters:
                bucket.finish()

    def _shards(self) -> list[Tensor]:
        """This rank's slices of the mean gradient without padding, (elements,) each."""
        me, found = self.group.rank(), []
        for bucket in self.buckets:
            if bucket.shard is not None and (elements := sum(p.stop - p.start for p in bucket.layout.pieces(me))):
                found.append(bucket.shard[:elements])
        return found

    def kept_gradients(self) -> list[Kept]:
        """What this rank has of every parameter's synchronised gradient, as views."""
        if not self.scatters:
            return [Kept(p, p.grad, False) for p in self.structure.trainable if p.grad is not None]
        found = []
        for bucket in (bucket for bucket in self.buckets if bucket.shard is not None):
            first = bucket.layout.cuts[self.group.rank()]
            for index, start, stop in map(astuple, bucket.layout.pieces(self.group.rank())):
                if (parameter := bucket.parameters[index]) in bucket.used:
                    offset = bucket.layout.offsets[index] - first
                    assert bucket.shard is not None
                    found.append(Kept(parameter, bucket.shard[offset + start : offset + stop], True))
        return found

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; returns the norm before, equal on every rank."""
        require_finished(self, "clip_grad_norm()")
        return clip_kept(self.kept_gradients(), max_norm, norm_type, self.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, sharded ones as well."""
        self.reset(set_to_none)
        super().zero_grad(set_to_none)

    def reset(self, set_to_none: bool = True) -> None:
        """Forget what is under way or sharded. After an interrupted backward every rank must call it."""
        unfinished = bool(self.arrived)
        if unfinished:  # first launch what another rank's backward, which got further, may wait for
            self._launch(self.buckets[self.next :])
        for bucket in self.buckets:
            bucket.reset(set_to_none)
        if unfinished:
            agree("zero_grad() after an unfinished backward", "", self.group)
        self._start_anew()
        self.synchronised = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on their rank; `finish_gradient_synchronization` reduces the sum."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before
            for bucket in self.buckets:
                bucket.expect_all()

    def unwrap(self) -> nn.Module:
        """The module, free of this wrapper, to be changed and wrapped anew."""
        for hook in self.hooks:
            hook.remove()
        self.synchronised = True
        let_go(self.bucket_of)
        return self.module

    def __deepcopy__(self, memo: Any) -> Any:
        raise UserError(f"copy {type(self).__name__}.module instead: a wrapper belongs to its group and parameters")


class NaiveDDP(DataParallel):
    """Each parameter's gradient by itself, after backward: P/w + n o seconds, none hidden."""

    bucket_size_mb, overlap = 0.0, False


class FlatDDP(DataParallel):
    """All gradients in one buffer, after backward: P/w + o seconds, none hidden."""

    bucket_size_mb, overlap = None, False


class OverlappedDDP(DataParallel):
    """Each parameter's gradient by itself, as soon as it is ready: n overheads, all but the last reduction hidden."""

    bucket_size_mb, overlap = 0.0, True


class BucketedDDP(DataParallel):
    """Groups of up to `bucket_size_mb` (10^6 bytes; None: one group), each as soon as it is complete."""

    overlap = True

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        group: Group | None = None,
        apart: Collection[nn.Parameter] = (),
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        self.bucket_size_mb = bucket_size_mb
        super().__init__(module, group, apart, ignored)
