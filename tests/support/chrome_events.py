"""Traces made by hand: events of Chrome's format with times in microseconds, as torch.profiler writes them."""

from typing import Any

from cs336_systems.profiling.trace import Trace, parse

MAIN, GLOO, STREAM = (1, 1), (1, 2), (0, 7)


def event(
    name: str, start: float, length: float, lane: tuple[Any, Any] = MAIN, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    """An operator, or with `cat` something else, from `start` for `length` microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": lane[0], "tid": lane[1], "ts": start, "dur": length} | (
        {"args": args} if args else {}
    )


def tag(name: str, start: float, length: float, lane: tuple[Any, Any] = MAIN) -> dict[str, Any]:
    """An annotation: a step, a phase, a module, a collective."""
    return event(name, start, length, lane, "user_annotation")


def product(name: str, start: float, length: float, *shapes: list[int], **args: Any) -> dict[str, Any]:
    """An operator with the shapes of its inputs."""
    return event(name, start, length, **{"Input Dims": list(shapes)}, **args)


def backward(node: str, start: float, length: float, forward: float, number: int) -> list[dict[str, Any]]:
    """A node of autograd's engine that the operator started at `forward` made."""
    flow = {"cat": "fwdbwd", "name": "fwdbwd", "pid": MAIN[0], "tid": MAIN[1], "id": number}
    return [
        event(f"autograd::engine::evaluate_function: {node}", start, length),
        event(node, start, length),
        flow | {"ph": "s", "ts": forward},
        flow | {"ph": "f", "ts": start, "bp": "e"},
    ]


def trace(*events: Any, **ours: Any) -> Trace:
    """The trace of some events and lists of events."""
    flat = [each for item in events for each in (item if isinstance(item, list) else [item])]
    return parse({"traceEvents": flat, "cs336": ours})
