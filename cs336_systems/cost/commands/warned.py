"""What commands say of a prediction that lies outside of what was fitted."""

from rich.console import Console
from rich.text import Text

from cs336_systems.cost.large.domain import warnings
from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig


def print_warnings(
    screen: Console, config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants
) -> None:
    """A line for each way in which it does; nothing inside."""
    for line in warnings(config, plan, seq, system, constants):
        screen.print(Text.assemble(("warning:", "yellow"), f" {line}"))
