"""The only package that calls torch.distributed: start-up, collectives and messages, and a record of all transfers."""

from cs336_systems.comm.agreement import CommError, agree, fault, stop_step, subgroup
from cs336_systems.comm.events import Event, record
from cs336_systems.comm.flight_recorder import at_step
from cs336_systems.comm.group import Group, default_group, fake_ranks, global_rank, is_fake
from cs336_systems.comm.mesh import Mesh, mesh_sizes
from cs336_systems.comm.pairs import Exchange
from cs336_systems.comm.shared_verbs import shared_empty
from cs336_systems.comm.startup import backend_of, current_place, distributed, find_place, tell_environment
from cs336_systems.comm.store import Place
from cs336_systems.comm.verbs import Work, all_gather, all_reduce, all_to_all, broadcast, receive, reduce_scatter, send

__all__ = [
    "CommError", "Event", "Exchange", "Group", "Mesh", "Place", "Work", "agree", "all_gather", "all_reduce",
    "all_to_all", "at_step", "backend_of", "broadcast", "current_place", "default_group", "distributed", "fake_ranks",
    "fault", "find_place", "global_rank", "is_fake", "mesh_sizes", "receive", "record", "reduce_scatter",
    "send", "shared_empty", "stop_step", "subgroup", "tell_environment",
]  # fmt: skip
