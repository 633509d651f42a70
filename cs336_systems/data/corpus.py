"""Corpora (streams of token ids), documents of sentences, and batches. The global batch is a pure function of (seed,
step), and each rank takes its rows of it. So a run that is resumed, on any number of ranks, sees the same tokens."""

import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.host.text import regular

IGNORED = -100  # a target that is not predicted; the default of torch's cross entropy
STDLIB_CAP = 8_000_000  # bytes: enough for hours of training on a laptop, and loaded in a second
# The end of a line, and the blank lines between it and another one.
BLANK_LINES = re.compile(rb"[^\n\r \t][ \t\r]*\n([ \t\r]*\n)++(?=[ \t\r]*[^\n\r \t])")
DEFAULT_SPLIT = "949,50,1"  # weights of training, validation and test documents


class Batch(NamedTuple):
    """Rows of a global batch: tokens and targets (batch seq), int64; some targets may be IGNORED. rows (batch,) are
    their indices in the global batch. For BERT also token_types (batch seq), the segment; padding_mask (batch seq),
    True at real tokens; and pair_labels (batch,). For packed documents positions (batch seq), from 0 in each one."""

    tokens: Tensor
    targets: Tensor | None = None
    rows: Tensor | None = None
    token_types: Tensor | None = None
    padding_mask: Tensor | None = None
    pair_labels: Tensor | None = None
    positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(self.tokens.to(device), *(None if t is None else t.to(device) for t in self[1:]))

    def split(self, size: int) -> "list[Batch]":
        """Split into microbatches of `size` rows, in order."""
        count = -(-len(self.tokens) // size)
        parts = ((None,) * count if t is None else t.split(size) for t in self)
        return [Batch(*each) for each in zip(*parts, strict=True)]


def count_targets(batch: Batch) -> Tensor:
    """Number of targets that are not IGNORED, a scalar."""
    assert batch.targets is not None
    return (batch.targets != IGNORED).sum()


@dataclass(frozen=True)
class Corpus:
    """A stream of token ids (tokens,) and its name: bytes of a text, or random ids."""

    tokens: np.ndarray
    name: str
    is_text: bool = True

    def split(self, fraction: float) -> tuple["Corpus", "Corpus"]:
        """Split into (training, validation): the last `fraction` of the stream is for validation."""
        cut = len(self.tokens) - round(fraction * len(self.tokens))
        training = replace(self, tokens=self.tokens[:cut], name=f"{self.name}, training")
        return training, replace(self, tokens=self.tokens[cut:], name=f"{self.name}, validation")


def stdlib_corpus(cap: int = STDLIB_CAP) -> Corpus:
    """Read the source of Python's standard library, without its tests, in the order of paths, at most `cap` bytes. It
    differs between Python versions. Raises UserError for a Python that is installed without it."""
    root, paths, raw = Path(sysconfig.get_path("stdlib")), [], bytearray()
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths, key=Path.as_posix):
        if len(raw) < cap and os.access(path, os.R_OK):
            raw += path.read_bytes()
    if not raw:
        raise UserError(f"this Python has no library source under {root}; name a text of yours with --data FILE")
    return Corpus(np.frombuffer(bytes(raw[:cap]), np.uint8), "Python's standard library")


def read_text(path: Path) -> bytes:
    """Read the bytes of a text file. Raises UserError for one that is missing, unreadable or not UTF-8 text."""
    try:
        raw = regular(path).read_bytes()
        raw.decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}") from None
    return raw


def file_corpus(paths: Sequence[Path]) -> Corpus:
    """Read and join the user's text files, in the given order. Raises UserError for one that is empty or no text."""
    pieces = [read_text(path) for path in paths]
    for path, raw in zip(paths, pieces, strict=True):
        if not raw or b"\0" in raw:
            problem = f"not text: byte {raw.index(0)} is zero" if raw else "empty"
            raise UserError(f"{path} is {problem}")
    return Corpus(np.frombuffer(b"".join(pieces), np.uint8), ", ".join(map(str, paths)))


def random_corpus(vocab_size: int, seed: int = 0, length: int = 4_000_000) -> Corpus:
    """Draw uniform random tokens, for benchmarks: no model can reach a loss below log(vocab_size) nats on them."""
    tokens = np.random.default_rng(seed).integers(vocab_size, size=length, dtype=np.int32)
    return Corpus(tokens, f"random tokens below {vocab_size}", is_text=False)


def load_corpus(data: Sequence[str], vocab_size: int, context: int) -> Corpus:
    """Load the corpus that `--data` names: files, `random`, or by default the standard library. Raises UserError if the
    vocabulary is too small for bytes, or if the text is shorter than one context and its last target."""
    if list(data) == ["random"]:
        return random_corpus(vocab_size)
    if vocab_size < 256:
        raise UserError(f"text is read as bytes, which need a vocabulary of 256, not {vocab_size}")
    corpus = file_corpus([Path(name) for name in data]) if data else stdlib_corpus()
    check_length(corpus, context)
    return corpus


def check_length(corpus: Corpus, context: int) -> None:
    """Raises UserError unless the corpus holds one context and the token after it."""
    if len(corpus.tokens) < context + 1:
        numbers = f"{corpus.name} has {len(corpus.tokens)} tokens; a context of {context} needs {context + 1}"
        shorter = f" or --context {len(corpus.tokens) - 1}" if len(corpus.tokens) > 1 else ""
        raise UserError(f"{numbers}: use a longer text{shorter}")


