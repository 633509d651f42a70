"""Data parallelism: each rank computes the gradients of its own rows, and all use the mean over the ranks.

Four wrappers differ in two choices only, how gradients are grouped and when a group is reduced. For a chain of eight
one-parameter layers (g: gradient ready, R: its group is reduced, |: backward ends):

                     after backward                          as soon as ready
    one per group    NaiveDDP                                OverlappedDDP
                     g7 g6 g5 g4 g3 g2 g1 g0 | R R R ...     g7 R g6 R g5 R g4 R g3 R g2 R g1 R g0 R |
    more per group   FlatDDP: all in one                     BucketedDDP: up to a size
                     g7 g6 g5 g4 g3 g2 g1 g0 | R             g7 g6 R g5 g4 R g3 g2 R g1 g0 R |

With P bytes of gradients, n groups, a bandwidth w and an overhead o of each collective, the reductions take P/w + n o;
those that run as soon as ready hide behind backward, all but the last group's P/(n w) + o (Li et al., PyTorch
Distributed, arXiv:2006.15704, section 3.2).
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from cs336_systems.buffers.bucket import REPLICATED, Placement
from cs336_systems.buffers.flat import plan_buckets
from cs336_systems.buffers.guards import Parameters, Wrapper, weak_hook
from cs336_systems.buffers.replicas import finish_all
from cs336_systems.comm import Group, agree
from cs336_systems.errors import UserError
from cs336_systems.optim.grad_norm import LocalGradient


class DataParallel(Wrapper):
    """A module whose gradients are averaged over the ranks of a group; the mechanism that the four wrappers share.

    After each backward, or the last of several, call `finish_gradient_synchronization()`: then every `.grad` is the
    mean over the ranks; a rank that did not use a parameter contributes zeros. Parameters of `apart` get a bucket each:
    a tied embedding's shards must match on two pipeline stages. `ignored` ones belong to another wrapper.
    """

    bucket_size_mb: float | None = 25.0  # cap of a bucket in 10^6 bytes; 0: one parameter a bucket; None: one bucket
    overlap: bool = True  # reduce a bucket as soon as it is complete

    def __init__(
        self, module: nn.Module, group: Group | None = None, apart: Parameters = (), ignored: Parameters = ()
    ) -> None:
        kind = f"buckets of {self.bucket_size_mb} MB, gradients {type(self.gradients).__name__.lower()}"
        super().__init__(kind, module, group, ignored)
        apart = {*apart}
        if foreign := apart - {*module.parameters()}:
            raise UserError(f"`apart` are parameters of the module, which {len(foreign)} of them are not")
        cap = math.inf if self.bucket_size_mb is None else self.bucket_size_mb
        if not isinstance(cap, SupportsFloat) or not cap >= 0:  # or NaN
            raise UserError(f"a bucket has 0 MB or more, not {cap!r}")
        self.make_buckets(plan_buckets(list(self.guard.trainable), cap * 10**6, apart), placement=self.gradients)
        self.next = 0  # the first bucket that has not been launched
        self.accumulating = False  # inside no_sync
        for p in self.bucket_of:
            self.guard.hooks.append(p.register_hook(weak_hook(self._before_gradient, p)))
            self.guard.hooks.append(p.register_post_accumulate_grad_hook(weak_hook(self._on_gradient)))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward. It communicates only if gradients of an unfinished
        synchronisation were dropped, so one rank may evaluate alone."""
        self.guard.before_forward()
        if torch.is_grad_enabled() and any(parameter.grad is None for parameter in self.guard.arrived):
            self.reset()
        return self.module(*inputs, **kwargs)

    def _before_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Hook: a gradient is about to be added to `.grad`, which may lie in a buffer that is being reduced."""
        self.guard.before_gradient(parameter, not self.accumulating)
        self.bucket_of[parameter].make_way(parameter)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Hook: `.grad` is complete in this backward."""
        if parameter.grad is None:  # a function of the user's gave none
            return
        reduces = self.overlap and not self.accumulating
        self.guard.on_gradient(parameter, reduces)
        self.bucket_of[parameter].mark_ready(parameter)
        if reduces:
            self._launch(only_complete=True)

    def _launch(self, only_complete: bool = False, again: bool = False) -> None:
        """Launch buckets in one fixed order, in which a complete bucket waits for its turn: ranks whose gradients come
        in different orders would deadlock otherwise."""
        while self.next < len(self.buckets) and not (only_complete and self.buckets[self.next].waiting):
            if (oldest := self.next - self.gradients.in_flight) >= 0:
                self.buckets[oldest].finish()
            self.buckets[self.next].launch(again)
            self.next += 1

    def finish_gradient_synchronization(self) -> None:
        """Reduce what has not been reduced, and wait for everything. Every rank must call it, before the step."""
        self.guard.before_finish()
        self._launch()  # now every rank has launched each bucket once, whatever it used
        if self.guard.second_backward():
            self.next = 0
            self._launch(again=True)
        self.next = 0
        finish_all(self.buckets, self.guard.replicas)
        self.end_synchronisation()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside the block; `finish_gradient_synchronization` reduces their sum."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before
            for bucket in self.buckets:
                bucket.expect_all()

    def join(self, batches: Collection[Any]) -> Iterator[Any]:
        """Yield this rank's batches, then None until the rank with most is done. For None, skip forward and backward,
        but synchronise and step with the others: this rank's gradients are zero. Every rank must call it."""
        counts = agree("the number of batches", len(batches), self.group)
        yield from batches
        yield from repeat(None, max(counts) - len(batches))

    def kept_gradients(self) -> list[LocalGradient]:
        found = {each.parameter: each for bucket in self.buckets for each in bucket.local_gradients()}
        return [found[parameter] for parameter in self.guard.trainable if parameter in found]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, sharded ones as well."""
        self.reset(set_to_none)
        super().zero_grad(set_to_none)

    def reset(self, set_to_none: bool = True) -> None:
        """Forget gradients under way or sharded. After an interrupted backward every rank must call it."""
        if self.guard.arrived:  # another rank may have launched these already, and wait
            self._launch()
        for bucket in self.buckets:
            bucket.reset(set_to_none)
        self.next = 0
        self.guard.reset()

    def unwrap(self) -> nn.Module:
        """Remove this wrapper from the module and return it, to be changed and wrapped again."""
        self.guard.release()
        return self.module


class NaiveDDP(DataParallel):
    """Reduces each parameter's gradient alone, after backward: P/w + n o seconds, none hidden."""

    bucket_size_mb, overlap = 0.0, False


class FlatDDP(DataParallel):
    """Reduces all gradients in one buffer, after backward: P/w + o seconds, none hidden."""

    bucket_size_mb, overlap = None, False


class OverlappedDDP(DataParallel):
    """Reduces each parameter's gradient alone, as soon as it is ready: n overheads, all but the last one hidden."""

    bucket_size_mb, overlap = 0.0, True


class BucketedDDP(DataParallel):
    """Reduces buckets of up to `bucket_size_mb`, each as soon as it is complete."""

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        group: Group | None = None,
        gradients: Placement = REPLICATED,
        **chosen: Parameters,
    ) -> None:
        self.bucket_size_mb, self.gradients = bucket_size_mb, gradients
        super().__init__(module, group, **chosen)
