"""What a log of Megatron-LM says of speed: its arguments, the lines of its iterations, and the timers after them.

The wordings of version 1 to today's core are read: `batch size` and `global batch size`, an elapsed time with or
without a running mean after it, timers on one line, and a table of (min, max) over ranks. Notes that quote logs, with
`22.39 ms per sample` beside the timers, are read as well.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from cs336_systems.errors import UserError

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_BEGIN, _END = re.compile(r"-{5,} arguments -{5,}"), re.compile(r"-{5,} end of arguments -{5,}")
# After whatever launchers and time stamps write before it.
_ARGUMENT = re.compile(r"(?:^|[\s:\]>])([A-Za-z]\w*) \.{2,} (.*?)\s*$")
_HEADING = re.compile(r"^#+\s+(.+?)\s*$")
_WORLD, _DEGREE = re.compile(r"using world size:\s*(\d+)"), re.compile(r"([a-z-]+)-parallel[- ]size:\s*(\d+)")
_ITERATION = re.compile(r"iteration\s+(\d+)\s*/")
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+(?:[eE][-+]?\d+)?)")
_BATCH = re.compile(r"\|\s*(?:\w+\s+)?batch\s+size:\s*(\d+)")
_SKIPPED = re.compile(r"number of skipped\s+iterations:\s*(\d+)")
_ONE_LINE = re.compile(r"time \(ms\)\s*\|")
_TABLE, _OF_RANKS = re.compile(r"time across ranks \(ms\):"), re.compile(r"^.*?[\w/-]+ \.+:\s+[\d(]")
_TIMER = re.compile(r"([A-Za-z][\w/-]*?)\s*\.*:\s*(?:\(\s*[\d.]+\s*,\s*)?(\d+(?:\.\d*)?)(?![\d:])")
_PER_SAMPLE = re.compile(r"^\s*([\d.]+) ms per sample")
_PADDED = re.compile(r"padded vocab \(size: \d+\).*new size: (\d+)\)")
# Entries of the vocabulary files that Megatron-LM's instructions fetch.
_VOCABULARIES = {
    "bert-large-cased-vocab.txt": 28_996,
    "bert-large-uncased-vocab.txt": 30_522,
    "gpt2-vocab.json": 50_257,
}


@dataclass
class Window:
    """One report of a training log: an iteration's line, and the timers that came after it, in milliseconds."""

    milliseconds: float
    batch: int | None = None
    skipped: int = 0
    timers: dict[str, float] = field(default_factory=dict)


