"""PyTorch's own snapshot of a GPU's allocator, for pytorch.org/memory_viz: every allocation with its Python stack."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cs336_systems.errors import UserError

ENTRIES = 100_000  # events that are kept, the newest; the viewer gets slow beyond


@contextmanager
def memory_snapshot(path: Path, entries: int = ENTRIES) -> Iterator[None]:
    """Records what the block allocates on the GPU and writes it to `path`, also if the block fails (out of memory).

    The file is Python's own serialisation of lists and dicts (protocol 4), whatever its name: call it
    `memory_snapshot.bin` and drop it on pytorch.org/memory_viz, which takes any name and uploads nothing. At most
    `entries` events are kept. Raises UserError without a GPU, since the CPU's allocator keeps no such history.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "a memory snapshot needs a GPU, and this machine has none; the memory timeline (profiling.memory_svg) is "
            "drawn for a CPU, too"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"cannot write the memory snapshot {path}: {error.strerror}; name another file") from None
    torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
