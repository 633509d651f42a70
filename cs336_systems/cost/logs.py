"""Read training logs: those of Megatron-LM, version 1 to today's core, and those of `cs336_systems.train`.

A log of Megatron-LM has blocks of arguments, lines of iterations, and timers after them, on one line or in a table of
(min, max) over ranks. Notes that quote such logs are read as well, and launchers' prefixes, stamps and colours skipped.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.host.text import strict_json

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
# Prefixes that launchers write: `[default7]:` torchrun, `3: ` srun -l, `[1,3]<stdout>:` mpirun --tag-output.
_PREFIX = re.compile(r"^(?:\[(?:default|rank)?\d+\]:|\[\d+,\d+\]<std(?:out|err)>:|\d+:(?= )) ?", re.IGNORECASE)
_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]? ?(?:\[?(?:INFO|WARNING)\]?:? )?")
_BLOCK = re.compile(r"-{5,} (end of )?arguments -{5,}")
_ARGUMENT = re.compile(r"(?:^|[\s:\]>])([A-Za-z]\w*) \.+ (.*?)\s*$")
_HEADING = re.compile(r"^#+\s+(.+?)\s*$")
_WORLD, _DEGREE = re.compile(r"using world size:\s*(\d+)"), re.compile(r"([a-z-]+)-parallel[- ]size:\s*(\d+)")
_PADDED = re.compile(r"padded vocab \(size: \d+\).*new size: (\d+)\)")
_ITERATION = re.compile(r"iteration\s+(\d+)\s*/")
# Fields of an iteration's line; where it was wrapped, the space between two words may be lost.
_ELAPSED = re.compile(r"elapsed\s*time\s*per\s*iteration\s*\(ms\)\s*:\s*([\d.]+(?:[eE][-+]?\d+)?)")
_BATCH = re.compile(r"\|\s*(?:\w+\s*)?batch\s*size\s*:\s*(\d+)")
_CONSUMED = re.compile(r"\|\s*consumed\s*samples\s*:\s*(\d+)")
_SKIPPED = re.compile(r"number\s*of\s*skipped\s*iterations\s*:\s*(\d+)")
_ONE_LINE, _TABLE = re.compile(r"time \(ms\)\s*\|"), re.compile(r"time across ranks \(ms\):")
_ROW = re.compile(r"^.*?[\w/-]+ \.+:\s+[\d(]")
_TIMER = re.compile(r"([A-Za-z][\w/-]*?)\s*\.*:\s*(?:\(\s*[\d.]+\s*,\s*)?(\d+(?:\.\d*)?)(?![\d:])")
_COMPLETE = re.compile(r"time \(ms\).*\.\d\d$|iteration.*\|$")  # a whole line, unless fields follow
_FRAGMENT = re.compile(r"^[\w\s|:.()/+%-]*[\w|][\w\s|:.()/+%-]*$")
# Other lines of notes.
_PER_SAMPLE = re.compile(r"^\s*(\d+(?:\.\d+)?) ms per sample")
_COUNT = re.compile(r"\(over ([\d,]+) iterations? = ([\d,]+) samples?\)")
_GPU_UTIL = re.compile(r"GPU util:\s*~?(\d+(?:\.\d+)?)\s*~?\s*%")
_GPU_MEMORY = re.compile(r"GPU mem:\s*(\d+)\s*MiB(?:\s*-\s*(\d+)\s*MiB)?\s*/\s*(\d+)\s*MiB")
_RESERVED = re.compile(r"memory \(MB\).*\| max reserved: ([\d.]+)")
# Entries of the vocabulary files that Megatron-LM's instructions fetch: arguments name the file, not its length.
_VOCABULARY = {"bert-large-cased-vocab.txt": 28_996, "bert-large-uncased-vocab.txt": 30_522, "gpt2-vocab.json": 50_257}
_HEADER = ("recipe", "mesh", "model", "seq", "batch_size", "micro_batch_size")


@dataclass
class Report:
    """Times of one iteration, as a log reports them every so often; timers in milliseconds."""

    milliseconds: float
    batch: int | None = None
    skipped: int = 0
    timers: dict[str, float] = field(default_factory=dict)
    iteration: int = 0
    consumed: int | None = None


@dataclass
class LoggedRun:
    """One run of a log. Timers are the last rank's, or, if `over_ranks`, each the largest over all ranks."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)  # of Megatron-LM, as printed
    header: dict[str, Any] = field(default_factory=dict)  # first line of a log of cs336_systems.train
    reports: list[Report] = field(default_factory=list)
    early_timers: dict[str, float] = field(default_factory=dict)  # before any report
    sample_ms: float | None = None
    over_ranks: bool = False
    notes: dict[str, Any] = field(default_factory=dict)  # iterations, samples, gpu_util, gpu_memory, gpu_memory_total

    @property
    def batch(self) -> int | None:
        """Sequences of a step: by the last report, since a batch may be ramped up, else by the arguments."""
        said = next((each.batch for each in reversed(self.reports) if each.batch), None)
        return said or self.number("global_batch_size")

    @property
    def at_last_batch(self) -> list[Report]:
        return [each for each in self.reports if (each.batch or self.batch) == self.batch]

    def steady(self, first: bool = False) -> list[Report]:
        """Reports of the last batch size without a skipped step, which did no update, unless all skipped one; without
        the run's first report, which includes the start, if others are left and `first` is not set."""
        whole = [each for each in self.at_last_batch if not each.skipped] or self.at_last_batch
        return whole[1:] if not first and len(whole) > 1 and whole[0] is self.reports[0] else whole

    @property
    def seconds(self) -> float | None:
        """Seconds of a step: the median report's, or by the notes' time of a sample; None if neither is there."""
        if self.reports:
            return median(each.milliseconds for each in self.steady()) / 1e3
        return self.sample_ms * self.batch / 1e3 if self.sample_ms and self.batch else None

    def timers(self, first: bool = False) -> dict[str, float]:
        """Milliseconds of a step by timer, each the median of the steady reports that have it."""
        reports = [each.timers for each in self.steady(first) if each.timers]
        reports = reports or [each.timers for each in self.at_last_batch if each.timers] or [self.early_timers]
        names = dict.fromkeys(name for timers in reports for name in timers)
        return {name: median(timers[name] for timers in reports if name in timers) for name in names}

    def number(self, *names: str) -> int | None:
        """The first of some arguments that is a whole number."""
        return next((int(self.arguments[name]) for name in names if self.arguments.get(name, "").isdigit()), None)

    def says(self, name: str) -> bool:
        """True if an argument is there and neither None nor False."""
        return self.arguments.get(name, "None") not in ("None", "False", "")

    def vocabulary(self) -> int | None:
        """Entries of the vocabulary, padded so that each tensor-parallel rank has the same multiple of 128 of them;
        None if only the vocabulary's file could say how many."""
        known = _VOCABULARY.get(self.arguments.get("vocab_file", "").rsplit("/", 1)[-1])
        length, padded = self.number("vocab_size") or known, self.number("padded_vocab_size")
        if padded or length is None:
            return padded
        tp = self.number("tensor_model_parallel_size", "model_parallel_size") or 1
        multiple = (self.number("make_vocab_size_divisible_by") or 128) * tp
        return -(-length // multiple) * multiple


def read_log(text: str, name: str) -> list[LoggedRun]:
    """Runs of a Megatron-LM log that have a time. Raises UserError, saying what was looked for, if none has."""
    timed = [run for run in megatron_runs(text, name) if run.reports or run.early_timers or run.sample_ms]
    if not timed:
        raise UserError(
            f"{name} has no timings: looked for `elapsed time per iteration (ms): ...`, for `... ms per sample`, and "
            "for timers, `time (ms) | forward-compute: ...` or a table below `time across ranks (ms):`"
        )
    return timed


def megatron_runs(text: str, name: str) -> list[LoggedRun]:
    """One run for the lines before any block of arguments, and one for each block, even without times."""
    found, inside, heading = [LoggedRun(name)], False, name
    for line in _joined_lines(text):
        if match := _BLOCK.search(line):
            inside = not match[1]
            found += [LoggedRun(heading)] * inside
        elif inside and (match := _ARGUMENT.search(line)):
            found[-1].arguments[match[1].lower()] = match[2]
        elif match := _HEADING.match(line):
            heading = match[1]
        else:
            if (match := _WORLD.search(line)) and (found[-1].reports or found[-1].early_timers):
                found.append(LoggedRun(found[-1].name))  # another run, whose arguments were not printed
            _read_line(found[-1], line)
    return found


def _joined_lines(text: str) -> Iterator[str]:
    """Lines without prefixes and colours; wrapped ones put together, and a table of timers as one line."""
    lines = [_PREFIX.sub("", _STAMP.sub("", _PREFIX.sub("", _CODES.sub("", line)))) for line in text.splitlines()]
    i = 0
    while i < len(lines):
        line, i = lines[i], i + 1
        if _TABLE.search(line):
            while i < len(lines) and _ROW.match(lines[i]):
                line, i = f"{line} {lines[i]}", i + 1
        elif _ONE_LINE.search(line) or _ITERATION.search(line):
            while i < len(lines) and _continues(line, lines[i]):
                line, i = line + lines[i], i + 1
        yield line


def _continues(line: str, following: str) -> bool:
    """True if a line of timers or of an iteration was cut, by a terminal, before the following one."""
    if not _FRAGMENT.match(following) or _ONE_LINE.search(following) or _ITERATION.search(following):
        return False
    return "|" in following or not _COMPLETE.search(line.rstrip())


def _read_line(run: LoggedRun, line: str) -> None:
    notes = run.notes
    if match := _WORLD.search(line):
        run.arguments.setdefault("world_size", match[1])
        for axis, size in _DEGREE.findall(line):
            run.arguments.setdefault(f"{axis.replace('-', '_')}_parallel_size", size)
    elif match := _PADDED.search(line):
        run.arguments["padded_vocab_size"] = match[1]
    elif match := _ITERATION.search(line):
        if elapsed := _ELAPSED.search(line):
            found = (pattern.search(line) for pattern in (_BATCH, _SKIPPED, _CONSUMED))
            batch, skipped, consumed = (int(each[1]) if each else None for each in found)
            run.reports.append(Report(float(elapsed[1]), batch, skipped or 0, {}, int(match[1]), consumed))
    elif match := _ONE_LINE.search(line) or _TABLE.search(line):
        timers = {name: float(value) for name, value in _TIMER.findall(line[match.end() :])}
        if any(name.startswith("forward") for name in timers):  # starting up and saving have timers, too
            run.over_ranks = _TABLE.search(line) is not None
            if run.reports:
                run.reports[-1].timers = timers
            else:
                run.early_timers = timers
    elif match := _PER_SAMPLE.match(line):
        run.sample_ms = float(match[1])
    elif match := _COUNT.search(line):
        notes["iterations"], notes["samples"] = (int(digits.replace(",", "")) for digits in match.groups())
    elif match := _GPU_UTIL.search(line):
        notes["gpu_util"] = float(match[1])
    elif match := _GPU_MEMORY.search(line):
        notes["gpu_memory"] = (int(match[1]), int(match[2] or match[1]))
        notes["gpu_memory_total"] = int(match[3])
    elif match := _RESERVED.search(line):  # of some rank
        least, most = notes.get("gpu_memory", (float("inf"), 0.0))
        notes["gpu_memory"] = (min(least, float(match[1])), max(most, float(match[1])))


def read_train_log(text: str, name: str) -> LoggedRun:
    """The run of a log of cs336_systems.train: a line of JSON that says what is trained, then a line per report.

    If it was resumed in another layout, only what comes after counts. Timers are the last rank's; `notes` has the peak
    memory of a finished run. Raises UserError for another file, and for a log without timers."""
    header, *lines = json_lines(text, name)
    if missing := [each for each in _HEADER if each not in header]:
        raise UserError(
            f"{name} is no log of python -m cs336_systems.train: its first line does not have {', '.join(missing)}"
        )
    reports: list[dict[str, Any]] = []
    for line in lines:
        if "resumed" in line and any(line.get(key) != header[key] for key in _HEADER[1:]):
            header, reports = line, []
        elif "step_ms" in line:
            reports.append(line)
    if not reports:
        if any("step" in line for line in lines):
            raise UserError(f"{name} has no timers: train with --timers max")
        raise UserError(f"{name} has no step yet: wait for the first line that train writes, after --log-every steps")
    found = LoggedRun(name, header=header, notes={"peak_memory": lines[-1].get("peak_memory")})
    for each in reports:
        timers = {name: of[-1] for name, of in each.get("timers_ms", {}).items() if of[-1] is not None}
        found.reports.append(Report(each["step_ms"], header["batch_size"], each.get("skipped", 0), timers))
    return found


def json_lines(text: str, name: str) -> list[dict[str, Any]]:
    """One JSON object per line; the last line is left out if it was cut, as in a log that is still written."""
    lines, found = text.splitlines(), list[dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        try:
            value = strict_json(line)
        except ValueError:
            if number == len(lines) > 1:
                break
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{name}, line {number} is not JSON: a log, like records, has a JSON object on every line")
        found.append(value)
    if not found:
        raise UserError(f"{name} is empty")
    return found