def rank_rows(batch: int, rank: int, world_size: int) -> range:
    """Range of a rank's rows in a global batch. Raises UserError if the batch does not divide over the ranks."""
    assert 0 <= rank < world_size
    if batch % world_size:
        raise UserError(f"a global batch of {batch} does not divide over {world_size} ranks")
    return range(batch)[rank * batch // world_size : (rank + 1) * batch // world_size]


def document_starts(corpus: Corpus) -> np.ndarray:
    """Find where documents begin, (tokens,): True at the first token. In a text a document begins after one or more
    blank lines, which may have spaces; of random tokens about one in 256 begins a document."""
    tokens = corpus.tokens
    if not corpus.is_text:
        return np.random.default_rng(0).random(len(tokens)) < 1 / 256
    starts = np.zeros(len(tokens), dtype=bool)
    starts[[0, *(gap.end() for gap in BLANK_LINES.finditer(tokens.tobytes()))]] = True
    return starts


def lm_batch(
    corpus: Corpus, step: int, seed: int, batch: int, context: int, rank: int = 0, world_size: int = 1,
    starts: np.ndarray | None = None,
) -> Batch:  # fmt: skip
    """Make this rank's rows (batch/world_size context) of a step's global batch; targets are the next tokens. With
    `starts` (`document_starts`) rows are packed documents: they have positions, and the target of a document's last
    token is IGNORED. A row may cut its first and last document, as in Llama 3's training (arXiv:2407.21783, section
    3.2). Raises UserError if the batch does not divide over the ranks."""
    rows = rank_rows(batch, rank, world_size)
    first = np.random.default_rng((seed, step)).integers(len(corpus.tokens) - context, size=batch)
    places = first[rows][:, None] + np.arange(context + 1)
    window = torch.from_numpy(corpus.tokens[places].astype(np.int64))
    tokens, targets, positions = window[:, :-1].contiguous(), window[:, 1:].contiguous(), None
    if starts is not None:
        begins, index = torch.from_numpy(starts[places]), torch.arange(context)
        positions = index - torch.where(begins[:, :-1], index, 0).cummax(1).values
        targets = targets.masked_fill(begins[:, 1:], IGNORED)
    return Batch(tokens, targets, torch.tensor(rows), positions=positions)


@dataclass(frozen=True)
class Documents:
    """Documents of sentences. Sentence s is tokens[sentences[s] : sentences[s + 1]]; document d has the sentences from
    documents[d] to documents[d + 1] - 1. Shapes: tokens (tokens,), sentences (count + 1,), documents (count + 1,).
    Splits share tokens and sentences, so `documents` need not begin at 0."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    name: str

    def __len__(self) -> int:
        return len(self.documents) - 1

    def split(self, weights: str = DEFAULT_SPLIT) -> "list[Documents]":
        """Split into training, validation and test, by whole documents in their order."""
        names, parts = ("training", "validation", "test"), []
        for part, (start, end) in zip(names, pairwise(split_points(weights, len(self))), strict=True):
            name = f"{self.name}, {part} ({end - start} of {len(self)} documents, split {weights})"
            parts.append(replace(self, documents=self.documents[start : end + 1], name=name))
        return parts


def split_points(weights: str, count: int) -> list[int]:
    """Boundaries of the parts of `count` documents: [0, end of training, end of validation, count]. Each is `count`
    times the cumulative share of the weights, rounded. Missing weights are 0. Raises UserError unless they are one to
    three numbers from 0 up, one of them positive."""
    try:
        numbers = [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise UserError(f"split {weights!r} is not up to three numbers, such as {DEFAULT_SPLIT}") from None
    if len(numbers) > 3:
        raise UserError(f"split {weights!r} has {len(numbers)} parts; training, validation and test are 3")
    if not all(0 <= number < float("inf") for number in numbers) or not any(numbers):
        raise UserError(f"split {weights!r} needs weights from 0 up, and one above 0, such as {DEFAULT_SPLIT}")
    shares = list(accumulate([*numbers, 0.0, 0.0][:3]))
    return [0, *(round(share / shares[-1] * count) for share in shares)]


def text_documents(raw: bytes) -> list[list[str]]:
    """Split a text into documents: a line is a sentence, and blank lines separate documents."""
    runs = groupby(raw.decode(errors="replace").split("\n"), lambda line: bool(line.strip()))
    return [[line.removesuffix("\r") for line in lines] for is_text, lines in runs if is_text]


def encode_documents(documents: Sequence[Sequence[str]], encode: Callable[[str], list[int]], name: str) -> Documents:
    """Encode documents to token ids; a sentence without tokens (control characters only) is left out."""
    tokens, sentences, starts = array("i"), array("q", [0]), array("q", [0])
    for document in documents:
        for sentence in document:
            tokens.extend(encode(sentence))
            if len(tokens) > sentences[-1]:
                sentences.append(len(tokens))
        starts.append(len(sentences) - 1)
    return Documents(np.array(tokens), np.array(sentences), np.array(starts), name)


def random_documents(tokens: np.ndarray, seed: int, name: str) -> Documents:
    """Cut a stream of tokens into sentences of 8 to 63 tokens and documents of 2 to 31 sentences, for benchmarks."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(8, 64, size=len(tokens) // 8 + 1).cumsum()
    sentences = np.concatenate(([0], ends[ends <= len(tokens)]))
    ends = rng.integers(2, 32, size=len(sentences) // 2 + 1).cumsum()
    documents = np.concatenate(([0], ends[ends < len(sentences)]))
    return Documents(tokens, sentences, documents, name)
