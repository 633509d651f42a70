"""Corpora (streams of token ids) and batches. The global batch is a pure function of (seed, step), and each rank takes
its rows of it, so a run sees the same tokens when it is resumed or runs on another number of ranks."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cs336_systems.errors import UserError

IGNORED = -100  # a target that is not predicted, as torch's cross entropy has it
STDLIB_CAP = 8_000_000  # bytes: hours of training on a laptop, and loaded in a second


class Batch(NamedTuple):
    """Rows of a global batch: tokens and targets (batch seq), int64; some targets may be IGNORED. rows (batch,) are
    their indices in the global batch. For BERT also token_types (batch seq), the segment; padding_mask (batch seq),
    True at real tokens; and pair_labels (batch,)."""

    tokens: Tensor
    targets: Tensor | None = None
    rows: Tensor | None = None
    token_types: Tensor | None = None
    padding_mask: Tensor | None = None
    pair_labels: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(self.tokens.to(device), *(None if t is None else t.to(device) for t in self[1:]))

    def split(self, size: int) -> "list[Batch]":
        """Microbatches of `size` rows, in order."""
        count = -(-len(self.tokens) // size)
        parts = ((None,) * count if t is None else t.split(size) for t in self)
        return [Batch(*each) for each in zip(*parts, strict=True)]


def count_targets(batch: Batch) -> Tensor:
    """Number of targets that are not IGNORED, a scalar."""
    assert batch.targets is not None
    return (batch.targets != IGNORED).sum()


@dataclass(frozen=True)
class Corpus:
    """A stream of token ids (tokens,) with its name and the SHA-256 of its bytes."""

    tokens: np.ndarray
    name: str
    sha256: str

    def split(self, fraction: float) -> tuple["Corpus", "Corpus"]:
        """(training, validation): the last `fraction` of the stream is kept for validation."""
        cut = len(self.tokens) - round(fraction * len(self.tokens))
        training = replace(self, tokens=self.tokens[:cut], name=f"{self.name}, training")
        return training, replace(self, tokens=self.tokens[cut:], name=f"{self.name}, validation")


def stdlib_corpus(cap: int = STDLIB_CAP) -> Corpus:
    """Source of Python's own standard library, without its tests, in the order of paths, at most `cap` bytes. Every
    machine has it; it differs between Python versions, hence the hash. Raises UserError if Python was installed without
    its source."""
    root, paths, raw = Path(sysconfig.get_path("stdlib")), [], bytearray()
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        if len(raw) < cap and os.access(path, os.R_OK):
            raw += path.read_bytes()
    if not raw:
        raise UserError(f"this Python has no library source under {root}; name a text of yours with --data FILE")
    return _byte_corpus(bytes(raw[:cap]), "Python's standard library")


def file_corpus(paths: Sequence[Path]) -> Corpus:
    """The bytes of the user's text files, in the order given. Raises UserError for a file that is missing, unreadable,
    empty or not UTF-8 text."""
    pieces = []
    for path in paths:
        try:
            raw = path.read_bytes()
            raw.decode()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}") from None
        if not raw or b"\0" in raw:
            problem = f"not text: byte {raw.index(0)} is zero" if raw else "empty"
            raise UserError(f"{path} is {problem}")
        pieces.append(raw)
    return _byte_corpus(b"".join(pieces), ", ".join(str(path) for path in paths))


def _byte_corpus(raw: bytes, name: str) -> Corpus:
    return Corpus(np.frombuffer(raw, dtype=np.uint8), name, hashlib.sha256(raw).hexdigest())


def random_corpus(vocab_size: int, seed: int = 0, length: int = 4_000_000) -> Corpus:
    """Uniform random tokens, for benchmarks: no model's loss on them is below log(vocab_size) nats."""
    tokens = np.random.default_rng(seed).integers(vocab_size, size=length, dtype=np.int32)
    return Corpus(tokens, f"random tokens below {vocab_size}", hashlib.sha256(tokens.tobytes()).hexdigest())


def load_corpus(data: Sequence[str], vocab_size: int, context: int) -> Corpus:
    """Corpus that `--data` names: files, `random`, or by default the standard library. Raises UserError for text that
    the vocabulary cannot hold or that is shorter than one context and its target."""
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
        raise UserError(f"{numbers}: use a longer text or --context {max(1, len(corpus.tokens) - 1)}")


def rank_rows(batch: int, rank: int, world_size: int) -> range:
    """A rank's rows of a global batch. Raises UserError if the batch does not divide over the ranks."""
    assert 0 <= rank < world_size
    if batch % world_size:
        raise UserError(f"a global batch of {batch} does not divide over {world_size} ranks")
    return range(batch)[rank * batch // world_size : (rank + 1) * batch // world_size]


def lm_batch(
    corpus: Corpus, step: int, seed: int, batch: int, context: int, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets of one step, each (batch/world_size context): the target is the next token.
    `batch` counts the rows of all ranks. Raises UserError if it does not divide over the ranks."""
    starts = np.random.default_rng((seed, step)).integers(len(corpus.tokens) - context, size=batch)
    mine = starts[rank_rows(batch, rank, world_size)]
    window = corpus.tokens[mine[:, None] + np.arange(context + 1)].astype(np.int64)
    return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())
