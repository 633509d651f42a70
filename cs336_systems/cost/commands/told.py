"""What is told of a predicted step: sections of lines, and the stage that has most to do with its operators timed."""

from functools import reduce
from operator import add
from typing import NamedTuple

from cs336_systems.cost.commands.request import Request
from cs336_systems.cost.large.operator_time import Passed, Timed, run_again, timed_group
from cs336_systems.cost.large.stage_parts import Group, stage_groups
from cs336_systems.cost.large.stage_time import Seconds, stage_seconds


class Section(NamedTuple):
    """Some lines about one number."""

    title: str
    lines: list[str]


class Told:
    """A request with what is told of it: the stage that has most to do, and its groups of operators timed."""

    def __init__(self, request: Request) -> None:
        self.request, self.step = request, request.step()
        config, plan, system, constants = request.config, request.plan, request.system, request.constants
        stage = self.step.stage
        self.groups = stage_groups(config, plan, stage)
        self.spent: Seconds = stage_seconds(config, plan, request.seq, stage, system, constants)
        self.timed: dict[Group, list[Timed]] = {
            group: timed_group(config, plan, request.seq, group, system, constants) for group, _ in self.groups
        }

    def total(self, group: Group, way: str) -> Passed:
        """Sum over a group's operators, "forward", "backward" or "again"."""
        request = self.request
        if way == "again":
            operators = [each.operator for each in self.timed[group]] if group in ("dense", "sparse") else []
            return run_again(request.config, operators, request.plan, request.system, request.constants)
        return reduce(add, (getattr(each, way) for each in self.timed[group]), Passed())
