"""Tags: every module's forward pass as a span that bears its qualified name, `blocks.0.attention (SelfAttention)`.

Global hooks, so that a worker function is profiled unchanged: the first module that is called names those inside it. A
backward pass needs no tags; `attribution.py` finds for each of its operators the module whose forward made it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Annotate = Callable[[str], AbstractContextManager[Any]]

ROOT = "model"
TAG = re.compile(r"^([\w.]+) \((\w+)\)$")
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
    """Every module's qualified name. A wrapper that holds the model as `.module` does not change the names."""
    inner, names = root, {}
    while isinstance(wrapped := getattr(inner, "module", None), nn.Module):
        names[inner] = "wrapper"
        inner = wrapped
    return names | {module: name for name, module in inner.named_modules()}


@contextmanager
def tag_modules(annotate: Annotate = torch.profiler.record_function) -> Iterator[None]:
    """Inside the block every module's forward is annotated with its tag; compiled code is left alone."""
    names: dict[nn.Module, str] = {}
    open_tags: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in names:
            names.update({each: name for each, name in module_names(module).items() if each not in names})
        span = annotate(tag(names[module], module))
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
