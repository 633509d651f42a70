"""Megatron-LM v2.5's command line in this project's words: an option string of its users trains here as it stands.

The tables of `megatron_names.py` say what each of its options is here. What they do not know is this project's own, and
stays as it is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cs336_systems.errors import UserError
from cs336_systems.megatron_names import (
    BERT_DATA,
    DEFAULTS,
    FIXED,
    FLAGS,
    IGNORED,
    LAUNCHER,
    RENAMED,
    REQUIRED,
    SHAPE,
    SHARED,
    WARMUP,
)


@dataclass(frozen=True)
class Translation:
    """Tokens for this project's own command, and one line for each thing that was ignored, replaced or added."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Option:
    name: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]  # as the command is to see them if nothing is translated

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


_Line = dict[str, _Option]  # the last option of each name, which is the one that counts


def _bare(entry: str) -> str:
    return entry.rstrip("=*")


_REASONS = {_bare(entry): reason for reason, entries in IGNORED.items() for entry in entries.split()}
_OURS = {_bare(entry): ours for entry, ours in RENAMED.items()}
_FIXED = {_bare(entry): value for entry, value in FIXED.items()}
_ENTRIES = {_bare(entry): entry for entry in (*SHARED, *RENAMED, *FIXED, *" ".join(IGNORED.values()).split())}
_ONLY_MEGATRON = set(_ENTRIES) - set(map(_bare, SHARED))


def _take_values(left: deque[str], at_most: int) -> tuple[str, ...]:
    taken: list[str] = []
    while left and len(taken) < at_most and not left[0].startswith("--"):
        taken.append(left.popleft())
    return tuple(taken)


def _take_option(left: deque[str]) -> _Option:
    """Take one option and its values from the front. Raises UserError if Megatron's option lacks its value."""
    token = left.popleft()
    typed, equals, inline = token.partition("=")
    name = typed.replace("_", "-")
    entry = _ENTRIES.get(name)
    if entry is None:
        words = _take_values(left, len(left))
        return _Option(typed, (inline,) if equals else words, (token, *words))
    if entry == name:
        if equals:
            raise UserError(f"{name} is a flag and takes no value, not {inline!r}")
        return _Option(name, (), (name,))
    if equals:
        return _Option(name, (inline,), (f"{name}={inline}",))
    words = _take_values(left, len(left) if entry.endswith("*") else 1)
    if not words:
        raise UserError(f"{name} lacks its value")
    return _Option(name, words, (name, *words))


def _whole(option: _Option, least: int = 1) -> int:
    """The option's value as a whole number. Raises UserError if it is none or too small."""
    value = option.values[0] if option.values else ""
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"{option.name} takes a whole number, not {value!r}") from None
    if number < least:
        raise UserError(f"{option.name} must be at least {least}, not {number}")
    return number


def _either(line: _Line, ours: str, megatron: str) -> _Option | None:
    return line.get(ours) or line.get(megatron)


