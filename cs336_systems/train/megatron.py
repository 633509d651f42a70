"""Megatron-LM v2.5's options of its pretraining scripts, as data, and a translator into this project's options.

In the tables a name with `=` takes one value, with `*` any number of them; the others are flags, which have the value
that stands beside our name. Names as in megatron/arguments.py, misspelling included. A name in no table is this
project's own and stays as it is.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cs336_systems.errors import UserError

SHARED = (
    "--num-layers= --micro-batch-size= --lr= --min-lr= --weight-decay= --adam-eps= --loss-scale= --initial-loss-scale= "
    "--loss-scale-window= --hysteresis= --min-loss-scale= --mask-prob= --short-seq-prob= --eval-interval= "
    "--eval-iters= --split= --vocab-file= --seed= --sequence-parallel"
)
RENAMED = {
    "--tensor-model-parallel-size=": "--tp", "--pipeline-model-parallel-size=": "--pp",
    "--num-layers-per-virtual-pipeline-stage=": "--chunks", "--use-distributed-optimizer": "--zero 1",
    "--distributed-backend=": "--backend", "--make-vocab-size-divisible-by=": "--pad-vocabulary",
    "--hidden-size=": "--d-model", "--num-attention-heads=": "--num-heads", "--ffn-hidden-size=": "--d-ff",
    "--seq-length=": "--context", "--encoder-seq-length=": "--context", "--max-position-embeddings=": "--max-context",
    "--attention-dropout=": "--dropout", "--hidden-dropout=": "--dropout", "--fp16": "--precision fp16",
    "--bf16": "--precision bf16", "--checkpoint-activations": "--recompute segments",
    "--checkpoint-num-layers=": "--recompute-every",
    "--global-batch-size=": "--batch-size", "--train-iters=": "--steps", "--train-samples=": "--steps",
    "--lr-decay-iters=": "--decay-steps", "--lr-decay-samples=": "--decay-steps", "--lr-decay-style=": "--decay",
    "--lr-warmup-fraction=": "--warmup-fraction", "--lr-warmup-iters=": "--warmup-steps",
    "--lr-warmup-samples=": "--warmup-steps", "--clip-grad=": "--clip", "--adam-beta1=": "--beta1",
    "--adam-beta2=": "--beta2", "--data-path*": "--data", "--tokenizer-type=": "--tokenizer",
    "--log-interval=": "--log-every", "--save=": "--out", "--save-interval=": "--save-every", "--load=": "--resume",
}  # fmt: skip
FIXED = {"--init-method-std": "0.02", "--layernorm-epsilon": "1e-5", "--optimizer": "adam"}  # each takes one value
IGNORED = {  # by reason
    "a checkpoint is written and read whole": "--finetune --no-save-optim --no-save-rng --no-load-optim --no-load-rng "
    "--override-lr-scheduler --use-checkpoint-lr-scheduler --adlr-autoresume --adlr-autoresume-interval=",
    "the launcher says it": "--local-rank=",
    "the log is a file, named with --log-file": "--tensorboard-dir= --tensorboard-log-interval= "
    "--tensorboard-queue-size= --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard "
    "--log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard",
    "the run ends after --steps": "--exit-interval= --exit-duration-in-mins=",
    "it says how Megatron-LM computes, not what": "--num-workers= --DDP-impl= --use-contiguous-buffers-in-ddp "
    "--no-scatter-gather-tensors-in-pipeline --use-cpu-initialization --lazy-mpu-init= --data-impl= --mmap-warmup "
    "--dataloader-type= --onnx-safe= --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--distribute-checkpointed-activations",
    "say --recompute segments": "--activations-checkpoint-method= --activations-checkpoint-num-layers=",
    "mixed precision is --precision alone": "--attention-softmax-in-fp32 --no-query-key-layer-scaling "
    "--fp32-residual-connection --fp16-lm-cross-entropy --accumulate-allreduce-grads-in-fp32",
    "there is no such choice here, so the runs may differ in it": "--kv-channels= --openai-gelu --bert-no-binary-head "
    "--apply-residual-connection-post-layernorm --init-method-xavier-uniform --rampup-batch-size* --sgd-momentum= "
    "--merge-file= --vocab-extra-ids= --sample-rate= --decoder-seq-length= --reset-position-ids "
    "--reset-attention-mask --eod-mask-loss",
    "it belongs to other models of Megatron-LM": "--ict-head-size= --ict-load= --bert-load= --block-data-path= "
    "--biencoder-projection-dim= --biencoder-shared-query-context-model --titles-data-path= --query-in-block-prob= "
    "--use-one-sent-docs --evidence-data-path= --embedding-path= --retriever-report-topk-accuracies* "
    "--retriever-score-scaling --retriever-seq-length= --indexer-batch-size= --indexer-log-interval= --num-classes= "
    "--img-dim= --num-channels= --patch-dim=",
}
# What --size replaces; REQUIRED is the part that Megatron asks for, with this project's names.
REQUIRED = {"--num-layers": "--num-layers", "--hidden-size": "--d-model", "--num-attention-heads": "--num-heads"}
SIZE, BATCH = ("--size", "--preset"), ("--batch-size", "--global-batch-size")
SHAPE = (*REQUIRED, "--ffn-hidden-size", "--seq-length", "--encoder-seq-length", "--max-position-embeddings")
BERT_DATA = ("--vocab-file", "--split", "--mask-prob")
# Megatron's defaults that differ from this project's and change what is learned.
DEFAULTS = {"--decay": "linear", "--min-lr": "0.0", "--warmup-steps": "0", "--weight-decay": "0.01"}
DEFAULTS |= {"--beta2": "0.999", "--clip": "1.0", "--dropout": "0.1"}
WARMUP = {"--warmup-fraction": "--warmup-steps"}  # two units of one thing

_REASONS = {entry.rstrip("=*"): reason for reason, entries in IGNORED.items() for entry in entries.split()}
_OURS = {entry.rstrip("=*"): ours for entry, ours in RENAMED.items()}
_TABLES = (*SHARED.split(), *RENAMED, *(f"{name}=" for name in FIXED), *" ".join(IGNORED.values()).split())
_ENTRIES = {entry.rstrip("=*"): entry for entry in _TABLES}
_ONLY_MEGATRON = _ENTRIES.keys() - {entry.rstrip("=") for entry in SHARED.split()}


class Option(NamedTuple):
    """An option of a command line: its name, its values, and the tokens that this project's command is to see."""

    name: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))

    def whole(self, least: int = 1) -> int:
        """The value as a whole number. Raises UserError if it is none or too small."""
        value = "".join(self.values[:1])
        if not value.removeprefix("-").isdecimal() or len(value) > 18:
            raise UserError(f"{self.name} takes a whole number, not {value!r}")
        if int(value) < least:
            raise UserError(f"{self.name} must be at least {least}, not {int(value)}")
        return int(value)


