"""Translation of Megatron-LM's option names, which data/megatron.toml lists, into this project's options."""

import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.errors import UserError, require_count

_DATA: dict[str, Any] = tomllib.loads((Path(__file__).parent / "data" / "megatron.toml").read_text("utf-8"))
SHARED: str = _DATA["shared"]
RENAMED: dict[str, str] = _DATA["model"] | _DATA["run"]
FIXED, IGNORED, DEFAULTS, GPT = (_DATA[table] for table in ("fixed", "ignored", "defaults", "gpt"))
# SHAPE lists options that --size replaces. REQUIRED maps those that Megatron requires to this project's names.
REQUIRED = {"--num-layers": "--num-layers", "--hidden-size": "--d-model", "--num-attention-heads": "--num-heads"}
SHAPE = (*REQUIRED, "--ffn-hidden-size", "--seq-length", "--encoder-seq-length", "--max-position-embeddings")
PARTS = {*(entry.rstrip("=") for entry in _DATA["model"]), "--rotary-base", "--kv-channels"}
OF_GPT = {*_DATA["of_gpt"].split(), *PARTS, "--tokenizer-type"} - {"--rotary-base", "--kv-channels"}
BERT_DATA = ("--vocab-file", "--split", "--mask-prob")
WARMUP = {"--warmup-fraction": "--warmup-steps"}  # two options for one setting

_REASONS = {entry.rstrip("=*"): reason for reason, entries in IGNORED.items() for entry in entries.split()}
_OURS = {entry.rstrip("=*"): ours for entry, ours in RENAMED.items()}
_ONE_VALUE = (f"{name}=" for name in FIXED | _DATA["needed"])
_TABLES = " ".join((SHARED, _DATA["t5"], *RENAMED, *_ONE_VALUE, *IGNORED.values()))
_ENTRIES = {entry.rstrip("=*"): entry for entry in _TABLES.split()}
_ONLY_MEGATRON = _ENTRIES.keys() - {entry.rstrip("=") for entry in SHARED.split()}


class Option(NamedTuple):
    """An option of a command line: its name, its values, and its words for this project's command."""

    name: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))

    def whole(self, least: int = 1) -> int:
        """Convert the value to a whole number. Raises UserError if it is none or too small."""
        value = "".join(self.values[:1])
        if not value.removeprefix("-").isdecimal() or len(value) > 18:
            raise UserError(f"{self.name} takes a whole number, not {value!r}")
        require_count(self.name, int(value), least)
        return int(value)


# A command line by names as typed and, where this project has no option of that name on it, by this project's names. Of
# an option that is repeated, the last one counts.
Line = dict[str, Option]


def _foreign(line: Line) -> bool:
    """True if an option is only Megatron-LM's. --local-rank does not count: launchers pass it to every script."""
    return any(name in _ONLY_MEGATRON and name != "--local-rank" for name in line)


def _take_option(left: deque[str]) -> Option:
    """Take one option and its values from the front. Raises UserError if a value is missing, and for T5's options."""
    typed, equals, inline = left.popleft().partition("=")
    name, words = typed.replace("_", "-"), list[str]()
    entry = _ENTRIES.get(name)
    if entry in _DATA["t5"].split():
        raise UserError(f"{name} is T5's, an encoder with a decoder, which is not here; BERT and GPT are")
    if entry == name and equals:
        raise UserError(f"{name} is a flag and takes no value, not {inline!r}")
    most = 10**6 if entry is None or (entry[-1] == "*" and not equals) else int(entry[-1] == "=" and not equals)
    while left and len(words) < most and not left[0].startswith("--"):
        words.append(left.popleft())
    if entry and most and not words:
        raise UserError(f"{name} lacks its value")
    name = name if entry else typed
    if name == "--data":  # a b: --data a --data b
        words[:0] = [inline] * bool(equals)
        return Option(name, tuple(words), tuple(word for path in words for word in (name, path)) or (name,))
    return Option(name, (inline,) if equals else tuple(words), (f"{name}={inline}" if equals else name, *words))


def _plain(text: str) -> float | str:
    """Convert a number to float, so that 0.1 equals 1e-1; other text stays."""
    try:
        return float(text)
    except ValueError:
        return text


def _weights(option: Option) -> tuple[str, ...]:
    """Weights of `weight path weight path ...`; none if it is `path ...`."""
    weights = option.values[::2]
    return weights if len(option.values) % 2 == 0 and all(isinstance(_plain(each), float) for each in weights) else ()


