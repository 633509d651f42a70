"""Transfer of traces that ranks wrote on other machines to rank 0's machine."""

from pathlib import Path

import torch

from cs336_systems.comm import Group, agree, broadcast
from cs336_systems.errors import UserError
from cs336_systems.profiling.trace import trace_name


def collect_files(folder: Path, group: Group, device: torch.device) -> None:
    """Rank 0 writes every other rank's trace into its own `folder`; every rank must call this. Files travel as tensors
    of `device`, on which the group communicates. Raises UserError, on rank 0, if it cannot."""
    me = group.rank()
    mine = (folder / trace_name(me)).read_bytes() if (folder / trace_name(me)).exists() else b""
    sizes = [int(size) for size in agree("sizes of the traces", str(len(mine)), group)]
    for rank in range(1, group.size()):
        content = torch.zeros(sizes[rank], dtype=torch.uint8, device=device)
        if rank == me and mine:
            content = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        broadcast(content, rank, group, f"trace of rank {rank}").wait()
        if me == 0 and sizes[rank]:
            try:
                (folder / trace_name(rank)).write_bytes(bytes(content.cpu().numpy()))
            except OSError as error:
                raise UserError(f"cannot write rank {rank}'s trace to {folder}: {error.strerror}") from None
