"""ZeRO stage 3: parameters, gradients and optimizer state are all sharded; a layer's weight is whole while it is used.

Before a layer's forward, and again before its backward, its weight is gathered from all ranks; after each it is freed.
Its gradient is reduce-scattered as soon as it is complete. The traffic is 3/2 of data parallelism's, the memory 1/N
(Rajbhandari et al., arXiv:1910.02054, section 5.3; Zhao et al., PyTorch FSDP, arXiv:2304.11277).

    forward     gather 0 1 2 | compute 0, free 0, gather 3 | compute 1, free 1, gather 4 | ...
    backward    gather 7 6 5 | compute 7, free 7, reduce-scatter 7, gather 4 | ...    (eight layers)

    hook of a layer    pre_forward          post_forward     pre_backward         post_backward
    it does            gather and unshard   reshard          gather and unshard   reshard, reduce
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as uncompiled  # imports the compiler only when called

from cs336_systems.buffers.bucket import GradBucket, Sharded
from cs336_systems.buffers.flat import plan_buckets
from cs336_systems.buffers.gather_order import cast, shard_weights, tensors_with_gradient
from cs336_systems.buffers.guards import Parameters, Wrapper, refuse_transforms, weak_hook
from cs336_systems.buffers.replicas import finish_all
from cs336_systems.buffers.shard_tensor import raw
from cs336_systems.buffers.sharded_parameter import ShardedParameter
from cs336_systems.comm import Group
from cs336_systems.errors import UserError
from cs336_systems.optim.grad_norm import LocalGradient


class FSDP(Wrapper):
    """A module whose parameters of two or more axes are sharded by rows, the first axis; the rest is replicated.

    `parameters()` are this rank's shards, in the module's dtype: give them to any elementwise optimizer. Sharded layers
    compute in `compute_dtype`; norms get inputs in the module's. Gradients of sharded weights are reduced in
    `reduce_dtype` (default: the module's). With `reshard_after_forward=False` weights stay whole from forward to
    backward: one gather fewer, but memory for all weights.

    After the last backward of a step call `finish_gradient_synchronization()`. Every forward and backward communicates:
    all ranks must run it, evaluation too. A rank may leave a layer out if layers are called in the order in which they
    are registered and every output counts in the loss. torch.compile works on the blocks, but not on the whole.
    """

    gradients = Sharded(in_flight=2)

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, group: Group | None = None,
        ignored: Parameters = (), reshard_after_forward: bool = True, reduce_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise UserError(f"{name} {dtype} is not a floating-point dtype, such as torch.bfloat16")
        chosen = f"compute dtype {compute_dtype}, reduce dtype {reduce_dtype}, resharded {reshard_after_forward}"
        super().__init__(chosen, module, group, ignored)
        self.compute_dtype, self.reshard_after_forward = compute_dtype, reshard_after_forward
        self.order = shard_weights(module, compute_dtype, reduce_dtype, self.guard, self._lend)
        self.sharded = list(dict.fromkeys(self.order.weights))
        replicated = [p for p in self.guard.replicas.names if p.requires_grad]
        self.make_buckets(plan_buckets(replicated, float("inf")), "replicated gradients")
        self.in_forward = False
        self.expected: set[ShardedParameter] = set()  # took part in a forward and have no gradient yet
        self.borrowed: set[ShardedParameter] = set()  # read outside their layers in this forward
        self.reduced: set[ShardedParameter] = set()  # in this backward
        self.backward = -1  # autograd's number of the backward that is under way, or of the last
        self.reducing: deque[GradBucket] = deque()  # launched and not awaited
        for number, (layer, weight) in enumerate(self.order.calls):
            layer.register_forward_pre_hook(partial(self._pre_forward, number, weight))
            layer.register_forward_hook(partial(self._post_forward, self.order.back_number[layer, weight], weight))
        module.register_forward_hook(self._after_bare_forward)
        for weight in (weight for weight in self.sharded if weight.trainable):
            weight.shard.register_hook(weak_hook(self._before_own_gradient, weight))
            weight.shard.register_post_accumulate_grad_hook(weak_hook(weight.promise_gradient))
            weight.full.register_hook(weak_hook(self._before_gradient, weight))
            weight.full.register_post_accumulate_grad_hook(weak_hook(self._post_backward, weight))
        for parameter in self.bucket_of:
            parameter.register_hook(weak_hook(self._before_any_gradient, parameter))
            parameter.register_post_accumulate_grad_hook(weak_hook(self.bucket_of[parameter].mark_ready))

    @uncompiled(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; floating-point outputs come in the module's own dtype."""
        refuse_transforms()
        self.guard.before_forward()
        if self.in_forward:
            raise UserError("FSDP is inside `forward`: it cannot begin another pass there")
        if torch.is_grad_enabled() and not self.guard.synchronised:  # a second backward follows
            self._end_backward()
        for weight in self.sharded:
            weight.reshard()
        self.in_forward, self.order.gathered, self.borrowed = True, 0, set()
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            self.in_forward = False
        self.order.forward_to(end := len(self.order.calls), self._keeps_whole())
        if torch.is_grad_enabled():
            self.order.passed_back = self.order.gathered_back = end
        for weight in self.sharded:
            weight.reshard(keep=self._keeps_whole())
        for tensor in tensors_with_gradient(output, "the module") if self.borrowed else ():
            tensor.register_hook(partial(self._borrow_again, self.borrowed))
        return cast(output, self.sharded[0].shard.dtype) if self.compute_dtype and self.sharded else output

    @uncompiled
    def _pre_forward(self, number: int, weight: ShardedParameter, layer: nn.Module, args: Any) -> None:
        if self.in_forward:  # else it is recomputed in backward
            self.order.forward_to(number, self._keeps_whole())
        weight.unshard()

    @uncompiled
    def _post_forward(self, number: int, weight: ShardedParameter, layer: nn.Module, args: Any, output: Any) -> None:
        tensors = tensors_with_gradient(output, weight.name)
        for tensor in (each for each in tensors if each is not weight.full):
            tensor.register_hook(partial(self._pre_backward, number, weight))
        if tensors and weight.shard.requires_grad:
            self.expected.add(weight)
        if weight in self.borrowed or weight.lies_in(output):  # code outside may still read it
            self.borrowed.add(weight)
        elif self.in_forward and not self._keeps_whole():  # else it is recomputed in backward, which needs it at once
            weight.reshard()
        if tensors and not weight.shard.requires_grad:  # frozen: no gradient hook frees it
            for tensor in tensors_with_gradient(args):
                tensor.register_hook(lambda gradient: weight.reshard())

    @uncompiled
    def _after_bare_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the weights that a pass of the bare module without a gradient has gathered; no backward will."""
        if not (self.in_forward or tensors_with_gradient(output) or torch._C._current_graph_task_id() != -1):
            for weight in self.sharded:
                weight.reshard()

    def _keeps_whole(self) -> bool:
        return not self.reshard_after_forward and torch.is_grad_enabled()

    def _pre_backward(self, number: int, weight: ShardedParameter, gradient: Tensor) -> None:
        self._before_any_gradient(weight.full)
        self._walk_back(number)
        weight.unshard()
        if not weight.shard.requires_grad:  # frozen after wrapping; other ranks may still reduce it
            self._reduce(weight)

    def _before_gradient(self, weight: ShardedParameter, gradient: Tensor) -> None:
        self._before_any_gradient(weight.full)
        weight.gradients.finish()  # a second gradient must not be added to a buffer that is being reduced

    def _post_backward(self, weight: ShardedParameter, full: nn.Parameter) -> None:
        weight.gradients.mark_ready(full)
        self.expected.discard(weight)
        weight.reshard()
        self.reduced.discard(weight)
        self._reduce(weight)

    def _reduce(self, weight: ShardedParameter) -> None:
        """Start the reduce-scatter of a weight's gradient, or of zeros, once in a backward."""
        if weight in self.reduced or not weight.trainable:
            return
        while len(self.reducing) >= self.gradients.in_flight:
            self.reducing.popleft().finish()
        weight.gradients.launch()
        self.reduced.add(weight)
        self.reducing.append(weight.gradients)

    def _walk_back(self, number: int) -> None:
        """Advance to a layer in backward; reduce zeros for layers that this rank skipped."""
        for weight in self.order.back_to(number):
            if weight not in self.expected:
                weight.reshard()
                self._reduce(weight)

    def _before_any_gradient(self, parameter: nn.Parameter, gradient: Tensor | None = None) -> None:
        self.guard.before_gradient(parameter)
        if (backward := torch._C._current_graph_task_id()) != self.backward:  # the first gradient of a backward
            self.backward = backward
            for weight in self.sharded:
                weight.promise_gradient()

    def _before_own_gradient(self, weight: ShardedParameter, gradient: Tensor) -> None:  # of a penalty on shards
        self._before_any_gradient(weight.shard)
        weight.take_back_promise()

    def _lend(self, weight: ShardedParameter) -> nn.Parameter | None:
        """The whole weight for code outside its layer, until the end of the pass; None between passes."""
        if not self.in_forward and torch._C._current_graph_task_id() == -1:  # nor recomputed in backward
            return None
        if not weight.unsharded:
            weight.unshard()
            if torch.is_grad_enabled() and weight.shard.requires_grad:
                self.expected.add(weight)
            self.borrowed.add(weight)
        return weight.full

    def _borrow_again(self, borrowed: set[ShardedParameter], gradient: Tensor) -> None:
        for weight in sorted(borrowed, key=lambda weight: weight.name):
            weight.unshard()

    def _end_backward(self) -> None:
        """Reduce zeros for layers that only other ranks' backward reached."""
        self._walk_back(-1)
        for weight in reversed(self.sharded):  # in the order of a backward, for which another rank may wait
            weight.reshard()
            self._reduce(weight)
        self.expected, self.reduced = set(), set()

    def finish_gradient_synchronization(self) -> None:
        """Reduce what has not been reduced, and wait for everything. Every rank must call it, before the step."""
        self.guard.before_finish()
        self._end_backward()
        for weight in self.sharded:
            weight.forget_dropped()
        for bucket in self.buckets:
            bucket.launch()
        finish_all([*(weight.gradients for weight in self.sharded), *self.buckets], self.guard.replicas)
        for weight in self.sharded:
            weight.deliver_gradient()
        self.end_synchronisation()

    def extra_repr(self) -> str:
        """Number of sharded parameters and elements, for `print(model)`."""
        split = sum(weight.shape.numel() for weight in self.sharded)
        whole = sum(p.numel() for p in self.guard.replicas.names)
        kept = whole + sum(weight.shard.numel() for weight in self.sharded)
        return f"shards {split:,} of {split + whole:,} parameters: this rank keeps {kept:,}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. After an interrupted backward every rank must call it."""
        if not self.guard.synchronised:
            self._end_backward()
        for weight in self.sharded:
            weight.promised = False  # even if its stand-in was dropped or replaced
            weight.take_back_promise()
        for bucket in (*(weight.gradients for weight in self.sharded), *self.buckets):
            bucket.reset()
        self.expected = set()
        self.guard.finished()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: for loops written for other wrappers. Each backward reduces its gradients and adds them to the
        shards, since keeping them whole would cost the memory that sharding saves."""
        return nullcontext()

    def kept_gradients(self) -> list[LocalGradient]:
        with raw():
            kept = [(w.shard, w.shard.grad.as_subclass(Tensor)) for w in self.sharded if w.shard.grad is not None]
        whole = [each for bucket in self.buckets for each in bucket.local_gradients()]
        return [LocalGradient(shard, gradient, True) for shard, gradient in kept] + whole

    def gather_full_params(self) -> dict[str, Tensor]:
        """Gather a copy of the whole state, in the format of the unwrapped `module.state_dict()`, to save or load (the
        wrapped module's own is refused on more than one rank). Every rank must call this."""
        sharded, state = {weight.shard: weight for weight in self.sharded}, self.module.state_dict(keep_vars=True)
        values = dict.fromkeys(state.values())  # tied ones are one tensor under each name
        copies = {value: sharded[value].gather() if value in sharded else value.detach().clone() for value in values}
        return {name: copies[value] for name, value in state.items()}
