"""A picture of one step: what every rank computed, what it sent meanwhile, and where it stood still.

A row group for each rank on one axis of time, with the ranks' clocks aligned. The strip at the bottom of a group is
what the overlap is computed from: communication is green where it hides behind computation and red where it does not.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cs336_systems.errors import UserError
from cs336_systems.profiling.align import Alignment, aligned, offsets
from cs336_systems.profiling.intervals import length, subtraction
from cs336_systems.profiling.overlap import last_starts
from cs336_systems.profiling.step_lanes import OPERATORS, Bar, Box, StepLanes, choose_step, lanes_of
from cs336_systems.profiling.svg import CHARACTER, FAINT, INK, PAINTS, PAPER, Drawing, fitting, round_ticks
from cs336_systems.profiling.trace import Trace

WIDTH, LEFT, RIGHT, TOP = 1400.0, 130.0, 200.0, 124.0
SMALL = 10.0  # size of the letters on bars
PHASE, LANE, STRIP, GAP = 22.0, 15.0, 7.0, 3.0  # heights
OTHER = "#777777"
BRIEF = {"forward": "fwd", "backward": "bwd", "synchronise": "sync", "optimizer": "opt"}
VERBS = {"all-reduce": "#0072b2", "all-gather": "#a8447f", "reduce-scatter": "#d55e00", "broadcast": "#5b4a9c"}
HIDDEN, EXPOSED = "#2f9e44", "#d6263b"
BLOCKED, JOINING, TICK = "url(#blocked)", "url(#joining)", "tick"
HATCHES = (
    '<defs><pattern id="blocked" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="5" height="5" fill="#ffffff"/><rect width="2.6" height="5" fill="{EXPOSED}"/></pattern>'
    '<pattern id="joining" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="2.4" height="5" fill="#ffffff" fill-opacity="0.75"/></pattern></defs>'
)

Scale = Callable[[int], float]  # nanoseconds since the epoch to pixels


def write_timeline(traces: Sequence[Trace], folder: Path, stem: str, step: int | None = None) -> list[Path]:
    """Write `stem`.svg, the picture of one step, by default the last; returns its path.

    Raises UserError if the ranks share no such step or the folder cannot be written.
    """
    path = folder / f"{stem}.svg"
    picture = timeline(traces, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    return [path]


def timeline(traces: Sequence[Trace], step: int | None = None) -> Drawing:
    """The picture of one step. Raises UserError if the ranks share no such step."""
    step = choose_step(traces, step)
    known = offsets(traces)
    traces = sorted(aligned(traces), key=lambda trace: trace.rank)
    last = last_starts(traces)
    ranks = [lanes_of(trace, step, last) for trace in traces]
    start, end = min(rank.start for rank in ranks), max(rank.end for rank in ranks)
    height = TOP + sum(_height(rank) for rank in ranks) + 30
    drawing = Drawing(WIDTH, height, _title(traces, step))
    drawing.shapes.append(HATCHES)
    drawing.text(12, 26, drawing.title, 17)
    drawing.text(WIDTH - 12, 26, _clocks(known.values()), 11, "end")
    _legend(drawing, ranks)

    def x(time: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(time, start), end) - start) / max(end - start, 1)

    _axis(drawing, x, start, end)
    y = TOP
    for rank in ranks:
        _draw_rank(drawing, rank, x, y)
        y += _height(rank)
    return drawing


def _title(traces: Sequence[Trace], step: int) -> str:
    wrapper = str(traces[0].ours.get("wrapper", ""))
    what = f"{wrapper}, step {step}" if wrapper else f"Step {step}"
    ranks = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    return f"{what} on {ranks}: computation and communication"


def _clocks(known: Iterable[Alignment]) -> str:
    bounds = [each.bound for each in known]
    sure = [bound for bound in bounds if bound is not None]
    if len(bounds) < 2:
        return ""
    return f"clocks aligned to ±{_ms(max(sure))} ms" if len(sure) == len(bounds) else "clocks taken to agree"


def _height(rank: StepLanes) -> float:
    lanes = len(rank.compute) + len(rank.bars) + bool(rank.blocks) + _waits_apart(rank)
    return 20 + PHASE + GAP + lanes * (LANE + GAP) + STRIP + 18


def _waits_apart(rank: StepLanes) -> bool:
    """Whether waits need a lane: on a CPU the thread that waits is the one that computes."""
    return bool(rank.waits) and OPERATORS not in rank.compute


def _axis(drawing: Drawing, x: Scale, start: int, end: int) -> None:
    """Milliseconds from where the first rank began the step."""
    ticks = round_ticks((end - start) / 1e6, 10)
    for tick in ticks:
        at = x(start + round(tick * 1e6))
        drawing.line(at, TOP - 8, at, drawing.height - 24, FAINT)
        drawing.text(at, TOP - 12, f"{tick:g}", 11, "middle")
        drawing.text(at, drawing.height - 10, f"{tick:g}", 11, "middle")
    drawing.text(LEFT - 30, TOP - 12, "time in ms", 11, "end")


def _legend(drawing: Drawing, ranks: Sequence[StepLanes]) -> None:
    """Two lines: what is computed and when nothing is; the collectives that occur."""
    phases = [phase for phase in PAINTS if any(block.kind == phase for rank in ranks for block in rank.phases)]
    verbs = sorted({bar.kind for rank in ranks for lane in rank.bars for bar in lane})
    above = [(PAINTS[phase][0], f"{phase}") for phase in phases]
    above += [(BLOCKED, "CPU thread stands still in a wait")] if any(rank.waits for rank in ranks) else []
    below = [(VERBS.get(verb, OTHER), verb) for verb in verbs]
    if verbs:
        below += [(TICK, "launched")] if any(rank.launches for rank in ranks) else []
        below += [(JOINING, "another rank has not joined yet"), (HIDDEN, "hidden"), (EXPOSED, "exposed")]
    for y, entries in ((40.0, above), (60.0, below)):
        at = 12.0
        for fill, words in entries:
            if fill == TICK:
                drawing.line(at + 11, y + 5, at + 11, y + 12, INK)
                fill = "none"
            if fill == JOINING:
                drawing.rect(at, y, 22, 12, VERBS["all-reduce"])
            drawing.rect(at, y, 22, 12, fill, stroke=INK if fill == BLOCKED else "none")
            drawing.text(at + 27, y + 10, words, 11)
            at += 27 + 11 * CHARACTER * len(words) + 18
    if any(bar.posted for rank in ranks for lane in rank.bars for bar in lane):
        drawing.text(
            12, 90, "Outlined bars last from launch to the end of the wait; the transfer may be over sooner.", 11
        )


def _draw_rank(drawing: Drawing, rank: StepLanes, x: Scale, y: float) -> None:
    drawing.line(12, y + 2, WIDTH - 12, y + 2, INK)
    drawing.text(12, y + 16, f"rank {rank.rank}", 13)
    y += 20
    top = y
    _draw_phases(drawing, rank, x, y)
    y += PHASE + GAP
    if rank.blocks:
        _lane_name(drawing, y, "block")
        for block in rank.blocks:
            _box(drawing, block, x, y, PAPER, INK, _shorter(block.name), stroke="#999999")
        y += LANE + GAP
    for name, blocks in sorted(rank.compute.items()):
        _lane_name(drawing, y, name)
        for block in blocks:
            _box(drawing, block, x, y, PAINTS.get(block.kind, PAINTS["other"])[0], INK)
        if name == OPERATORS:
            _draw_waits(drawing, rank, x, y)
        y += LANE + GAP
    if _waits_apart(rank):
        _lane_name(drawing, y, "waits (CPU)")
        _draw_waits(drawing, rank, x, y)
        y += LANE + GAP
    for number, lane in enumerate(rank.bars):
        _lane_name(drawing, y, "" if number else "collectives")
        for bar in lane:
            _draw_bar(drawing, bar, x, y)
        y += LANE + GAP
    _lane_name(drawing, y - 4, "hidden, exposed" if rank.communicating else "")
    for intervals, colour in ((rank.communicating, EXPOSED), (rank.hidden, HIDDEN)):
        for start, end in intervals:
            drawing.rect(x(start), y, max(x(end) - x(start), 0.5), STRIP, colour)
    _draw_figures(drawing, rank, top)


def _lane_name(drawing: Drawing, y: float, name: str) -> None:
    if name:
        drawing.text(LEFT - 8, y + 11, name, 11, "end")


def _draw_phases(drawing: Drawing, rank: StepLanes, x: Scale, y: float) -> None:
    """Phases, and a tick wherever a collective was launched."""
    _lane_name(drawing, y + 4, "phase")
    for block in rank.phases:
        left, width = x(block.start), x(block.end) - x(block.start)
        hover = f"{block.name}: {_ms(block.end - block.start)} ms"
        drawing.rect(left, y, width, PHASE, PAINTS.get(block.kind, PAINTS["other"])[1], hover)
        words = next(
            (words for words in (block.name, BRIEF.get(block.name, "")) if 11 * CHARACTER * len(words) < width - 4), ""
        )
        if words:
            drawing.text(left + 4, y + 14, words, 11)
    for launch in rank.launches:
        drawing.line(x(launch), y + PHASE - 5, x(launch), y + PHASE, INK)


def _draw_waits(drawing: Drawing, rank: StepLanes, x: Scale, y: float) -> None:
    for wait in rank.waits:
        hover = f"{wait.name}: {_ms(wait.end - wait.start)} ms"
        drawing.rect(x(wait.start), y, max(x(wait.end) - x(wait.start), 0.7), LANE, BLOCKED, hover)


def _box(
    drawing: Drawing,
    block: Box,
    x: Scale,
    y: float,
    fill: str,
    ink: str,
    shorter: Callable[[float], str] | None = None,
    stroke: str = "none",
) -> None:
    left, width = x(block.start), max(x(block.end) - x(block.start), 0.4)
    drawing.rect(left, y, width, LANE, fill, f"{block.name}: {_ms(block.end - block.start)} ms", stroke)
    words = shorter(width - 4) if shorter else ""
    if words:
        drawing.text(left + width / 2, y + 11, words, SMALL, "middle", ink)


def _draw_bar(drawing: Drawing, bar: Bar, x: Scale, y: float) -> None:
    colour = VERBS.get(bar.kind, OTHER)
    left, width = x(bar.start), max(x(bar.end) - x(bar.start), 1.0)
    hover = f"{bar.detail}: {_ms(bar.end - bar.start)} ms"
    hover += f", of which {_ms(bar.joined - bar.start)} ms until the last rank had joined" * (bar.joined > bar.start)
    drawing.rect(left, y, width, LANE, colour, hover, INK if bar.posted else PAPER)
    waiting = x(bar.joined) - left
    if waiting > 0:
        drawing.rect(left, y, waiting, LANE, JOINING)
    words = shortened(bar.name, width - waiting - 4)
    middle = left + (waiting + width) / 2
    if not words and waiting > width / 2 and (words := shortened(bar.name, width - 4)):
        middle = left + width / 2
        half = CHARACTER * SMALL * len(words) / 2 + 1
        drawing.rect(middle - half, y + 2, 2 * half, LANE - 4, colour)
    if words:
        drawing.text(middle, y + 11, words, SMALL, "middle", PAPER)


def shortened(label: str, room: float) -> str:
    """A collective's label in as many pixels: `bucket 3, from x` -> `bucket 3` -> `b3`; of a weight's name the end."""
    plain = label.removeprefix("gradient of ").removesuffix(".weight")
    if label.startswith("bucket "):
        short = label.split(",")[0]
        choices = [label, short, short.replace("bucket ", "b")]
    else:
        parts = plain.split(".")
        choices = [label, *(".".join(parts[i:]) for i in range(len(parts)))]
    cut = fitting(label, room, SMALL) if " " in label else ""
    return next((words for words in choices if len(words) * CHARACTER * SMALL <= room), cut if len(cut) > 5 else "")


def _shorter(name: str) -> Callable[[float], str]:
    return lambda room: shortened(name, room)


def _draw_figures(drawing: Drawing, rank: StepLanes, y: float) -> None:
    """At the right: how much of this step's communication was hidden."""
    at = WIDTH - RIGHT + 12
    if not rank.communication:
        drawing.text(at, y + 14, "no communication", 12)
        return
    relation = "≤" if any(bar.posted for lane in rank.bars for bar in lane) else "="
    exposed = length(subtraction(rank.communicating, rank.hidden))
    drawing.text(at, y + 14, f"{100 * rank.overlapped / rank.communication:.1f} % overlapped", 13)
    lines = [
        f"communication {relation} {_ms(rank.communication)} ms",
        f"exposed {relation} {_ms(exposed)} ms",
        *([f"CPU in waits = {_ms(rank.blocked)} ms"] if rank.waits else []),
    ]
    for number, words in enumerate(lines):
        drawing.text(at, y + 31 + 14 * number, words, 11)


def _ms(time: int) -> str:
    return f"{time / 1e6:.3g}" if time < 999_500_000 else f"{time / 1e6:,.0f}"
