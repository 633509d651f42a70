"""Labels that `Capture` gives the profiler: the module whose forward runs, `blocks.0.attention (SelfAttention)`, by
global hooks, so that a worker is profiled unchanged, and the category of each storage. (Backward: `timeline.py`.)"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cs336_systems.comm.events import MARK
from cs336_systems.profiling.names import LINE_UP, ROOT, STEP, WRAPPER
from cs336_systems.profiling.trace import parse

Annotate = Callable[[str], AbstractContextManager[Any]]
Label = tuple[int, str, int]  # nanoseconds since the epoch, category, address


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Every module's qualified name. A wrapper around the model does not change the names."""
    inner, names = root, {}
    while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
        names[inner] = WRAPPER
        inner = wrapped
    return names | {module: name for name, module in inner.named_modules()}


@contextmanager
def tag_modules(annotate: Annotate = torch.profiler.record_function, model: nn.Module | None = None) -> Iterator[None]:
    """Annotate every module's forward inside the block with its name and class, but not in compiled code. Names are
    those inside the model, given or called first; another module, such as a loss, has only its class."""
    known = module_names(model) if model is not None else {}
    open_tags: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in known:
            found = module_names(module)
            if known and not any(each in known for each in found):  # neither the first model nor a wrapper of it
                found = {each: f"{type(module).__name__}.{inner}".rstrip(".") for each, inner in found.items()}
            known.update(found)
        span = annotate(f"{known[module] or ROOT} ({type(module).__name__})")
        span.__enter__()
        open_tags.append((module, span))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if open_tags and open_tags[-1][0] is module:
            open_tags.pop()[1].__exit__(None, None, None)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Held(NamedTuple):
    """A storage: its category, address, size in bytes and type of device."""

    category: str
    address: int
    nbytes: int
    device: str


def held_by(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """(category, tensor) of a model's parameters, buffers and gradients and of an optimizer's state; of a sharded
    optimizer also those of the optimizer inside it, `inner`."""
    parameters: list[Tensor] = [*model.parameters(), *model.buffers()] if model is not None else []
    states: list[Any] = []
    while optimizer is not None:
        parameters += [each for group in optimizer.param_groups for each in group["params"]]
        states += [each for state in optimizer.state.values() if isinstance(state, dict) for each in state.values()]
        optimizer = getattr(optimizer, "inner", None)
    for parameter in parameters:
        yield "parameters", parameter
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    yield from (("optimizer state", each) for each in states if isinstance(each, Tensor))


def describe(held: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """The storages of some tensors, each once, under the first category given for it."""
    found: dict[int, Held] = {}
    for category, whole in held:
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole  # a DTensor's local part
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes():
            address = storage.data_ptr()
            found.setdefault(address, Held(category, address, storage.nbytes(), storage.device.type))
    return list(found.values())


def live_storages(known: Iterable[Held]) -> list[Held]:
    """Label every other storage of a tensor that Python can find, such as a batch, as `other`."""
    seen = {each.address for each in known}
    gc.collect()
    plain = (Tensor, nn.Parameter)  # not a DTensor, whose local tensor is found by itself, nor a fake
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) in plain]
    return [each for each in describe(("other", tensor) for tensor in tensors) if each.address not in seen]


def clean(chrome: dict[str, Any], held: list[Held], stepwise: bool) -> tuple[list[Held], list[Label]]:
    """Take the memory labels out of a trace's events and, `stepwise`, all before the first step; returns what was held
    in memory then, and the labels since. The line-up of the ranks stays, in a category that no table counts."""
    trace, labels, categories = parse(chrome), list[Label](), dict[int, str]()
    start = min((span.start for span in trace.spans if STEP.match(span.name)), default=0) if stepwise else 0
    for span in trace.spans:
        if span.name.startswith(MARK):
            category, _, address = span.name.removeprefix(MARK).rpartition(" ")
            if span.start < start:
                categories[int(address)] = category
            else:
                labels.append((span.start, category, int(address)))
    alive = {each.address: each for each in held}
    for each in trace.allocations:
        if each.time < start:
            alive.pop(each.address, None)
            if each.nbytes > 0:
                category = categories.get(each.address, "other")
                alive[each.address] = Held(category, each.address, each.nbytes, each.device)

    def stays(event: dict[str, Any]) -> bool:
        name, begin = str(event.get("name", "")), trace.base + round(1000 * event.get("ts", 0))
        if name == LINE_UP and event.get("cat") == "user_annotation":
            event["cat"] = LINE_UP
        kept = event.get("ph") == "M" or event.get("cat") == LINE_UP
        return kept or (begin >= start and not name.startswith(MARK))

    chrome["traceEvents"] = list(filter(stays, chrome["traceEvents"]))
    return list(alive.values()), labels
