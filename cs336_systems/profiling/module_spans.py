"""Spans of modules: every module's forward pass under its qualified name, `blocks.0.attention (SelfAttention)`.

Global hooks, so that a worker function is profiled unchanged: the first module that is called names those inside it. A
backward pass needs no such spans; `timeline.py` finds for each of its operators the module whose forward made it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Annotate = Callable[[str], AbstractContextManager[Any]]

ROOT = "model"
TAG = re.compile(r"^([^\s()]+) \((\w+)\)$")
# The part of a model that a class belongs to, by a word in its name; the first that fits counts.
KINDS = {
    "moe": re.compile("MoE|Expert"),
    "attention": re.compile("Attention"),
    "norm": re.compile("Norm"),
    "feed-forward": re.compile("FeedForward|MLP|SwiGLU"),
    "embedding": re.compile("Embedding"),
    "block": re.compile("Block|Layer$"),
    "linear": re.compile("Linear"),
}


def tag(path: str, module: nn.Module) -> str:
    """The name of a module's span."""
    return f"{path or ROOT} ({type(module).__name__})"


def parse_tag(name: str) -> tuple[str, str] | None:
    """(qualified name, class) of the module that a span is about, if it is about one."""
    match = TAG.match(name)
    return (match[1], match[2]) if match else None


def kind_of(class_name: str) -> str:
    """attention, norm, feed-forward, moe, embedding, block, linear or other."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(class_name)), "other")


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Every module's qualified name. A wrapper that holds the model does not change the names."""
    inner, names = root, {}
    while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
        names[inner] = "wrapper"
        inner = wrapped
    return names | {module: name for name, module in inner.named_modules()}


class Names:
    """The names of all modules that are called. The model, given or called first, gives its own; another that is called
    by itself, such as a loss, goes by its class."""

    def __init__(self, model: nn.Module | None) -> None:
        self.known = module_names(model) if model is not None else {}
        self.others: Counter[str] = Counter()

    def of(self, module: nn.Module) -> str:
        """The module's qualified name."""
        if module not in self.known:
            found = module_names(module)
            if self.known and not any(each in self.known for each in found):  # neither the first nor around the known
                name = type(module).__name__
                self.others[name] += 1
                name += f"_{self.others[name]}" if self.others[name] > 1 else ""
                found = {each: f"{name}.{inner}".rstrip(".") for each, inner in found.items()}
            self.known.update(found)
        return self.known[module]


@contextmanager
def tag_modules(annotate: Annotate = torch.profiler.record_function, model: nn.Module | None = None) -> Iterator[None]:
    """Inside the block every module's forward is annotated with its tag; compiled code is left alone."""
    names = Names(model)
    open_tags: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        span = annotate(tag(names.of(module), module))
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
