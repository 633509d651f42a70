"""The backend that moves the tensors of a group, and buffers that need no copy in shared memory."""

import os
import platform
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.comm.group import Group
from cs336_systems.comm.shared_memory import transport


def can_share() -> bool:
    """True on a machine whose ranks can share memory here: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def shared_empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """A flat tensor, not filled, of memory that the group's ranks can map, if they share any."""
    private = not transport.on or device.type != "cpu" or not numel or group.size() == 1
    return torch.empty(numel, dtype=dtype, device=device) if private else transport.pool.buffer(numel, dtype)


def copies(group: Group, tensor: Tensor) -> bool:
    """True if the group's collectives copy a tensor that does not lie in a buffer of `shared_empty`."""
    return group.size() > 1 and transport.serves(group, tensor)


def backend_of(group: Group) -> str:
    """Name of the backend that moves the tensors of a group: shm, gloo or nccl."""
    return "shm" if transport.on and dist.get_backend(group) == "gloo" else str(dist.get_backend(group))
