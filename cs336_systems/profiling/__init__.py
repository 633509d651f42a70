"""Profiling of all ranks at once: where time and memory go. Analysis is plain Python over the traces' JSON."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cs336_systems.profiling.trace import Trace, read_trace, trace_files

if TYPE_CHECKING:
    from cs336_systems.profiling.capture import Capture

__all__ = ["Capture", "Trace", "read_trace", "trace_files"]


def __getattr__(name: str) -> Any:
    """Load torch for `Capture` only, so that commands over traces need neither its time nor its memory."""
    if name != "Capture":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return import_module("cs336_systems.profiling.capture").Capture