def _sign(option: Option) -> str:
    """Objective of the script that an option belongs to, if it belongs to one only."""
    if option.name in _DATA["of_bert"].split() or str(option).startswith("--tokenizer-type BertWordPiece"):
        return "bert"
    return "lm" if option.name in OF_GPT and option.values not in (("LayerNorm",), ("learned_absolute",)) else ""


def _objective(line: Line) -> str:
    """Objective that is given, or that of the script whose options are used. Raises UserError for options of two."""
    signs = {_sign(option): option for option in line.values()}
    if "--objective" in line:
        return "".join(line["--objective"].values)
    if "bert" in signs and "lm" in signs:
        raise UserError(f"{signs['bert']} is BERT's and {signs['lm']} is GPT's; say --objective bert or --objective lm")
    return "lm" if "lm" in signs else "bert"


def _words(option: Option, line: Line) -> list[str]:
    """Translate to this project's option and values. Raises UserError if they cannot be determined."""
    name, (ours, *fixed) = option.name, _OURS[option.name].split()
    if name in _DATA["choices"]:
        if (value := _DATA["choices"][name].get(option.values[0])) is None:
            raise UserError(f"{option} does not exist here; {_DATA['hints'][name]}")
        return [ours, *value.split()]
    if name == "--group-query-attention":
        return [ours, *(line["--num-query-groups"].values if "--num-query-groups" in line else ("1",))]
    if name == "--distributed-timeout-minutes":
        return [ours, str(60 * option.whole())]
    if name == "--data-path":
        paths = option.values[1::2] if _weights(option) else option.values
        return [word for path in paths for word in (ours, path)]
    if name.endswith("-samples"):  # as steps of the global batch; Megatron too drops the remainder
        if (batch := line.get("--batch-size")) is None:
            raise UserError(f"{option} counts samples; say with --global-batch-size how many make a step")
        count, size = option.whole(least=0), batch.whole()
        if 0 < count < size:
            raise UserError(f"{option} is less than one global batch of {size}")
        return [ours, str(count // size)]
    if name == "--num-layers-per-virtual-pipeline-stage":  # chunks: layers / (stages x layers of a chunk)
        layers, ranks = line.get("--num-layers"), line.get("--pp")
        if "--size" in line or layers is None or ranks is None:
            needed = "--num-layers and --pipeline-model-parallel-size"
            raise UserError(f"{option} needs {needed}; with --size, say --chunks")
        pp, each = ranks.whole(), option.whole()
        if layers.whole() % (pp * each):
            raise UserError(f"{layers} is not a multiple of {pp} stages x {each} layers in a chunk")
        return [ours, str(layers.whole() // (pp * each))]
    return [ours, *(fixed or option.values)]


def _reason(option: Option, line: Line) -> str | None:
    """Reason why an option is ignored; None if it is not. Raises UserError for a model that does not exist here."""
    name, value, size, foreign = option.name, "".join(option.values[:1]), line.get("--size"), _foreign(line)
    if size and (name in SHAPE or (foreign and name in PARTS)):
        return f"{size} sets the shape"
    needed, width, heads = _DATA["needed"].get(name), line.get("--d-model"), line.get("--num-heads")
    if name == "--kv-channels" and width and heads:
        needed = str(width.whole() // heads.whole())
    if needed and _plain(value) != _plain(needed):
        raise UserError(f"{option} does not exist here; it is {needed}")
    if name in FIXED and _plain(value) != _plain(FIXED[name]):
        return f"here it is {FIXED[name]}"
    save, tp = line.get("--out"), line.get("--tp")
    if name == "--load" and save and save.values != option.values:
        return "a run goes on in the folder that it saves to"
    if name == "--num-query-groups" and "--group-query-attention" not in line:
        return "it needs --group-query-attention"
    if name == "--sequence-parallel" and foreign and (tp is None or tp.values == ("1",)):
        return "it needs tensor parallelism, without which Megatron-LM leaves it out, too"
    if name in ("--vocab-file", "--split") and foreign and _objective(line) == "lm":
        return "a GPT reads bytes here, and the last tenth of the text is kept for evaluation"
    if name == "--tokenizer-type" and value == "NullTokenizer" and "--mock-data" in line:
        return "random tokens need none"
    return _REASONS.get(name)


def _added(line: Line, translated: dict[str, list[str]]) -> dict[str, str]:
    """Options that are defaults of Megatron, but not of this project: for interleaving, and for its two scripts."""
    added = {"--schedule": "interleaved"} if translated.get("--chunks", ["--chunks", "1"])[1] != "1" else {}
    if _foreign(line) and any(name in line for name in (*SHAPE, *BERT_DATA)):
        added["--objective"] = objective = _objective(line)
        if "--vocab-file" in line and objective == "bert":
            added["--tokenizer"] = "wordpiece"
        if (width := line.get("--d-model")) and "--size" not in line:
            # As in Megatron, where a gated feed-forward has as many weights as the plain one.
            added["--d-ff"] = str(width.whole() * 8 // 192 * 64 if "--swiglu" in line else 4 * width.whole())
            added |= GPT if objective == "lm" else {}
        # The decay ends with the whole run, also if --steps cuts it short.
        if meant := line.get("--train-iters") or line.get("--train-samples"):
            added["--decay-steps"] = _words(meant, line)[1]
        added |= DEFAULTS
    taken = {WARMUP.get(name, name) for name in line} | set(translated)
    return {ours: value for ours, value in added.items() if ours not in taken}


def _partly_ignored(line: Line, translated: Mapping[str, list[str]], added: Mapping[str, str]) -> list[str]:
    """Notes on options that are partly ignored, and on a guess of the objective."""
    notes = []
    if "--data" in translated and "--data-path" in line and (weights := _weights(line["--data-path"])):
        notes.append(f"ignored: the weights {', '.join(weights)} of --data-path (texts are read one after the other)")
    dropouts = [line[name] for name in ("--attention-dropout", "--hidden-dropout") if name in line]
    if len(dropouts) == 1 and "--dropout" in translated and _plain(dropouts[0].values[0]) != 0.1:
        notes.append(f"{dropouts[0]} holds for all dropout (one option here)")
    if "--bias" in translated and "rmsnorm" not in translated.get("--norm", ()):
        notes.append("--disable-bias-linear holds for the norms' biases, too (one option here)")
    if "--objective" in added and "--vocab-file" not in line and not any(map(_sign, line.values())):
        notes.append("taken for a BERT, since no option is GPT's alone; for a GPT say --objective lm")
    return notes


def translate(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Translate a command line in Megatron-LM's names, this project's or both: (words for this project, notes of
    changes). This project's names win over Megatron's in any order, and `--size` wins over a shape. If Megatron's names
    describe a model, objective and defaults of its pretrain_bert.py or pretrain_gpt.py are added. Unknown words stay.
    Raises UserError for a missing value or number, options that contradict each other, and models that do not exist."""
    left, options = deque(arguments), list[Option]()
    while left and left[0] != "--":
        options.append(_take_option(left))
    typed = {option.name: option for option in options}
    line: Line = {_OURS.get(name, name).split(" ")[0].replace("--preset", "--size"): typed[name] for name in typed}
    line |= typed
    given = [line[name] for name in SHAPE[1:4] if name in line]
    missing = [name for name, ours in REQUIRED.items() if ours not in line]
    if given and missing and "--size" not in line:  # an incomplete shape would change the default preset
        raise UserError(f"{given[0]} is part of a shape; give {' and '.join(missing)} as well, or --size NAME alone")
    own = {WARMUP.get(name, name): option for name, option in reversed(typed.items())}
    tokens, ignored, replaced = list[str](), dict[str, list[str]](), list[str]()
    first, translated = dict[str, Option](), dict[str, list[str]]()  # by our option: the original, and our words
    for option in options:
        ours = _OURS.get(option.name, "").split(" ")[0]
        subject = WARMUP.get(ours, ours)
        if reason := _reason(option, line):
            ignored.setdefault(reason, []).append(str(option))
        elif option.name not in _ONLY_MEGATRON:
            tokens += option.tokens
        elif not ours or line[option.name] is not option:
            continue
        elif option.name == "--load":
            tokens += ["--resume"] if "--out" in line else ["--resume", "--out", *option.values]
        elif subject in own:
            replaced.append(f"{option} by {own[subject]}")
        elif first.setdefault(subject, option) is option:
            translated[subject] = _words(option, line)
            tokens += translated[subject]
        elif list(map(_plain, translated[subject])) != list(map(_plain, _words(option, line))):
            raise UserError(f"{first[subject]} and {option} do not agree on {subject}; give one of them")

    added = _added(line, translated)
    notes = [f"ignored: {', '.join(them)} ({reason})" for reason, them in ignored.items()]
    notes += [f"replaced: {', '.join(replaced)} (this project's own names win)"] if replaced else []
    if added:
        notes.append(f"added: {', '.join(map(' '.join, added.items()))} (what Megatron-LM takes for granted)")
    notes += _partly_ignored(line, translated, added)
    return (*tokens, *(token for pair in added.items() for token in pair), *left), tuple(notes)