def _either(line: dict[str, Option], *names: str) -> Option | None:
    return next((line[name] for name in names if name in line), None)


def _take_option(left: deque[str]) -> Option:
    """Take one option and its values from the front. Raises UserError if Megatron's option lacks its value."""
    typed, equals, inline = left.popleft().partition("=")
    name, words = typed.replace("_", "-"), list[str]()
    entry = _ENTRIES.get(name)
    if entry == name and equals:
        raise UserError(f"{name} is a flag and takes no value, not {inline!r}")
    most = 10**6 if entry is None or (entry[-1] == "*" and not equals) else int(entry[-1] == "=" and not equals)
    while left and len(words) < most and not left[0].startswith("--"):
        words.append(left.popleft())
    values = (inline,) if equals else tuple(words)
    if entry is None:
        name = typed
    elif most and not words:
        raise UserError(f"{name} lacks its value")
    return Option(name, values, (f"{name}={inline}" if equals else name, *words))


def _plain(text: str) -> float | str:
    """A number as such, so that 0.1 equals 1e-1."""
    try:
        return float(text)
    except ValueError:
        return text


def _weights(option: Option) -> tuple[str, ...]:
    """The weights of `weight path weight path ...`; none of `path ...`."""
    weights = option.values[::2]
    return weights if len(option.values) % 2 == 0 and all(isinstance(_plain(each), float) for each in weights) else ()


