"""Will it fit, and if not, what would?"""

from cs336_systems.console import format_bytes
from cs336_systems.cost.memory import MODES, Mode, Precision, memory
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig


def describe_parts(parts: dict[str, int]) -> str:
    """`parameters 9.6 GiB, optimizer state 19.1 GiB`: the parts that are not zero."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)


def alternatives(
    config: ModelConfig, batch: int, seq: int, mode: Mode, precision: Precision, usable: int, modes: tuple[Mode, ...]
) -> list[str]:
    """The nearest things that fit where (config, batch, seq, mode) does not, as command-line options."""

    def fits(rows: int, mode: Mode) -> bool:
        return sum(memory(config, rows, seq, mode, precision).values()) <= usable

    found = [f"--mode {other}" for other in modes if other != mode and fits(batch, other)]
    rows = batch
    while rows > 1:
        rows //= 2
        if fits(rows, mode):
            return [*found, f"--batch-size {rows}"]
    return found


def require_fit(
    name: str,
    config: ModelConfig,
    batch: int,
    seq: int,
    mode: Mode,
    precision: Precision,
    usable: int,
    modes: tuple[Mode, ...] = MODES,
) -> None:
    """Raises UserError, saying what the run needs and what would fit, unless it fits the usable bytes.

    `modes` are those that the command line can choose instead.
    """
    parts = memory(config, batch, seq, mode, precision)
    if sum(parts.values()) <= usable:
        return
    instead = alternatives(config, batch, seq, mode, precision, usable, modes)
    advice = f"what fits here: {' or '.join(instead)}" if instead else "use a smaller --size"
    raise UserError(
        f"{name} with batch {batch} x {seq} needs {format_bytes(sum(parts.values()))} for a {mode} "
        f"({describe_parts(parts)}), but {format_bytes(usable)} are usable; {advice}"
    )
