"""ZeRO stage 3: parameters, gradients and optimizer state are all sharded; a layer's weight is whole while it is used.

Before a layer's forward, and again before its backward, its weight is gathered from all ranks; after each it is freed.
Its gradient is reduce-scattered as soon as it is complete. The traffic is 3/2 of data parallelism's, the memory 1/N
(Rajbhandari et al., arXiv:1910.02054, section 5.3; Zhao et al., PyTorch FSDP, arXiv:2304.11277).

    forward     gather 0 1 2 | compute 0, free 0, gather 3 | compute 1, free 1, gather 4 | ...
    backward    gather N N-1 N-2 | compute N, reduce-scatter N, free N, gather N-3 | ...
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.ballot import Ballot
from cs336_systems.bucket import GradBucket
from cs336_systems.comm import Group, all_reduce, broadcast, default_group, fault
from cs336_systems.compute_dtype import cast, compute_in
from cs336_systems.errors import UserError
from cs336_systems.flat import plan_buckets
from cs336_systems.fsdp_state import Shard, gather_full, load_full, sharded_state
from cs336_systems.grad_norm import Kept, clip_kept
from cs336_systems.structure import (
    Structure,
    guard_step,
    make_alike,
    require_finished,
    weak_hook,
)
from cs336_systems.unit import Lender, Unit, refuse_hooks, shard_weights, tensors_with_gradient

AHEAD = 2  # layers gathered before they are needed
IN_FLIGHT = 2  # gradients that are being reduced at once, and whose buffers are alive


class FSDP(nn.Module):
    """A module whose 2-D `weight`s (of any layer that has one) are sharded by rows; everything else is replicated.

    `parameters()` are this rank's shards, in the dtype that the module had: give them to any elementwise optimizer.
    `compute_dtype` is that of the weights and inputs of the sharded layers while they compute; master weights,
    gradients and their reduction keep the module's dtype, and layers with other parameters (norms) get inputs in it.
    After the last backward of a step call `finish_gradient_synchronization()`. A weight that is used outside its own
    layer's forward (a tied head) is gathered then, too, and stays whole until the end of the pass.

    Every forward and backward communicates: all ranks must run it, evaluation too. A rank may leave a layer out if
    layers are called in the order in which they are registered and every output counts in the loss. Raises UserError,
    on every rank, if the ranks' modules differ, and CommError for ranks that part.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: Group | None = None,
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.module, self.group, self.compute_dtype = module, default_group(group), compute_dtype
        Structure(module, self.group)  # refuses what has no values before it is described and sent
        make_alike(module, f"wrapper FSDP, compute dtype {compute_dtype}", self.group, ignored)
        self.units, self.layers = shard_weights(module, compute_dtype, self.group, ignored)
        self.shards = {unit.shard for unit in self.units}
        replicated = [p for p in module.parameters() if p not in self.shards | set(ignored)]
        self.structure = Structure(module, self.group, ignored)
        for unit in self.units:
            self.structure.stand_in(unit.full, unit.name)
        trainable = [p for p in replicated if p.requires_grad]
        planned = enumerate(plan_buckets(trainable, float("inf")))
        self.buckets = [GradBucket(ps, self.group, all_reduce, f"replicated gradients {i}") for i, ps in planned]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._install_hooks(trainable)
        self.in_forward, self.reached = False, 0  # layers before `reached` have been gathered in this forward
        self.remaining = self.walked = 0  # layers from these on are gathered, and begun or left out, in this backward
        self.expected: set[Unit] = set()  # took part in a forward and have no gradient yet
        self.reducing: list[Unit] = []
        self.reduced: set[Unit] = set()  # in this backward
        self.awaiting, self.synchronised = False, True  # awaiting: a unit watches for zero_grad of an optimizer
        guard_step(self, (*self.bucket_of, *self.shards))

    def _install_hooks(self, replicated: Sequence[Tensor]) -> None:
        for number, (layer, unit) in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self._before_layer, number, unit))
            layer.register_forward_hook(partial(self._after_layer, number, unit))
            layer.__dict__["_parameters"] = Lender(layer._parameters, partial(self._lend, unit))
        for unit in self.units:
            if unit.trainable:
                unit.full.register_hook(weak_hook(self._before_gradient, unit))
                unit.full.register_post_accumulate_grad_hook(weak_hook(self._weight_ready, unit))
        for parameter in replicated:
            parameter.register_post_accumulate_grad_hook(weak_hook(self._replicated_ready))
        if self.compute_dtype is not None:
            compute_in(self.compute_dtype, self.module, {layer for layer, _ in self.layers})

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this wrapper synchronises the parameter's gradient."""
        return parameter in self.bucket_of or parameter in self.shards

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; floating-point outputs come in the module's own dtype."""
        self.structure.check_unchanged()
        for unit in self.units:
            refuse_hooks(unit.shard, unit.name, self.group)
        if torch.is_grad_enabled() and not self.synchronised:
            self._end_backward()
        for unit in self.units:
            unit.reshard()
        self.in_forward, self.reached = True, 0
        self.borrowed: set[Unit] = set()
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            self.in_forward = False
        # Walk the rest of the list, so that ranks which use other layers gather the same.
        self._gather_up_to(len(self.layers))
        for unit in self.units:
            unit.reshard()
        if torch.is_grad_enabled():
            self.remaining = self.walked = len(self.layers)
        for tensor in tensors_with_gradient(output, "the module") if self.borrowed else ():
            tensor.register_hook(partial(self._borrow_again, self.borrowed))
        return cast(output, self.units[0].shard.dtype) if self.compute_dtype is not None and self.units else output

    def _lend(self, unit: Unit) -> nn.Parameter | None:
        """The whole weight for somebody outside its layer, until the end of the pass; None if nothing is computing."""
        recomputing = torch._C._current_graph_task_id() != -1
        if unit.unsharded or not (self.in_forward or recomputing):
            return None
        unit.unshard()
        if torch.is_grad_enabled() and unit.shard.requires_grad:
            self.expected.add(unit)
        self.borrowed.add(unit)
        return unit.full

    def _borrow_again(self, borrowed: set[Unit], gradient: Tensor) -> None:
        for unit in sorted(borrowed, key=lambda unit: unit.name):
            unit.unshard()

    def _gather_up_to(self, number: int) -> None:
        while self.reached < min(number, len(self.layers)):
            self.layers[self.reached][1].launch_unshard()
            self.reached += 1

    def _before_layer(self, number: int, unit: Unit, layer: nn.Module, args: Any) -> None:
        if self.in_forward:
            coming = {unit for _, unit in self.layers[number : max(self.reached, number + 1)]}
            for _, skipped in self.layers[:number]:
                if skipped.work is not None and skipped not in coming:  # it may be the tied weight of a layer to come
                    skipped.reshard()
            self._gather_up_to(number + 1 + AHEAD)
        unit.unshard()

    def _after_layer(self, number: int, unit: Unit, layer: nn.Module, args: Any, output: Any) -> None:
        tensors = tensors_with_gradient(output, unit.name)
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, number, unit))
        if tensors and unit.shard.requires_grad:
            self.expected.add(unit)
        if self.in_forward:  # else it is recomputed in backward, which needs the weight at once
            unit.reshard()
        if tensors and not unit.shard.requires_grad:
            for tensor in tensors_with_gradient(args):
                tensor.register_hook(lambda gradient: unit.reshard())

    def _before_backward(self, number: int, unit: Unit, gradient: Tensor) -> None:
        self.synchronised = False
        self._walk_back(number)
        unit.unshard()
        if not unit.shard.requires_grad:  # frozen since it was wrapped, but perhaps on this rank only
            self._reduce(unit)

    def _walk_back(self, number: int) -> None:
        """Go down the list to a layer as every rank does, gathering ahead; a layer that is left out reduces zeros."""
        while self.walked > max(number, 0):
            self.walked -= 1
            while self.remaining > max(self.walked - AHEAD, 0):
                self.remaining -= 1
                self.layers[self.remaining][1].launch_unshard()
            unit = self.layers[self.walked][1]
            if self.walked > number and unit not in self.expected | {unit for _, unit in self.layers[: self.walked]}:
                unit.reshard()
                self._reduce(unit)

    def _before_gradient(self, unit: Unit, gradient: Tensor) -> None:
        unit.gradients.finish()  # a second gradient must not be added to a buffer that is being reduced

    def _weight_ready(self, unit: Unit, full: nn.Parameter) -> None:
        self.synchronised = False
        if not self.awaiting:  # one is enough
            unit.await_gradient()
            self.awaiting = True
        unit.gradients.collect(full)
        self.expected.discard(unit)
        unit.reshard()
        self.reduced.discard(unit)
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if unit in self.reduced or not unit.trainable:
            return
        unit.gradients.finish()
        unit.gradients.launch()
        self.reduced.add(unit)
        self.reducing.append(unit)
        while len(self.reducing) > IN_FLIGHT:
            self.reducing.pop(0).gradients.finish()

    def _replicated_ready(self, parameter: nn.Parameter) -> None:
        self.synchronised = False
        self.bucket_of[parameter].collect(parameter)

    def _end_backward(self) -> None:
        """Take part in what this rank's backward did not reach, but perhaps another's, which used other layers."""
        if any(unit.forgotten for unit in self.units):
            raise fault(
                "gradients were changed or dropped before finish_gradient_synchronization() had delivered them all: "
                "call that first, or zero_grad() of the wrapper to drop them",
            )
        self._walk_back(-1)
        for unit in reversed(self.units):  # in the order of a backward, for which another rank may wait
            unit.reshard()
            self._reduce(unit)
        self.expected, self.reduced = set(), set()

    def finish_gradient_synchronization(self) -> None:
        """Reduce what has not been reduced, and wait for everything. Every rank must call it, before the step."""
        self.structure.check_unchanged()
        self._end_backward()
        for bucket in self.buckets:
            bucket.launch()
        for bucket in (*(unit.gradients for unit in self.units), *self.buckets):
            bucket.finish()
        local = [u.gradients.shard[: u.shard.numel()] for u in self.units if u.gradients.shard is not None]
        replicated = [p.grad for bucket in self.buckets for p in bucket.parameters if p.grad is not None]
        spread = [each for each in local if each.numel()] + replicated[:1]
        ballot = Ballot([*(unit.gradients for unit in self.units), *self.buckets], spread, self.group)
        for parameter in ballot.read():
            if parameter in self.bucket_of:
                parameter.grad = self.bucket_of[parameter].gradient(parameter)
        for unit in self.units:
            unit.deliver_gradient()
        for bucket in self.buckets:
            bucket.close()
        for name, buffer in self.module.named_buffers():
            broadcast(buffer, 0, self.group, f"buffer {name}").wait()
        self._start_anew()

    def _start_anew(self) -> None:
        self.expected, self.reducing, self.reduced, self.awaiting, self.synchronised = set(), [], set(), False, True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. After an interrupted backward every rank must call it."""
        for unit in self.units:
            unit.awaited = None
        if not self.synchronised:
            self._end_backward()
        for unit in self.units:
            unit.gradients.reset()
        for bucket in self.buckets:
            bucket.reset()
        self._start_anew()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops written for the other wrappers. Gradients are reduced and added up as shards even so: to keep them
        whole until the last backward would cost what sharding saves."""
        yield

    def kept_gradients(self) -> list[Kept]:
        """What this rank has of every parameter's synchronised gradient, as views."""
        sharded = [Kept(unit.shard, unit.shard.grad, True) for unit in self.units if unit.shard.grad is not None]
        return sharded + [Kept(p, p.grad, False) for p in self.bucket_of if p.grad is not None]

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; returns the norm before, equal on every rank."""
        require_finished(self, "clip_grad_norm()")
        return clip_kept(self.kept_gradients(), max_norm, norm_type, self.group)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UserError("copy the state instead (gather_full_params): FSDP belongs to its group and parameters")

    def gather_full_params(self) -> dict[str, Tensor]:
        """The whole state by the module's own names, as `module.state_dict()` had it: loads into an unwrapped module.

        Every rank must call this, and gets a copy.
        """
        return gather_full(self.module, self.units)

    def sharded_state(self) -> dict[str, Shard]:
        """This rank's rows of every sharded weight by name, and what is replicated as a shard that is the whole."""
        return sharded_state(self.module, self.units)

    def load_full_params(self, full: dict[str, Tensor]) -> None:
        """Take this rank's rows from a whole state. Raises UserError for missing or unknown names and wrong shapes."""
        load_full(self.module, self.units, full)
