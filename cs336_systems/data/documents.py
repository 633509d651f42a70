"""Documents of sentences, encoded once into one array, and their split into training, validation and test."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from cs336_systems.errors import UserError

DEFAULT_SPLIT = "949,50,1"


@dataclass(frozen=True)
class Documents:
    """Sentence s is tokens[sentences[s] : sentences[s + 1]]; document d has sentences documents[d] to documents[d + 1].
    tokens (tokens,), sentences (count + 1,) and documents (count + 1,). Splits share tokens and sentences, so
    `documents` need not begin at 0."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    name: str

    def __len__(self) -> int:
        return len(self.documents) - 1

    def split(self, weights: str = DEFAULT_SPLIT) -> "Splits":
        """Split whole documents in their order: training first, then validation, then test."""
        points = split_points(weights, len(self))
        parts = []
        for part, (start, end) in zip(Splits._fields, pairwise(points), strict=True):
            name = f"{self.name}, {part} ({end - start} of {len(self)} documents, split {weights})"
            parts.append(replace(self, documents=self.documents[start : end + 1], name=name))
        return Splits(*parts)


class Splits(NamedTuple):
    """Documents to train on, to evaluate on during training, and to test on after it."""

    training: Documents
    validation: Documents
    test: Documents


def split_points(weights: str, count: int) -> list[int]:
    """Boundaries of the parts of `count` documents: [0, end of training, end of validation, count]. Each is the
    cumulative weight's share of `count`, rounded. Weights left out are 0. Raises UserError unless they are one to three
    numbers from 0 up, one of them positive."""
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
    """Documents of a text: a line is a sentence, and blank lines separate documents."""
    documents: list[list[str]] = [[]]
    for line in raw.decode(errors="replace").split("\n"):
        if line.strip():
            documents[-1].append(line.removesuffix("\r"))
        elif documents[-1]:
            documents.append([])
    return documents if documents[-1] else documents[:-1]


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
    """A stream of tokens cut into sentences of 8 to 63 tokens and documents of 2 to 31 sentences, for benchmarks."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(8, 64, size=len(tokens) // 8 + 1).cumsum()
    sentences = np.concatenate(([0], ends[ends <= len(tokens)]))
    ends = rng.integers(2, 32, size=len(sentences) // 2 + 1).cumsum()
    documents = np.concatenate(([0], ends[ends < len(sentences)]))
    return Documents(tokens, sentences, documents, name)
