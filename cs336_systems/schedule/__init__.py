"""Pipeline schedules as lists of actions (`lists.py`), simulated and drawn (`simulation.py`)."""

from cs336_systems.schedule.lists import Action, gpipe, interleaved, one_f_one_b, schedule
from cs336_systems.schedule.simulation import simulate

__all__ = ["Action", "gpipe", "interleaved", "one_f_one_b", "schedule", "simulate"]
