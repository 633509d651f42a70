"""ZeRO stage 3: parameters, gradients and optimizer state are all sharded; a layer's weight is whole while it is used.

Before a layer's forward, and again before its backward, its weight is gathered from all ranks; after each it is freed.
Its gradient is reduce-scattered as soon as it is complete. The traffic is 3/2 of data parallelism's, the memory 1/N
(Rajbhandari et al., arXiv:1910.02054, section 5.3; Zhao et al., PyTorch FSDP, arXiv:2304.11277).

    forward     gather 0 1 2 | compute 0, free 0, gather 3 | compute 1, free 1, gather 4 | ...
    backward    gather N N-1 N-2 | compute N, reduce-scatter N, free N, gather N-3 | ...
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cs336_systems.ballot import Ballot
from cs336_systems.bucket import GradBucket
from cs336_systems.comm import Group, all_reduce, broadcast, default_group, fault
from cs336_systems.flat import plan_buckets
from cs336_systems.fsdp_state import Shard, gather_full, load_full, sharded_state
from cs336_systems.grad_norm import clip_by_norm, global_norm
from cs336_systems.structure import Structure, broadcast_module, compare_structures, describe, guard_step
from cs336_systems.unit import Lender, Unit, shard_weights

AHEAD = 2  # layers gathered before they are needed
IN_FLIGHT = 2  # gradients that are being reduced at once, and whose buffers are alive


class FSDP(nn.Module):
    """A module whose 2-D `weight`s (of any layer that has one) are sharded by rows; everything else is replicated.

    `parameters()` are this rank's shards, in the dtype that the module had: give them to any elementwise optimizer.
    `compute_dtype` is that of the weights and inputs of the sharded layers while they compute; master weights,
    gradients and their reduction keep the module's dtype, and layers with other parameters (norms) get inputs in it.
    After the last backward of a step call `finish_gradient_synchronization()`. A weight that is used outside its own
    layer's forward (a tied head) is gathered then, too, and stays whole until the end of the pass.

    Every forward and backward communicates: all ranks must run it, evaluation too. Raises UserError, on every rank, if
    the ranks' modules differ, and CommError for ranks that part.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None, group: Group | None = None) -> None:
        super().__init__()
        self.module, self.group, self.compute_dtype = module, default_group(group), compute_dtype
        compare_structures(describe(module), self.group)
        Structure(module, self.group)  # refuses what has no values before it is sent
        broadcast_module(module, self.group)
        self.units, self.layers = shard_weights(module, compute_dtype, self.group)
        replicated = [p for p in module.parameters() if p not in {unit.shard for unit in self.units}]
        self.structure = Structure(module, self.group)
        trainable = [p for p in replicated if p.requires_grad]
        self.buckets = [
            GradBucket(ps, self.group, all_reduce, f"replicated gradients {i}")
            for i, ps in enumerate(plan_buckets(trainable, float("inf")))
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.shards = {unit.shard for unit in self.units}
        self._install_hooks(trainable)
        self.in_forward = False
        self.reached = 0  # layers before this one have been gathered in this forward
        self.remaining = 0  # layers from this one on have been gathered in this backward
        self.expected: set[Unit] = set()  # took part in a forward and have no gradient yet
        self.reducing: list[Unit] = []
        self.reduced: set[Unit] = set()  # since the last synchronisation
        self.synchronised = True
        guard_step(self)

    def _install_hooks(self, replicated: Sequence[Tensor]) -> None:
        sharded = {module for module, _ in self.layers}
        for number, (layer, unit) in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self._before_layer, number, unit), with_kwargs=True)
            layer.register_forward_hook(partial(self._after_layer, number, unit))
            layer.__dict__["_parameters"] = Lender(layer._parameters, partial(self._lend, unit))
        for unit in self.units:
            unit.full.register_post_accumulate_grad_hook(partial(self._weight_ready, unit))
        for parameter in replicated:
            parameter.register_post_accumulate_grad_hook(self._replicated_ready)
        if self.compute_dtype is None:
            return
        for layer in self.module.modules():
            own = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
            if own and layer not in sharded:
                layer.register_forward_pre_hook(partial(_cast_inputs, own[0].dtype), with_kwargs=True)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this wrapper synchronises the parameter's gradient."""
        return parameter in self.bucket_of or parameter in self.shards

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; floating-point outputs come in the module's own dtype."""
        self.structure.check_unchanged()
        if torch.is_grad_enabled():
            self._refuse_interrupted()
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
            self.remaining = len(self.layers)
        for tensor in _tensors_with_gradient(output) if self.borrowed else ():
            tensor.register_hook(partial(self._borrow_again, self.borrowed))
        master = self.units[0].shard.dtype if self.units else None
        return output if self.compute_dtype is None or master is None else _cast(output, master)

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

    def _before_layer(self, number: int, unit: Unit, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.in_forward:
            for _, skipped in self.layers[:number]:
                if skipped is not unit and skipped.work is not None:
                    skipped.reshard()
            self._gather_up_to(number + 1 + AHEAD)
        unit.unshard()
        if self.compute_dtype is None:
            return None
        for name, parameter in layer._parameters.items():  # a bias is replicated, and computes in the same dtype
            if name != "weight" and parameter is not None and parameter.is_floating_point():
                layer.__dict__.setdefault("_masters", {})[name] = parameter
                layer._parameters[name] = parameter.to(self.compute_dtype)  # type: ignore[assignment]
        return _cast_inputs(self.compute_dtype, layer, args, kwargs)

    def _after_layer(self, number: int, unit: Unit, layer: nn.Module, args: Any, output: Any) -> None:
        layer._parameters.update(layer.__dict__.pop("_masters", {}))
        tensors = _tensors_with_gradient(output)
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, number, unit))
        if tensors and unit.shard.requires_grad:
            self.expected.add(unit)
        if self.in_forward:  # else it is recomputed in backward, which needs the weight at once
            unit.reshard()
        if tensors and not unit.shard.requires_grad:
            for tensor in _tensors_with_gradient(args):
                tensor.register_hook(lambda gradient: unit.reshard())

    def _before_backward(self, number: int, unit: Unit, gradient: Tensor) -> None:
        self.synchronised = False
        while self.remaining > max(number - AHEAD, 0):
            self.remaining -= 1
            self.layers[self.remaining][1].launch_unshard()
        for _, skipped in self.layers[number + 1 :]:
            if skipped.work is not None and skipped not in self.expected:
                skipped.reshard()
        unit.unshard()

    def _weight_ready(self, unit: Unit, full: nn.Parameter) -> None:
        self.synchronised = False
        unit.gradients.collect(full)
        self.expected.discard(unit)
        unit.reshard()
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.gradients.finish()
        unit.gradients.launch()
        self.reduced.add(unit)
        self.reducing.append(unit)
        while len(self.reducing) > IN_FLIGHT:
            self.reducing.pop(0).gradients.finish()

    def _replicated_ready(self, parameter: nn.Parameter) -> None:
        self.synchronised = False
        self.bucket_of[parameter].collect(parameter)

    def _refuse_interrupted(self) -> None:
        """Raises UserError if a backward began and stopped: some of its gradients are reduced, some are not."""
        if self.expected and self.reduced:
            names = ", ".join(sorted(unit.name for unit in self.expected)[:3])
            raise fault(
                f"the last backward ended without a gradient of {names}: call finish_gradient_synchronization() to "
                "keep what there is, or zero_grad() of the wrapper to start anew",
                self.group,
            )

    def finish_gradient_synchronization(self) -> None:
        """Reduce what has not been reduced, and wait for everything. Every rank must call it, before the step."""
        self.structure.check_unchanged()
        while self.remaining > 0:  # layers that this rank's backward did not reach, but perhaps another's
            self.remaining -= 1
            self.layers[self.remaining][1].launch_unshard()
        for unit in self.units:
            unit.reshard()
            if unit not in self.reduced:
                self._reduce(unit)
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
        self.expected, self.reducing, self.reduced, self.synchronised = set(), [], set(), True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, and what an interrupted backward left under way."""
        for unit in self.units:
            unit.reshard()
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

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; returns the norm before, equal on every rank."""
        sharded = [unit.shard.grad for unit in self.units if unit.shard.grad is not None]
        replicated = [p.grad for p in self.bucket_of if p.grad is not None]
        norm = global_norm(sharded, replicated, norm_type, self.group)
        clip_by_norm([*sharded, *replicated], norm, max_norm)
        return norm

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


def _tensors_with_gradient(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)
