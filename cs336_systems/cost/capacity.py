"""Check that a run fits the memory of this machine, with advice on what would fit.

What a run needs is counted elsewhere (`cost/observed.py`, `train/observation.py`) and given here as bytes by part.
"""

from collections.abc import Callable, Mapping

from cs336_systems.cost.closed_forms import MODES, Mode
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig

# Bytes by part at the fullest moment of a mode of a model over (batch seq) tokens.
Needs = Callable[[ModelConfig, int, int, Mode], Mapping[str, int]]


def memory(config: ModelConfig, batch: int, seq: int, mode: Mode) -> dict[str, int]:
    """Bytes by part at the fullest moment of a pass in fp32 over (batch seq) tokens; their sum is the peak."""
    from cs336_systems.cost.observed import observe_passes  # torch, which other predictions need not load

    return observe_passes(config, batch, seq).memory(mode)


def describe_parts(parts: Mapping[str, float]) -> str:
    """Name the parts that have bytes, and how many."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)


def require_fit(
    name: str,
    config: ModelConfig,
    batch: int,
    seq: int,
    mode: Mode,
    needs: Needs,
    usable: int,
    modes: tuple[Mode, ...] = MODES,
) -> None:
    """Raises UserError, saying what a pass needs and what would fit, unless it fits the usable bytes. `modes` are those
    that the command line can choose instead."""
    parts = needs(config, batch, seq, mode)
    need = sum(parts.values())
    if need <= usable:
        return

    def fits(mode_: Mode, rows: int = batch, length: int = seq) -> bool:
        # Counting a large model takes seconds, so what cannot fit is not counted: activations shrink in proportion
        # to the batch, and to the square of the sequence at most.
        moving = parts["activations"] + parts.get("workspace", 0)
        least = moving * rows * length**2 // (batch * seq**2)
        shorter = 16 * config.context_length * config.d_model if length < seq else 0  # positions, in AdamW at most
        if mode_ == mode and need - moving - shorter + least > usable:
            return False
        shape = config.override(context_length=min(length, config.context_length))
        return sum(needs(shape, rows, length, mode_).values()) <= usable

    found = [f"--mode {other}" for other in modes if other != mode and fits(other)]
    halves = [[count >> k for k in range(1, count.bit_length())] for count in (batch, seq)]
    if rows := next((rows for rows in halves[0] if fits(mode, rows=rows)), None):
        found.append(f"--batch-size {rows}")
    elif length := next((length for length in halves[1] if fits(mode, length=length)), None):
        found.append(f"--context {length}")
    advice = f"what fits here: {' or '.join(found)}" if found else "use a smaller --size"
    raise UserError(
        f"{name} with batch {batch} x {seq} needs {format_bytes(need)} for a {mode} ({describe_parts(parts)}), but "
        f"{format_bytes(usable)} are usable; {advice}{one_hot_advice(config)}"
    )


def require_layout_fits(
    name: str, config: ModelConfig, layout: Layout, seq: int, parts: Mapping[str, int], usable: int
) -> None:
    """Raises UserError, saying what helps, unless the `parts` of its fullest rank's memory fit `usable` bytes."""
    if sum(parts.values()) <= usable:
        return
    degrees, raised = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}", "--tp, --pp or --zero"
    if config.num_experts:
        degrees, raised = f"{degrees} x ep {layout.ep}", "--ep, --tp, --pp or --zero"
    raise UserError(
        f"{name} with microbatches of {layout.micro_batch} x {seq} at {degrees} needs "
        f"{format_bytes(sum(parts.values()))} on a rank ({describe_parts(parts)}), but {format_bytes(usable)} are "
        f"usable; raise {raised}, use --recompute segments, or lower --micro-batch-size{one_hot_advice(config)}"
    )


def one_hot_advice(config: ModelConfig) -> str:
    """Advice for a model whose experts are reached through tensors of tokens x experts x slots."""
    one_hot = config.num_experts and config.mixture.dispatch == "einsum"
    return "; --moe sort needs no one-hot tensors" if one_hot else ""
