"""Base of the data-parallel wrappers, and its guard: checks that protect users, at named points of ddp.py and fsdp.py.

on construction      every parameter has values, and the ranks' modules are equal
before_forward       no parameter was replaced, cast or unfrozen, no shard has a gradient hook
before_gradient      no gradient of an unfinished synchronisation was dropped; from now on optimizers refuse to step,
                     and the ranks compare weights that somebody else changes
on_gradient          note a backward that comes after one that has begun to reduce: every bucket is then reduced twice
before_finish        no parameter was replaced, cast or unfrozen, no gradient dropped
finished             optimizers may step
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler
from torch._C._functorch import peek_interpreter_stack
from torch._compile import _disable_dynamo as uncompiled  # imports the compiler only when called
from torch.autograd import forward_ad
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from cs336_systems.buffers.bucket import REPLICATED, GradBucket, Placement, Sharded
from cs336_systems.buffers.flat import refuse_shared_memory
from cs336_systems.buffers.replicas import Replicas, buffer_lines, require_equal
from cs336_systems.buffers.shard_tensor import raw
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.buffers.steps import guard_of, watch_steps
from cs336_systems.comm import Group, agree, broadcast, default_group, fault, is_fake
from cs336_systems.comm.group import count
from cs336_systems.errors import UserError
from cs336_systems.optim.grad_norm import LocalGradient, clip_local

Parameters = Collection[nn.Parameter]


class Guard:
    """The guard of one wrapper. `names` and `trainable`: the module's parameters when wrapped, but not `ignored`."""

    def __init__(self, wrapper: str, kind: str, module: nn.Module, group: Group, ignored: Set[nn.Parameter]) -> None:
        self.wrapper, self.module, self.group, self.ignored = wrapper, module, group, ignored
        self.synchronised = True
        self.arrived = Counter[nn.Parameter]()  # how often gradients have come since a backward began to reduce them
        self.versions: dict[nn.Parameter, int] = {}  # of weights whose gradient has come and is still this rank's own
        self.hooks: list[RemovableHandle] = []
        earlier: dict[Guard, str] = {}
        for name, parameter in self._named():
            reference = guard_of.get(parameter)
            if found := reference and reference():
                earlier.setdefault(found, name)
                if not found.hooks:  # FSDP's cannot be removed
                    raise fault(f"{name} is sharded by another {found.wrapper} already: wrap it once")
        for name, tensor in (*self._named(), *module.named_buffers()):
            if nn.parameter.is_lazy(tensor) or (tensor.is_meta and not is_fake(group)):
                raise fault(f"{name} has no values yet: materialise the module before it is wrapped")
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
                raise fault(f"{name} has a max_norm, and each rank would change other rows: normalise its output")
        self.taken = ""  # text of the error if another wrapper has one of the parameters
        self._compare_modules(f"wrapper {wrapper}, {kind}")
        self.number = count(group, "wrappers")
        self.mark = f" of wrapper {self.number}" if self.number > 1 else ""  # tells collectives of equal modules apart
        for guard, name in earlier.items():  # two guards would reduce a gradient twice
            guard.release()
            guard.taken = f"{name} has been wrapped by another {wrapper} since: keep one, or use `ignored`"
            guard.synchronised = False  # for a ShardedOptimizer that takes gradients from there
        self.remember_structure()

    def _compare_modules(self, kind: str) -> None:
        """Raises UserError on every rank, with the first difference, unless all ranks have equal modules and kinds."""
        first: dict[Tensor, str] = {}
        lines = []  # one per parameter (tied ones again under each name) and per buffer
        for name, p in self._named(remove_duplicate=False):
            trains, tied = "trainable" if p.requires_grad else "frozen", first.setdefault(p, name)
            tie = f" tied to {tied}" if tied != name else ""
            lines.append(f"parameter {name} {tuple(p.shape)} {p.dtype} {trains}{tie}")
        require_equal("modules", [*lines, *buffer_lines(self.module), kind], self.group)

    def remember_structure(self, full_of: Mapping[nn.Parameter, nn.Parameter] | None = None) -> None:
        """Expect the module's parameters to stay as they are, but for shards in place of their whole weights."""
        self.names = {parameter: name for name, parameter in self._named()}
        self.shards = full_of or {}
        whole = {p: name for p, name in self.names.items() if p not in self.shards}
        self.replicas = Replicas(whole, self.group, self.module, self.number)
        self.names |= {full: self.names[shard] for shard, full in self.shards.items()}
        self.dtypes = {parameter: parameter.dtype for parameter in self.names}
        self.trainable = dict.fromkeys(parameter for parameter in self.names if parameter.requires_grad)

    def _named(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.module.named_parameters(remove_duplicate=remove_duplicate)
        return (each for each in named if each[1] not in self.ignored)

    def refuse_shared_memory(self) -> None:
        """Raises UserError for parameters that share memory, or a buffer that is a view of one: sharding moves them."""
        storages = {p.untyped_storage()._cdata for p in self.names}
        buffers = ((b, name) for name, b in self.module.named_buffers() if b.layout == torch.strided)
        views = [each for each in buffers if each[0].untyped_storage()._cdata in storages]
        refuse_shared_memory([*self.names.items(), *views])

    def protect(self) -> None:
        """Make optimizers refuse to step on parameters that are not synchronised, or whose wrapper is gone."""
        watch_steps()
        for parameter in (*self.trainable, *self.shards, *self.shards.values()):
            guard_of[parameter] = ref(self)

    def release(self) -> None:
        """Remove the hooks and let the parameters be trained on one rank alone."""
        for hook in self.hooks:
            hook.remove()
        self.synchronised = True
        for parameter in self.names:
            if (found := guard_of.get(parameter)) is not None and found() is self:
                del guard_of[parameter]

    def before_forward(self) -> None:
        self._check_unchanged()
        # A backward follows; it may accumulate, unless gradients were dropped.
        gradients = [p.grad for p in self._written() if not isinstance(p.grad, ShardedGradient)]
        if torch.is_grad_enabled() and any(gradient is None or not gradient.any() for gradient in gradients):
            self.versions = {}
            self.replicas.compare_values()
        with raw():
            for shard in self.shards:
                refuse_hooks(shard, self.names[shard], own=1 if shard in self.trainable else 0)

    def _check_unchanged(self) -> None:
        """Refuse a parameter that was replaced, cast or unfrozen: ranks would diverge without an error."""
        if self.taken:
            raise fault(self.taken)
        with raw():
            for name, parameter in self._named():
                if parameter not in self.names:
                    change = "is not the parameter that was wrapped"
                elif parameter.dtype != self.dtypes[parameter]:
                    change = f"was {self.dtypes[parameter]} when wrapped and is {parameter.dtype} now"
                elif parameter.requires_grad and parameter not in self.trainable:
                    change = "was frozen when wrapped and wants a gradient now"
                else:
                    continue
                raise fault(f"{name} {change}; change the module first, then wrap it anew")

    def _written(self) -> list[nn.Parameter]:
        """Weights that were written to before their gradient was reduced, for instance by a step with that gradient."""
        return [p for p, version in self.versions.items() if p._version != version]

    def _refuse_dropped(self, arrived: Set[nn.Parameter]) -> None:
        if any(parameter.grad is None for parameter in arrived):
            raise fault(
                "gradients were dropped between backward and finish_gradient_synchronization(): drop them after it, or "
                "by zero_grad() of the wrapper"
            )

    def before_gradient(self, parameter: nn.Parameter, reduces: bool = True) -> None:
        self.synchronised = False
        if reduces and parameter in self.replicas.names:
            self.versions.setdefault(parameter, parameter._version)
        self._refuse_dropped(self.arrived.keys() & {parameter})

    def on_gradient(self, parameter: nn.Parameter, reduces: bool) -> None:
        if reduces or parameter in self.arrived:
            self.arrived[parameter] += 1

    def before_finish(self) -> None:
        self._check_unchanged()
        self._refuse_dropped(self.arrived.keys())
        self.replicas.doubted |= bool(self._written())

    def second_backward(self) -> bool:
        """True if some gradient of this step has come twice. The ranks agree first, so that their collectives match."""
        again = max(self.arrived.values(), default=1) > 1
        self.arrived.clear()
        if again:
            agree("a second backward before finish_gradient_synchronization()", "", self.group)
        return again

    def finished(self) -> None:
        self.synchronised, self.versions = True, {}

    def reset(self) -> None:
        """Forget the gradients that have come. The ranks agree first if some were being reduced."""
        if self.arrived:
            agree("zero_grad() after an unfinished backward", "", self.group)
        self.replicas.doubted |= bool(self._written())  # compared at the next synchronisation, which all ranks reach
        self.arrived.clear()
        self.finished()

    def require_finished(self, what: str) -> None:
        """Raises UserError if `what` would read gradients that are not synchronised."""
        if not self.synchronised:
            raise UserError(
                f"{what} before {self.wrapper}.finish_gradient_synchronization(): the gradients are still this rank's "
                "own; call it after the last backward of a step"
            )


def refuse_hooks(weight: nn.Parameter, name: str, own: int = 0) -> None:
    """Raises UserError for hooks on a sharded weight's gradient, beyond the wrapper's `own` of each kind."""
    if max(len(hooks or ()) for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks)) > own:
        raise fault(f"{name} has a gradient hook, which would never run since the weight is sharded: remove it")