def _words(option: Option, line: dict[str, Option]) -> list[str]:
    """Our option and values that say the same. Raises UserError where they cannot be known."""
    name, (ours, *fixed) = option.name, _OURS[option.name].split()
    if name == "--tokenizer-type":
        if not option.values[0].startswith("BertWordPiece"):
            raise UserError(f"{option} does not exist here; use --tokenizer wordpiece or --tokenizer bytes")
        return [ours, "wordpiece", *["--lower-case"][: option.values == ("BertWordPieceLowerCase",)]]
    if name == "--lr-decay-style" and option.values == ("constant",):
        raise UserError(f"{option} does not exist here; give --min-lr the value of --lr instead")
    if name == "--data-path":
        paths = option.values[1::2] if _weights(option) else option.values
        return [word for path in paths for word in (ours, path)]
    if name.endswith("-samples"):  # as steps of the global batch; Megatron too drops the remainder
        if (batch := _either(line, *BATCH)) is None:
            raise UserError(f"{option} counts samples; say with --global-batch-size how many make a step")
        count, size = option.whole(least=0), batch.whole()
        if 0 < count < size:
            raise UserError(f"{option} is less than one global batch of {size}")
        return [ours, str(count // size)]
    if name == "--num-layers-per-virtual-pipeline-stage":  # chunks: layers / (stages x layers of a chunk)
        layers, ranks = line.get("--num-layers"), _either(line, "--pp", stages := "--pipeline-model-parallel-size")
        if _either(line, *SIZE) or layers is None or ranks is None:
            raise UserError(f"{option} needs --num-layers and {stages}; with --size, say --chunks")
        chunks, rest = divmod(layers.whole(), ranks.whole() * option.whole())
        if rest:
            product = f"{ranks.whole()} stages x {option.whole()} layers in a chunk"
            raise UserError(f"{layers} is not a multiple of {product}")
        return [ours, str(chunks)]
    return [ours, *(fixed or option.values)]


def _reason(option: Option, line: dict[str, Option]) -> str | None:
    """The reason why an option is ignored; None if it is not."""
    if option.name in SHAPE and (size := _either(line, *SIZE)):
        return f"{size} sets the shape"
    fixed = FIXED.get(option.name)
    if fixed is not None and _plain(option.values[0]) != _plain(fixed):
        return f"here it is {fixed}"
    if option.name == "--load" and (save := _either(line, "--out", "--save")) and save.values != option.values:
        return "a run goes on in the folder that it saves to"
    return _REASONS.get(option.name)


def _added(line: dict[str, Option], translated: dict[str, list[str]]) -> dict[str, str]:
    """Options that Megatron takes for granted and this project does not: of interleaving, and of pretrain_bert.py."""
    added = {"--schedule": "interleaved"} if translated.get("--chunks", ["--chunks", "1"])[1] != "1" else {}
    foreign = any(name in _ONLY_MEGATRON and name != "--local-rank" for name in line)
    if foreign and any(name in line for name in (*SHAPE, *BERT_DATA)):
        added["--objective"] = "bert"
        if "--vocab-file" in line and ("--objective" not in line or line["--objective"].values[:1] == ("bert",)):
            added["--tokenizer"] = "wordpiece"
        if (width := _either(line, "--d-model", "--hidden-size")) and not _either(line, *SIZE):
            added["--d-ff"] = str(4 * width.whole())
        # The horizon is that of the run that was meant, also when --steps cuts it short.
        if meant := _either(line, "--train-iters", "--train-samples"):
            added["--decay-steps"] = _words(meant, line)[1]
        added |= DEFAULTS
    taken = {WARMUP.get(name, name) for name in line} | set(translated)
    return {ours: value for ours, value in added.items() if ours not in taken}


def _partly_ignored(line: Mapping[str, Option], translated: Mapping[str, list[str]]) -> list[str]:
    """Notes on options of which this project takes a part: weights of texts, one of two dropouts."""
    notes = []
    if "--data" in translated and (weights := _weights(line["--data-path"])):
        notes.append(f"ignored: the weights {', '.join(weights)} of --data-path (texts are read one after the other)")
    dropouts = [line[name] for name in ("--attention-dropout", "--hidden-dropout") if name in line]
    if len(dropouts) == 1 and "--dropout" in translated and _plain(dropouts[0].values[0]) != 0.1:
        notes.append(f"{dropouts[0]} holds for all dropout (one option here)")
    return notes


def translate(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Translate a command line in Megatron-LM v2.5's names, this project's or both: (its words here, notes of changes).

    Own names win over Megatron's wherever they stand, and `--size` over a shape. Where Megatron's names describe a
    BERT, the objective and the defaults of its pretrain_bert.py come along. Unknown tokens stay as they are. Raises
    UserError for a missing value, for options that contradict each other, and where a number is needed and not there.
    """
    left, options = deque(arguments), list[Option]()
    while left and left[0] != "--":
        options.append(_take_option(left))
    line = {option.name: option for option in options}  # the last of each name counts
    given = [line[name] for name in SHAPE[1:4] if name in line]
    missing = [name for name, ours in REQUIRED.items() if not _either(line, ours, name)]
    if given and missing and not _either(line, *SIZE):  # half a shape would change a preset that nobody named
        raise UserError(f"{given[0]} is part of a shape; give {' and '.join(missing)} as well, or --size NAME alone")
    own = {WARMUP.get(name, name): option for name, option in reversed(line.items())}
    tokens, ignored, replaced = list[str](), dict[str, list[str]](), list[str]()
    first, translated = dict[str, Option](), dict[str, list[str]]()  # by our option: whose it is, and its tokens
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
            tokens += ["--resume"] if _either(line, "--out", "--save") else ["--resume", "--out", *option.values]
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
    notes += _partly_ignored(line, translated)
    if added:
        notes.append(f"added: {', '.join(map(' '.join, added.items()))} (what Megatron-LM takes for granted)")
    return (*tokens, *(token for pair in added.items() for token in pair), *left), tuple(notes)