def _steps(samples: _Option, line: _Line) -> tuple[str, ...]:
    """Samples as steps of the global batch; Megatron too drops the remainder."""
    batch = _either(line, "--batch-size", "--global-batch-size")
    if batch is None:
        raise UserError(f"{samples} counts samples; say with --global-batch-size how many make a step")
    count, size = _whole(samples, least=0), _whole(batch)
    if 0 < count < size:
        raise UserError(f"{samples} is less than one global batch of {size}")
    return (str(count // size),)


def _chunks(option: _Option, line: _Line) -> tuple[str, ...]:
    """Chunks of a pipeline stage: layers / (stages x layers of a chunk)."""
    layers = None if _size(line) else line.get("--num-layers")
    stages = _either(line, "--pp", "--pipeline-model-parallel-size")
    if layers is None or stages is None:
        raise UserError(f"{option} needs --num-layers and --pipeline-model-parallel-size; with --size, say --chunks")
    chunks, rest = divmod(_whole(layers), _whole(stages) * _whole(option))
    if rest:
        raise UserError(f"{layers} is not a multiple of {_whole(stages)} stages x {_whole(option)} layers in a chunk")
    return (str(chunks),)


def _paths(option: _Option, line: _Line) -> tuple[str, ...]:
    """The paths of `path ...` or of `weight path weight path ...`."""
    return option.values[1::2] if _weights(option) else option.values


def _weights(option: _Option) -> tuple[str, ...]:
    weights = option.values[::2]
    return weights if len(option.values) % 2 == 0 and all(isinstance(_plain(each), float) for each in weights) else ()


def _tokenizer(option: _Option, line: _Line) -> tuple[str, ...]:
    if not option.values[0].startswith("BertWordPiece"):
        raise UserError(f"{option} does not exist here; use --tokenizer wordpiece or --tokenizer bytes")
    return ("wordpiece",)


def _decay(option: _Option, line: _Line) -> tuple[str, ...]:
    if option.values == ("constant",):
        raise UserError(f"{option} does not exist here; give --min-lr the value of --lr instead")
    return option.values


_COMPUTED: dict[str, Callable[[_Option, _Line], tuple[str, ...]]] = {
    "--num-layers-per-virtual-pipeline-stage": _chunks,
    "--train-samples": _steps,
    "--lr-decay-samples": _steps,
    "--lr-warmup-samples": _steps,
    "--data-path": _paths,
    "--tokenizer-type": _tokenizer,
    "--lr-decay-style": _decay,
}


def _plain(text: str) -> float | str:
    """A number as such, so that 0.1 equals 1e-1."""
    try:
        return float(text)
    except ValueError:
        return text


def _size(line: _Line) -> _Option | None:
    return _either(line, "--size", "--preset")


@dataclass(frozen=True)
class _Draft:
    """A translation in the making."""

    tokens: list[str] = field(default_factory=list)
    said: dict[str, tuple[_Option, list[str]]] = field(default_factory=dict)  # by our option: whose it is, and tokens
    ignored: dict[str, list[str]] = field(default_factory=dict)  # by reason
    replaced: list[str] = field(default_factory=list)


def _subject(ours: str) -> str:
    return WARMUP.get(ours, ours)


def _reason(option: _Option, line: _Line) -> str | None:
    """Why an option is ignored, None if it is not."""
    if option.name in SHAPE and (size := _size(line)):
        return f"{size} sets the shape"
    fixed = _FIXED.get(option.name)
    if fixed is not None and _plain(option.values[0]) != _plain(fixed):
        return f"here it is {fixed}"
    return _REASONS.get(option.name)


def _rename(option: _Option, line: _Line, draft: _Draft) -> None:
    """Say Megatron's option in our words, unless one of ours on the same line says it already.

    Raises UserError if two of Megatron's options say different things about one of ours.
    """
    ours = _OURS[option.name]
    if option.name == "--load":
        _resume(option, _either(line, "--out", "--save"), draft)
        return
    for other in line.values():
        if _subject(other.name) == _subject(ours):
            draft.replaced.append(f"{option} by {other}")
            return
    if option.name in FLAGS:
        values: tuple[str, ...] = (FLAGS[option.name],)
    else:
        values = _COMPUTED[option.name](option, line) if option.name in _COMPUTED else option.values
    tokens = [token for value in values for token in (ours, value)]
    if option.name == "--tokenizer-type" and option.values[0] == "BertWordPieceLowerCase":
        tokens.append("--lower-case")
    first, before = draft.said.setdefault(_subject(ours), (option, tokens))
    if first is option:
        draft.tokens.extend(tokens)
    elif list(map(_plain, before)) != list(map(_plain, tokens)):
        raise UserError(f"{first} and {option} do not agree on {_subject(ours)}; give one of them")


def _resume(load: _Option, save: _Option | None, draft: _Draft) -> None:
    if save is not None and save.values != load.values:
        draft.ignored.setdefault("a run goes on in the folder that it saves to", []).append(str(load))
    else:
        draft.tokens.extend(["--resume"] if save else ["--resume", "--out", *load.values])


def _require_shape(line: _Line) -> None:
    """Raises UserError for half a shape, which would change a preset that nobody named."""
    given = [line[name] for name in SHAPE[1:4] if name in line]
    missing = [name for name, ours in REQUIRED.items() if not _either(line, ours, name)]
    if given and missing and not _size(line):
        raise UserError(f"{given[0]} is part of a shape; give {' and '.join(missing)} as well, or --size NAME alone")


def _additions(line: _Line, draft: _Draft) -> dict[str, str]:
    """What Megatron takes for granted where this project does not: of interleaving, and of its pretrain_bert.py."""
    added = {}
    if "--chunks" in draft.said and draft.said["--chunks"][1] != ["--chunks", "1"]:
        added["--schedule"] = "interleaved"
    foreign = any(name in _ONLY_MEGATRON and _REASONS.get(name) != LAUNCHER for name in line)
    if foreign and any(name in line for name in (*SHAPE, *BERT_DATA)):
        added["--objective"] = "bert"
        objective = line.get("--objective")
        if "--vocab-file" in line and (objective is None or objective.values[:1] == ("bert",)):
            added["--tokenizer"] = "wordpiece"
        width = _either(line, "--d-model", "--hidden-size")
        if width and not _size(line):
            added["--d-ff"] = str(4 * _whole(width))
        # The horizon is that of the run that was meant, also when --steps cuts it short.
        if "--train-iters" in line:
            added["--decay-steps"] = line["--train-iters"].values[0]
        elif "--train-samples" in line:
            added["--decay-steps"] = _steps(line["--train-samples"], line)[0]
        added |= DEFAULTS
    taken = {_subject(name) for name in line} | set(draft.said)
    return {ours: value for ours, value in added.items() if ours not in taken}


def _notes(line: _Line, draft: _Draft, added: dict[str, str]) -> tuple[str, ...]:
    """One line for each kind of change."""
    notes = [f"ignored: {', '.join(options)} ({reason})" for reason, options in draft.ignored.items()]
    if draft.replaced:
        notes.append(f"replaced: {', '.join(draft.replaced)} (this project's own names win)")
    if "--data-path" in line and "--data" in draft.said and (weights := _weights(line["--data-path"])):
        notes.append(f"ignored: the weights {', '.join(weights)} of --data-path (texts are read one after the other)")
    dropouts = [line[name] for name in ("--attention-dropout", "--hidden-dropout") if name in line]
    if len(dropouts) == 1 and "--dropout" in draft.said and _plain(dropouts[0].values[0]) != 0.1:
        notes.append(f"{dropouts[0]} holds for all dropout (one option here)")
    if added:
        pairs = ", ".join(f"{ours} {value}" for ours, value in added.items())
        notes.append(f"added: {pairs} (what Megatron-LM takes for granted)")
    return tuple(notes)


def translate(arguments: Sequence[str]) -> Translation:
    """A command line in Megatron-LM v2.5's words, this project's or both (without the program), in this project's.

    Own names win over Megatron's wherever they stand, and `--size` over a shape. Where Megatron's names describe a
    BERT, the objective and the defaults of its pretrain_bert.py come along. Unknown tokens stay as they are. Raises
    UserError for a missing value, for options that contradict each other, and where a number is needed and not there.
    """
    left = deque(arguments)
    options = []
    while left and left[0] != "--":
        options.append(_take_option(left))
    line, draft = {option.name: option for option in options}, _Draft()
    _require_shape(line)
    for option in options:
        if reason := _reason(option, line):
            draft.ignored.setdefault(reason, []).append(str(option))
        elif option.name not in _ONLY_MEGATRON:
            draft.tokens.extend(option.tokens)
        elif option.name in _OURS and line[option.name] is option:
            _rename(option, line, draft)
    added = _additions(line, draft)
    tokens = [*draft.tokens, *(token for pair in added.items() for token in pair), *left]
    return Translation(tuple(tokens), _notes(line, draft, added))
