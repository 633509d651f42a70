"""Profiling of all ranks at once: where time and memory go. Analysis is plain Python over the traces' JSON."""

from cs336_systems.profiling.capture import Capture
from cs336_systems.profiling.trace import Trace, read_trace, trace_files

__all__ = ["Capture", "Trace", "read_trace", "trace_files"]
