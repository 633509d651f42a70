"""ZeRO stage 1: every rank keeps the optimizer's state for its share of the parameters, updates this share and sends it
to the others.

The state (8 bytes per parameter for fp32 AdamW, as much as parameters and gradients together) shrinks to 1/N per rank.
Each step needs one all-gather of the parameters (Rajbhandari et al., arXiv:1910.02054, section 5.1).

Parameters live in one flat buffer, and the two layouts differ only in where it is cut into the ranks' shares:

    flat     into equal slices, also inside a parameter: balanced, one all-gather; for element-wise optimizers only
    whole    between parameters, which are dealt to the ranks from the largest on: for any optimizer; as balanced as
             the sizes allow; one broadcast per rank, or one all-gather if slices are equal
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_systems.buffers.flat import FlatLayout, plan_buckets
from cs336_systems.buffers.guards import Wrapper
from cs336_systems.buffers.param_buffer import ParameterBuffer, Part
from cs336_systems.buffers.replicas import require_equal
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.buffers.steps import guard_of, require_elementwise
from cs336_systems.comm import Group, default_group
from cs336_systems.comm.group import count
from cs336_systems.errors import UserError


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs any optimizer class with its parameters divided over the ranks of a group.

    Gradients must be equal on all ranks when `step` is called; with `wrapper`, whose gradients are sharded, they come
    from there (stage 2). Parameters are moved into a flat buffer, so move or cast the module before. The state has the
    unsharded optimizer's format and loads at any number of ranks. Every rank must make the same optimizers, in the same
    order. Raises UserError if the class cannot be sharded.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], optimizer_cls: type[torch.optim.Optimizer],
        group: Group | None = None, layout: Literal["flat", "whole"] = "flat", wrapper: Wrapper | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if layout not in ("flat", "whole"):
            raise UserError(f'layout {layout!r} does not exist; it is "flat" or "whole"')
        # A throw-away optimizer of one number checks the options and supplies their defaults.
        trial = optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **kwargs)
        if isinstance(trial, torch.optim.LBFGS):
            raise UserError("LBFGS searches along one direction for all parameters at once; it cannot be sharded")
        if isinstance(trial, torch.optim.SparseAdam):
            raise UserError("SparseAdam takes sparse gradients; only dense ones can be sharded")
        if layout == "flat":
            require_elementwise(optimizer_cls, kwargs)
        self.group, self.layout, self.wrapper = default_group(group), layout, wrapper
        self.buffers: list[ParameterBuffer] = []
        self.parts: dict[nn.Parameter, Part] = {}  # this rank's, by the model's parameters
        self.inner: torch.optim.Optimizer = None  # type: ignore[assignment]  # until the base class has the groups
        super().__init__(params, trial.defaults)
        if wrapper is not None:
            if not wrapper.bucket_of.keys() <= self._numbers().keys():
                raise UserError("the wrapper synchronises parameters that the optimizer was not given")
            for bucket in wrapper.buckets:  # so that a rank owns those elements of which it has the gradient
                self._add_buffer(bucket.parameters, bucket.layout)
        self._compare_order()
        number = count(self.group, "sharded optimizers")  # equal on all ranks, since all have come here
        self.label = f"updated parameters{f' of optimizer {number}' if number > 1 else ''}"  # tells optimizers apart
        self.inner = optimizer_cls(list(map(self._share, self.param_groups)), **kwargs)
        self._take_state()

    def _compare_order(self, first: int = 0) -> None:
        """Raises UserError on every rank unless the groups from number `first` on have the same parameters in the same
        order on all, as those of a set have not: a rank would send others the elements of other parameters."""
        lines = []
        for number, group in enumerate(self.param_groups[first:], first):
            for p in group["params"]:
                guard = reference() if (reference := guard_of.get(p)) else None
                name = guard.names[p] if guard else "a parameter"
                lines.append(f"{name} {tuple(p.shape)} {p.dtype} in group {number}")
        require_equal("optimizer parameters", lines, self.group, ": give every rank the same order")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also during training. Every rank must add the same."""
        if self.inner is not None and self.wrapper is not None:
            raise UserError("gradients come from the wrapper's shards: wrap the module anew to optimize more of it")
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if (again := len(added["params"]) - len(set(added["params"]))) > 0:
            raise UserError(f"{again} of {len(added['params'])} parameters are given twice: give each once")
        if self.wrapper is None:
            pack = FlatLayout.pack if self.layout == "flat" else FlatLayout.whole
            for same in plan_buckets([p for p in reversed(added["params"]) if p.requires_grad], math.inf):
                self._add_buffer(same, pack(same, self.group.size()))
        if self.inner is not None:
            self._compare_order(len(self.param_groups) - 1)
            self.inner.add_param_group(self._share(added))
            self._take_state()

    def _add_buffer(self, parameters: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self.buffers.append(ParameterBuffer(parameters, layout, self.group))
        self.parts |= {part.owner: part for part in self.buffers[-1].parts}

    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        """Parameter group for the inner optimizer: the same options, and this rank's parts of the parameters."""
        return {**group, "params": [self.parts[p].tensor for p in group["params"] if p in self.parts]}

    @torch.no_grad()
    def _attach_gradients(self) -> None:
        """Give each part its piece of the gradient, as a view. None stays None: the inner optimizer skips it."""
        if self.wrapper is None:
            found = {p.owner: p.piece.of(p.owner.grad) for p in self.parts.values() if p.owner.grad is not None}
        else:
            found = {each.parameter: each.gradient for each in self.wrapper.kept_gradients()}
        for part in self.parts.values():
            gradient = found.get(part.owner)
            part.tensor.grad = None if gradient is None else gradient.view_as(part.tensor)

    def _check(self) -> None:
        if self.wrapper is not None:
            self.wrapper.guard.require_finished("step()")
        for buffer in self.buffers:
            buffer.check_in_place()
        stored = {parameter for buffer in self.buffers for parameter in buffer.parameters}
        for owner in self._numbers():
            if owner.grad is None or isinstance(owner.grad, ShardedGradient):
                continue
            if owner.grad.layout != torch.strided:
                raise UserError(
                    f"a gradient of shape {tuple(owner.shape)} is sparse and cannot be cut: use sparse=False, or a "
                    "data-parallel wrapper, which makes it dense"
                )
            if owner not in stored:
                raise UserError(
                    f"a parameter of shape {tuple(owner.shape)} was frozen when the sharded optimizer was made and has "
                    "a gradient now; make the optimizer anew"
                )
            if self.wrapper is not None:
                raise UserError(
                    f"a `.grad` of shape {tuple(owner.shape)} was assigned after the synchronisation, but a step takes "
                    "the wrapper's shards: change kept_gradients() in place, or use stage 1"
                )

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's share and gather the others'; a closure is run first and its loss returned. `kwargs` go to
        the inner step. Raises UserError for gradients that are not synchronised and parameters that have been moved."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._check()
        self._attach_gradients()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner |= self._share(group)  # learning rates and the like, which schedulers change
        for part in (part for part in self.parts.values() if part.owner in self.state):
            self.inner.state[part.tensor] = self.state.pop(part.owner)
        try:
            self.inner.step(**kwargs)
        finally:
            self._take_state()
            for part in self.parts.values():
                part.tensor.grad = None
        self._copy_settings(self.inner.param_groups)  # some optimizers change their own settings
        for buffer in self.buffers:
            buffer.all_gather(self.label)
            torch.autograd.graph.increment_version(buffer.parameters)  # for graphs from before the step
        return loss

    def _take_state(self) -> None:
        """Move the inner optimizer's state of each part to the parameter, also after a step that failed."""
        for part in (part for part in self.parts.values() if part.tensor in self.inner.state):
            self.state[part.owner] = self.inner.state.pop(part.tensor)

    def _copy_settings(self, source: list[dict[str, Any]]) -> None:
        for group, other in zip(self.param_groups, source, strict=True):
            group |= {key: value for key, value in other.items() if key != "params"}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model, and of the wrapper's shards."""
        if self.wrapper is None:
            super().zero_grad(set_to_none)
        else:
            self.wrapper.zero_grad(set_to_none)

    def __getstate__(self) -> Any:
        raise UserError("a copy would have this rank's state alone: save state_dict(), called on every rank")

    def state_dict(self, to: int | None = None) -> dict[str, Any]:
        """Gather the whole state, in the format of the unsharded optimizer, on every rank or on the group's rank `to`.
        The others then get an empty dict, and never hold more than their share. Every rank must call this."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        numbers = self._numbers()
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        state: dict[str, Any] = {"state": {}, "param_groups": groups}
        for buffer in self.buffers:
            state["state"] |= buffer.gather_state(self.state, numbers, to)
        if to not in (None, self.group.rank()):
            return {}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state. Raises ValueError for that of other parameters or algorithms."""
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        getattr(self.inner, "check_state", lambda _: None)(state_dict)
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the state's parameter groups have other sizes than this optimizer's")
        saved_numbers = chain.from_iterable(group["params"] for group in saved)
        numbers = dict(zip(self._numbers(), saved_numbers, strict=True))
        self.state.clear()
        for buffer in self.buffers:
            wider = getattr(self.inner, "moments_dtype", None)  # FusedAdamW's and MasterAdamW's
            self.state.update(buffer.slice_state(state_dict["state"], numbers, wider))
        self._copy_settings(saved)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _numbers(self) -> dict[nn.Parameter, int]:
        """Indices of the model's parameters in the unsharded optimizer's state."""
        ordered = chain.from_iterable(group["params"] for group in self.param_groups)
        return {parameter: number for number, parameter in enumerate(ordered)}
