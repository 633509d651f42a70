"""Reads Megatron-LM logs: of each run in them the layout, batch, model, time a sample, and every timer."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scaling_run import Run, parse_published
from benchmarks.train_log import parse_train_log
from cs336_systems.errors import UserError

# Entries of the vocabulary files that Megatron-LM's instructions fetch: the arguments name the file, and only the start
# of a log says how long it was.
VOCABULARIES = {"bert-large-cased-vocab.txt": 28_996, "bert-large-uncased-vocab.txt": 30_522, "gpt2-vocab.json": 50_257}
# Arguments of models that the formula for FLOPs does not describe.
OTHER_SHAPES = ("swiglu", "group_query_attention", "num_experts")

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
# What launchers write before each line: `[default7]:` torchrun, `3: ` srun -l, `[1,3]<stdout>:` mpirun --tag-output.
PREFIX = re.compile(r"^(?:\[(?:default|rank)?\d+\]:|\[\d+,\d+\]<std(?:out|err)>:|\d+:(?= )) ?", re.IGNORECASE)
STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]? ?(?:\[?(?:INFO|WARNING)\]?:? )?")
ARGUMENTS, END = re.compile(r"-{5,} arguments -{5,}"), re.compile(r"-{5,} end of arguments -{5,}")
ARGUMENT = re.compile(r"^\s*([A-Za-z]\w*) \.+ (.*?)\s*$")
HEADING = re.compile(r"^#+\s+(.+?)\s*$")
TIMES, ITERATION = re.compile(r"time \(ms\) \|"), re.compile(r"iteration\s+(\d+)\s*/")
OVER_RANKS, OF_RANKS = re.compile(r"(?:\(min, max\)|max) time across ranks \(ms\):"), re.compile(r"^ +[\w/-]+ \.+: ")
WHOLE = re.compile(r"time \(ms\).*\.\d\d$|iteration.*\|$")  # a line that was not cut, if no field follows
FRAGMENT = re.compile(r"^[\w\s|:.()/+-]*[\w|][\w\s|:.()/+-]*$")
TIMER = re.compile(r"\|\s*([A-Za-z][\w/-]*?)\s*\.*:\s*(?:\(\s*[\d.]+\s*,\s*)?(\d+(?:\.\d*)?)")
COUNT = re.compile(r"\(over ([\d,]+) iterations? = ([\d,]+) samples?\)")
PER_SAMPLE = re.compile(r"^\s*(\d+(?:\.\d+)?) ms per sample")
GPU_UTIL = re.compile(r"GPU util:\s*~?(\d+(?:\.\d+)?)\s*~?\s*%")
GPU_MEMORY = re.compile(r"GPU mem:\s*(\d+)\s*MiB(?:\s*-\s*(\d+)\s*MiB)?\s*/\s*(\d+)\s*MiB")
RESERVED = re.compile(r"memory \(MB\).*\| max reserved: ([\d.]+)")
PADDED = re.compile(r"padded vocab \(size: \d+\).*new size: (\d+)\)")


@dataclass
class _Window:
    """One report of a training log: an iteration line, and the timers that were printed after it."""

    iteration: int
    consumed: int | None
    milliseconds: float
    batch: int | None
    skipped: int
    timers: dict[str, float] = field(default_factory=dict)


@dataclass
class _Draft:
    """What has been read of a run so far."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    windows: list[_Window] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)  # fields of Run
    reserved: list[float] = field(default_factory=list)

    def timed(self) -> bool:
        """Whether a training step's timers were found."""
        return "timers" in self.found or any(window.timers for window in self.windows)


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs of some files, in order, read by `READERS` of their suffix: a log if there is none.

    Raises UserError for a file that cannot be read or holds no run.
    """
    found: list[Run] = []
    for path in paths:
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        found += READERS.get(path.suffix, parse_log)(text, path.name)
    return found


def parse_log(text: str, name: str = "log") -> list[Run]:
    """The runs of a Megatron-LM log, or of notes that quote such logs: one for each block of arguments.

    A training log has many reports: the time of an iteration and each timer are the median over them, leaving out
    reports with a skipped iteration, which did no update. Notes have a line of timers and one like `22.39 ms per
    sample`. Launchers' prefixes, time stamps, colours and wrapped lines do not matter. Raises UserError if there are no
    timers, saying what was looked for, or if the arguments lack the layout or contradict themselves.
    """
    drafts, heading, inside = [_Draft(name)], name, False
    for line in _whole_lines(text):
        if END.search(line):
            inside = False
        elif ARGUMENTS.search(line):
            drafts.append(_Draft(heading))
            inside = True
        elif inside and (match := ARGUMENT.match(line)):
            drafts[-1].arguments[match[1].lower()] = match[2]
        elif match := HEADING.match(line):
            heading = match[1]
        else:
            _take(drafts[-1], line)
    timed = [draft for draft in drafts if draft.timed()]
    if not timed:
        raise UserError(
            f"{name} has no timers of a training step: looked for lines `time (ms) | forward-compute: 43.42 | ...`, "
            "and for `forward-backward ...: (41.07, 43.42)` below `time across ranks (ms):`; newer Megatron-LM "
            "prints them with --timing-log-level 2"
        )
    return [_finish(draft, name) for draft in timed]


def _whole_lines(text: str) -> Iterator[str]:
    """The lines without prefixes and colours, the wrapped ones put together, a table of timers as one line."""
    lines = [PREFIX.sub("", STAMP.sub("", PREFIX.sub("", CODES.sub("", line)))) for line in text.splitlines()]
    i = 0
    while i < len(lines):
        line, i = lines[i], i + 1
        if OVER_RANKS.search(line):
            # Some loggers put the whole table on one line.
            line = re.sub(r"\s([\w/-]+) \.+:", r" | \1:", line)
            while i < len(lines) and OF_RANKS.match(lines[i]):
                line, i = f"{line} | {lines[i].strip()}", i + 1
        elif TIMES.search(line) or ITERATION.search(line):
            while i < len(lines) and _continues(line, lines[i]):
                line, i = line.rstrip("\n") + lines[i], i + 1
        yield line


def _continues(line: str, following: str) -> bool:
    """Whether a line that begins with `time (ms)` or `iteration` was cut, by a terminal, before the following one."""
    if not FRAGMENT.match(following) or TIMES.search(following) or ITERATION.search(following):
        return False
    return "|" in following or not WHOLE.search(line.rstrip())


def _take(draft: _Draft, line: str) -> None:
    """Read one line that is not an argument."""
    found = draft.found
    if match := ITERATION.search(line):
        _take_iteration(draft, int(match[1]), line)
    elif TIMES.search(line) or OVER_RANKS.search(line):
        timers = {name: float(value) for name, value in TIMER.findall(line)}
        # Starting up and saving have timers, too.
        if any(name.startswith("forward") for name in timers):
            found["over_ranks"] = not TIMES.search(line)
            if draft.windows:
                draft.windows[-1].timers = timers
            else:
                found["timers"] = timers
    elif match := COUNT.search(line):
        found["iterations"], found["samples"] = (int(digits.replace(",", "")) for digits in match.groups())
    elif match := PER_SAMPLE.match(line):
        found["ms_per_sample"] = float(match[1])
    elif match := GPU_UTIL.search(line):
        found["gpu_util"] = float(match[1])
    elif match := GPU_MEMORY.search(line):
        found["gpu_memory"] = (int(match[1]), int(match[2] or match[1]))
        found["gpu_memory_total"] = int(match[3])
    elif match := RESERVED.search(line):
        draft.reserved.append(float(match[1]))
    elif match := PADDED.search(line):
        found["vocab_size"] = int(match[1])


def _take_iteration(draft: _Draft, iteration: int, line: str) -> None:
    def value(label: str) -> str | None:
        # A wrapped line has lost the space between two words.
        match = re.search(r"\|\s*" + r"\s*".join(map(re.escape, label.split())) + r"\s*:\s*([-+\d.eE]+)", line)
        return match[1] if match else None

    if elapsed := value("elapsed time per iteration (ms)"):
        consumed, batch = value("consumed samples"), value("global batch size")
        skipped = int(value("number of skipped iterations") or 0)
        window = _Window(
            iteration, int(consumed) if consumed else None, float(elapsed), int(batch) if batch else None, skipped
        )
        draft.windows.append(window)


def _finish(draft: _Draft, file: str) -> Run:
    """A run from all that was read of it."""
    arguments = draft.arguments
    tp, pp, dp, world = (
        _number(arguments, each, file)
        for each in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "data_parallel_size",
            "world_size",
        )
    )
    if tp * pp * dp != world:
        raise UserError(
            f"{file}: world_size {world} is not tensor {tp} x pipeline {pp} x data {dp} = {tp * pp * dp} parallel; "
            "other kinds of parallelism have no place in this table"
        )
    found = {"global_batch_size": _number(arguments, "global_batch_size", file)} | _shape(arguments) | draft.found
    if draft.windows:
        found |= _median_window(draft.windows, found["global_batch_size"])
    if "ms_per_sample" not in found:
        raise UserError(
            f"{file} has timers, but not the time of an iteration: looked for `elapsed time per iteration (ms): ...` "
            "and `... ms per sample`"
        )
    if draft.reserved and "gpu_memory" not in found:
        found["gpu_memory"] = (min(draft.reserved), max(draft.reserved))
    micro_batch = _number(arguments, "micro_batch_size", file)
    return Run(name=draft.name, tp=tp, pp=pp, dp=dp, micro_batch_size=micro_batch, source=file, **found)


def _median_window(windows: list[_Window], batch: int) -> dict[str, Any]:
    """Fields of a run from the reports of a training log, the last batch size deciding (it may have been ramped up)."""
    batch = windows[-1].batch or batch
    same = [each for each in windows if (each.batch or batch) == batch]
    used = [each for each in same if not each.skipped] or same
    timed = [each.timers for each in used if each.timers] or [each.timers for each in same if each.timers]
    names = list(dict.fromkeys(name for timers in timed for name in timers))
    timers = {name: median(timers[name] for timers in timed if name in timers) for name in names}
    found: dict[str, Any] = {"global_batch_size": batch, "timers": timers}
    found["ms_per_sample"] = median(each.milliseconds for each in used) / batch
    first, last = same[0], same[-1]
    if last.iteration > first.iteration and first.consumed is not None and last.consumed is not None:
        found |= {"iterations": last.iteration - first.iteration, "samples": last.consumed - first.consumed}
    return found


def _shape(arguments: dict[str, str]) -> dict[str, Any]:
    """Fields of the model: without num_layers and hidden_size if its FLOPs are not those of the plain transformer."""
    names = ("num_layers", "hidden_size", "seq_length")
    shape: dict[str, Any] = {name: int(arguments[name]) for name in names if arguments.get(name, "").isdigit()}
    full = arguments.get("checkpoint_activations") == "True" or arguments.get("recompute_granularity") == "full"
    selective = arguments.get("recompute_granularity") == "selective"
    shape["recompute"] = "full" if full else "selective" if selective else "none"
    shape |= _vocabulary(arguments)
    feed_forward = arguments.get("ffn_hidden_size", "")
    other = feed_forward.isdigit() and int(feed_forward) != 4 * shape.get("hidden_size", 0)
    if other or any(arguments.get(name, "None") not in ("None", "False") for name in OTHER_SHAPES):
        shape.pop("num_layers", None)
    return shape


def _vocabulary(arguments: dict[str, str]) -> dict[str, int]:
    """The length of the vocabulary, padded so that every tensor-parallel rank has the same multiple of 128 of it."""
    if arguments.get("padded_vocab_size", "").isdigit():
        return {"vocab_size": int(arguments["padded_vocab_size"])}
    length = VOCABULARIES.get(arguments.get("vocab_file", "").rsplit("/", 1)[-1])
    if length is None:
        return {}
    multiple = int(arguments.get("make_vocab_size_divisible_by", "128"))
    multiple *= int(arguments["tensor_model_parallel_size"])
    return {"vocab_size": -(-length // multiple) * multiple}


def _number(arguments: dict[str, str], name: str, file: str) -> int:
    if not arguments.get(name, "").isdigit():
        seen = f"says {arguments[name]!r}" if name in arguments else "is not there"
        # This project prints lines like Megatron-LM's, too, but the layout only into its log.
        ours = "" if arguments else "; of this project's own runs give the log file (--log-file), not what is printed"
        raise UserError(
            f"{file} has timers, but no layout for them: {name} {seen} in the block between `--- arguments ---` and "
            f"`--- end of arguments ---` that Megatron-LM prints first{ours}"
        )
    return int(arguments[name])


# By suffix. A reader takes the text and the file's name.
READERS: dict[str, Callable[[str, str], list[Run]]] = {
    ".json": parse_published,
    ".jsonl": parse_train_log,
}
