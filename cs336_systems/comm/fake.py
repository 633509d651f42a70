"""One rank alone, as if all others were there: torch's fake process group, whose collectives return at once and move
nothing.

The library runs under it as the rank of a layout of any size, also on the meta device, and `record()` lists what that
rank would send: the prediction of traffic is the code itself. Results are void; what would depend on other ranks'
values, such as an agreement, is answered as if all had given this rank's.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend
from torch._C._distributed_c10d import HashStore

from cs336_systems.errors import UserError

FAKE = "fake"


def is_fake(group: dist.ProcessGroup) -> bool:
    """True if the group's other ranks do not exist."""
    return dist.get_backend(group) == FAKE


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """Be rank `rank` of `world_size` inside the block, without any other process; yields the group of all ranks.

    Raises UserError for a rank that does not exist, or inside a process group of real ranks.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} does not exist among {world_size} ranks")
    if dist.is_initialized():
        raise UserError("a process group of real ranks is running: imitate ranks before it starts, or after its end")
    hook = sys.excepthook  # torch's adds the rank to every error
    dist.init_process_group(FAKE, store=HashStore(), rank=rank, world_size=world_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