@uncompiled(recursive=False)
def refuse_transforms() -> None:
    """Raises UserError inside torch.compile, torch.func and forward-mode gradients, which do not run FSDP's hooks."""
    if callable(compiler()):
        raise fault(
            "torch.compile cannot read FSDP, which gathers and frees weights while the model runs: compile the model "
            "block by block before it is wrapped, as in `for block in model.blocks: block.compile()`"
        )
    if peek_interpreter_stack() or forward_ad._current_level >= 0:
        raise fault(
            "FSDP gathers weights in hooks, which torch.func and forward-mode gradients do not run: differentiate with "
            "torch.autograd, or use stages 0 to 2"
        )


def weak_hook(method: Callable[..., None], *first: object) -> Callable[..., None]:
    """A hook that calls the method, with `first` and then torch's arguments, for as long as its object lives: torch's
    gradient hooks, which the garbage collector does not see, would keep both alive for ever."""
    reference, references = WeakMethod(method), [ref(each) for each in first]

    def hook(*rest: Any) -> None:
        if (bound := reference()) is not None:
            bound(*(each() for each in references), *rest)

    return hook


class Wrapper(nn.Module):
    """A module that a group of ranks trains together, starting from rank 0's parameters and buffers. Raises UserError,
    on every rank, if the ranks' modules or the `kind` of wrapper differ."""

    gradients: Placement = REPLICATED  # what each rank keeps of the mean
    kept_gradients: Callable[..., list[LocalGradient]]  # this rank's part of every synchronised gradient, as views

    def __init__(self, kind: str, module: nn.Module, group: Group | None, ignored: Parameters = ()) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UserError(f"{type(self).__name__} wraps a torch.nn.Module, not a {type(module).__name__}")
        ignored = set(ignored)
        if foreign := ignored - {*module.parameters()}:
            raise UserError(f"`ignored` are parameters of the module, which {len(foreign)} of them are not")
        self.module, self.group = module, default_group(group)
        self.guard = Guard(type(self).__name__, kind, module, self.group, ignored)
        if isinstance(self.gradients, Sharded):
            self.guard.refuse_shared_memory()
        # torch's old weight_norm and spectral_norm compute weights before each forward; code may read them before that.
        hooks = ((layer, hook) for layer in module.modules() for hook in layer._forward_pre_hooks.values())
        computed = [getattr(layer, hook.name) for layer, hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]
        for tensor in (*self.guard.names, *module.buffers(), *computed):
            broadcast(tensor.data, 0, self.group, "initial value").wait()

    def make_buckets(
        self, grouped: Iterable[Sequence[nn.Parameter]], kind: str = "bucket", placement: Placement = REPLICATED
    ) -> None:
        """Make a bucket for each group of parameters; optimizers then refuse to step before the synchronisation."""
        names = self.guard.names
        self.buckets = [
            GradBucket(ps, self.group, f"{kind} {i}, from {names[ps[0]]}{self.guard.mark}", placement, names=names)
            for i, ps in enumerate(grouped)
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.guard.protect()

    def end_synchronisation(self) -> None:
        """Give every rank the buffers of rank 0, so that one rank may evaluate alone, and let optimizers step."""
        for name, buffer in self.module.named_buffers():
            broadcast(buffer, 0, self.group, f"buffer {name}").wait()
        self.guard.finished()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            f"copy the module before it is wrapped, or save its state: {type(self).__name__} belongs to its group and "
            "parameters"
        )

    def check_replicas(self) -> None:
        """Compare all replicated parameters and buffers; UserError names one that differs. Every rank must call it."""
        self.guard.replicas.read()
        self.guard.replicas.compare_values(self.module.named_buffers())

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; returns the norm before, equal on every rank."""
        self.guard.require_finished("clip_grad_norm()")
        return clip_local(self.kept_gradients(), max_norm, norm_type, self.group)