@dataclass
class LoggedRun:
    """What a log says of one run; `arguments` are as printed. `over_ranks` timers are each the most over all ranks,
    others the last rank's."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    noted: dict[str, float] = field(default_factory=dict)  # timers before any iteration's line
    sample_ms: float | None = None
    over_ranks: bool = False

    @property
    def batch(self) -> int | None:
        """Sequences of a step: as the last iteration says, since a batch may be ramped up, else the arguments."""
        said = next((each.batch for each in reversed(self.windows) if each.batch), None)
        return said or self.number("global_batch_size")

    @property
    def used(self) -> list[Window]:
        """The reports of the last batch size, without those that skipped a step, which did no update, unless all did;
        and without the first, which starts everything, if others are left."""
        same = [each for each in self.windows if (each.batch or self.batch) == self.batch]
        whole = [each for each in same if not each.skipped] or same
        return whole[1:] if len(whole) > 1 and whole[0] is self.windows[0] else whole

    @property
    def seconds(self) -> float | None:
        """Of a step: the median report, or what the notes say a sample takes. None if nothing says."""
        if self.windows:
            return median(each.milliseconds for each in self.used) / 1e3
        return self.sample_ms * self.batch / 1e3 if self.sample_ms and self.batch else None

    @property
    def timers(self) -> dict[str, float]:
        """Milliseconds of a step by timer, each the median of the reports that have it."""
        timed = [each.timers for each in self.used if each.timers] or [self.noted]
        names = dict.fromkeys(name for timers in timed for name in timers)
        return {name: median(timers[name] for timers in timed if name in timers) for name in names}

    def number(self, *names: str) -> int | None:
        """The first of some arguments that is a whole number."""
        return next((int(self.arguments[name]) for name in names if self.arguments.get(name, "").isdigit()), None)

    def says(self, name: str) -> bool:
        """Whether an argument is there and neither None nor False."""
        return self.arguments.get(name, "None") not in ("None", "False", "")

    def vocabulary(self) -> int | None:
        """Words, padded so that each tensor-parallel rank has the same multiple of 128 of them. None if only the
        vocabulary's file could say how many."""
        known = _VOCABULARIES.get(self.arguments.get("vocab_file", "").rsplit("/", 1)[-1])
        length = self.number("vocab_size") or known
        if padded := self.number("padded_vocab_size"):
            return padded
        if length is None:
            return None
        tp = self.number("tensor_model_parallel_size", "model_parallel_size") or 1
        multiple = (self.number("make_vocab_size_divisible_by") or 128) * tp
        return -(-length // multiple) * multiple


def read_log(text: str, name: str) -> list[LoggedRun]:
    """The runs of a log that have a time, one for each block of arguments, and one for what comes before any.

    Raises UserError, saying what was looked for, if none has.
    """
    found, inside = [LoggedRun(name)], False
    heading = name
    for line in _whole_lines(text):
        if _END.search(line):
            inside = False
        elif _BEGIN.search(line):
            found.append(LoggedRun(heading))
            inside = True
        elif inside and (match := _ARGUMENT.search(line)):
            found[-1].arguments[match[1].lower()] = match[2]
        elif match := _HEADING.match(line):
            heading = match[1]
        else:
            _take(found, line)
    timed = [run for run in found if run.windows or run.noted or run.sample_ms]
    if not timed:
        raise UserError(
            f"{name} has no timings: looked for `elapsed time per iteration (ms): ...`, for `... ms per sample`, and "
            "for timers, `time (ms) | forward-compute: ...` or a table below `time across ranks (ms):`"
        )
    return timed


def _take(found: list[LoggedRun], line: str) -> None:
    """Read one line that is not an argument."""
    run = found[-1]
    if match := _WORLD.search(line):
        if run.windows or run.noted:  # another run, whose arguments were not printed
            run = LoggedRun(run.name)
            found.append(run)
        run.arguments.setdefault("world_size", match[1])
        for axis, size in _DEGREE.findall(line):
            run.arguments.setdefault(f"{axis.replace('-', '_')}_parallel_size", size)
    elif match := _PADDED.search(line):
        run.arguments["padded_vocab_size"] = match[1]
    elif _ITERATION.search(line) and (match := _ELAPSED.search(line)):
        batch, skipped = _BATCH.search(line), _SKIPPED.search(line)
        run.windows.append(Window(float(match[1]), int(batch[1]) if batch else None, int(skipped[1]) if skipped else 0))
    elif (match := _ONE_LINE.search(line)) or (match := _TABLE.search(line)):
        timers = {name: float(value) for name, value in _TIMER.findall(line[match.end() :])}
        if any(name.startswith("forward") for name in timers):  # starting up and saving have timers, too
            run.over_ranks = _TABLE.search(line) is not None
            if run.windows:
                run.windows[-1].timers = timers
            else:
                run.noted = timers
    elif match := _PER_SAMPLE.match(line):
        run.sample_ms = float(match[1])


def _whole_lines(text: str) -> Iterator[str]:
    """The lines without colours; an iteration, timers or a table on several of them as one."""
    lines = [_CODES.sub("", line) for line in text.splitlines()]
    i = 0
    while i < len(lines):
        line, i = lines[i], i + 1
        if _TABLE.search(line):
            while i < len(lines) and _OF_RANKS.match(lines[i]):
                line, i = f"{line} {lines[i]}", i + 1
        elif _ITERATION.search(line) or _ONE_LINE.search(line):
            while i < len(lines) and "|" in lines[i] and not _starts(lines[i]):
                line, i = f"{line} {lines[i].strip()}", i + 1
        yield line


def _starts(line: str) -> bool:
    """Whether a line with a bar in it begins something of its own, instead of going on with the one before."""
    return bool(_ITERATION.search(line) or _ONE_LINE.search(line) or _TABLE.search(line) or "memory (MB)" in line)
