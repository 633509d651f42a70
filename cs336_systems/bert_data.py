"""BERT's samples: two segments of a document, perhaps in the wrong order, with some words hidden. Sample i is a pure
function of (documents, seed, i), so that every layout of the ranks, and a run that is resumed, sees the same ones."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from cs336_systems.data import IGNORED, Batch, file_corpus, random_corpus, stdlib_corpus
from cs336_systems.documents import (
    DEFAULT_SPLIT,
    Documents,
    Splits,
    encode_documents,
    random_documents,
    split_points,
    text_documents,
)
from cs336_systems.errors import UserError
from cs336_systems.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, WordPieceTokenizer

TokenizerKind = Literal["bytes", "wordpiece"]

SPECIAL_PER_SAMPLE = 3  # [CLS] A [SEP] B [SEP]
SHORTEST = 2 + SPECIAL_PER_SAMPLE  # a token in either segment
LONG_SENTENCE = 512  # tokens; a document with a longer sentence is hardly prose, and is skipped
LONGEST_NGRAM = 3  # words that are hidden together
# P(n) ~ 1/n, not normalised and summed up: the first entries serve where fewer words are left.
NGRAM_WEIGHTS = np.cumsum(1 / np.arange(1, LONGEST_NGRAM + 1))
MASKED, KEPT = 0.8, 0.1  # of the tokens to predict; the others are replaced at random
PACKING, SHUFFLE, SAMPLE = 1, 2, 3  # what a random stream is for


class Sample(NamedTuple):
    """A row of a batch: tokens, targets and token_types (seq), the first `length` of them real, and whether the
    segments are swapped."""

    tokens: np.ndarray
    targets: np.ndarray
    token_types: np.ndarray
    length: int
    swapped: bool


class BertData:
    """Batches of one split. An epoch has each packed stretch of sentences once, in an order of its own, cut, swapped
    and masked anew; epochs follow each other without end.

    The stretches are the same in every epoch (Megatron-LM draws new lengths), so that any sample can be made without
    the epochs before it. `model_vocab_size` is what the model's embedding holds. Raises UserError where the documents
    give no sample, and for sizes and ids that do not fit.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_length: int,
        seed: int = 0,
        mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        model_vocab_size: int | None = None,
    ) -> None:
        if seq_length < SHORTEST:
            raise UserError(f"a BERT sample needs a context of {SHORTEST} tokens at least, not {seq_length}")
        if not 0 < mask_prob < 1 or not 0 <= short_seq_prob <= 1:
            raise UserError(f"mask_prob {mask_prob} must lie in (0, 1), and short_seq_prob {short_seq_prob} in [0, 1]")
        check_vocabulary(tokenizer, model_vocab_size)
        _check_ids(documents, tokenizer)
        self.documents, self.tokenizer, self.seq_length = documents, tokenizer, seq_length
        self.seed, self.mask_prob = seed, mask_prob
        self.ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
        self.stretches = pack(documents, seq_length - SPECIAL_PER_SAMPLE, short_seq_prob, seed)
        if not len(self.stretches):
            raise UserError(
                f"{documents.name}: no document has two sentences of at most {LONG_SENTENCE} tokens (a line is a "
                "sentence, a blank line ends a document); use a longer text or another split"
            )
        # Two: a batch may reach from one epoch into the next.
        self._order = lru_cache(2)(self._shuffle)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.stretches)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((SHUFFLE, self.seed, epoch)).permutation(len(self))

    def sample(self, index: int) -> Sample:
        """Sample number `index`, counted from 0 over all epochs."""
        epoch, place = divmod(index, len(self))
        first, end, target_length = self.stretches[self._order(epoch)[place]]
        rng = np.random.default_rng((SAMPLE, self.seed, index))
        sentences, tokens = self.documents.sentences, self.documents.tokens
        cut = rng.integers(first + 1, end)
        a, b = tokens[sentences[first] : sentences[cut]], tokens[sentences[cut] : sentences[end]]
        swapped = bool(rng.random() < 0.5)
        if swapped:
            a, b = b, a
        a, b = truncate(a, b, target_length, rng)
        cls, sep = [self.tokenizer.cls], [self.tokenizer.sep]
        row = np.concatenate((cls, a, sep, b, sep))
        length = len(row)
        token_types = np.zeros(self.seq_length, np.int64)
        token_types[len(a) + 2 : length] = 1
        padded, targets = np.full(self.seq_length, self.tokenizer.pad), np.full(self.seq_length, IGNORED)
        padded[:length], targets[:length] = self.hide(row, rng)
        return Sample(padded, targets, token_types, length, swapped)

    def hide(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(tokens with some masked, kept or replaced; targets, IGNORED elsewhere), (seq) each.

        `mask_prob` of the row's length, special tokens counted, is to be predicted, and one token at least.
        """
        chosen = choose_words(self.tokenizer.words(row), max(1, round(self.mask_prob * len(row))), rng)
        if not len(chosen):
            # No whole word is short enough, or all is white space, which bytes can be.
            chosen = rng.choice(np.flatnonzero(~np.isin(row, self.tokenizer.special_ids)), 1)
        fate = rng.random(len(chosen))
        tokens, targets = row.copy(), np.full(len(row), IGNORED)
        targets[chosen] = row[chosen]
        tokens[chosen[fate < MASKED]] = self.tokenizer.mask
        replaced = chosen[fate >= MASKED + KEPT]
        tokens[replaced] = rng.choice(self.ordinary, len(replaced))
        return tokens, targets

    def batch(self, step: int, global_batch: int, rank: int = 0, world_size: int = 1) -> Batch:
        """This rank's rows of the global batch of one step, (global_batch/world_size seq); pair label 1: swapped.

        Before this step, step * global_batch samples were consumed. Raises UserError if the batch does not divide over
        the ranks.
        """
        assert 0 <= rank < world_size
        if global_batch % world_size:
            raise UserError(f"a global batch of {global_batch} does not divide over {world_size} ranks")
        size = global_batch // world_size
        rows = torch.arange(rank * size, (rank + 1) * size)
        samples = [self.sample(step * global_batch + row) for row in rows.tolist()]
        lengths = torch.tensor([sample.length for sample in samples])
        return Batch(
            tokens=torch.from_numpy(np.stack([sample.tokens for sample in samples])),
            targets=torch.from_numpy(np.stack([sample.targets for sample in samples])),
            rows=rows,
            token_types=torch.from_numpy(np.stack([sample.token_types for sample in samples])),
            padding_mask=torch.arange(self.seq_length) < lengths[:, None],
            pair_labels=torch.tensor([int(sample.swapped) for sample in samples]),
        )


def pack(documents: Documents, max_tokens: int, short_seq_prob: float, seed: int) -> np.ndarray:
    """Stretches of consecutive sentences, (samples 3): first sentence, the one after the last, tokens aimed at.

    Sentences of a document are taken until they reach `max_tokens`, or with probability `short_seq_prob` a random
    length from 2 up, so that the model meets short rows too. A stretch has two sentences at least, so a document's
    last sentence is never left over alone (Megatron-LM v2.5, build_mapping).
    """
    lengths = np.diff(documents.sentences)
    rng = np.random.default_rng((PACKING, seed))
    # Every stretch takes two sentences, which bounds their number.
    short = rng.random(len(lengths) // 2) < short_seq_prob
    targets = iter(np.where(short, rng.integers(2, max_tokens + 1, len(short)), max_tokens).tolist())
    stretches = []
    for begin, end in pairwise(documents.documents.tolist()):
        if end - begin < 2 or lengths[begin:end].max() > LONG_SENTENCE:
            continue
        first, total, target = begin, 0, next(targets)
        for sentence, length in enumerate(lengths[begin:end].tolist(), begin):
            total += length
            left = end - sentence - 1
            if left == 0 or (total >= target and left > 1 and sentence > first):
                stretches.append((first, sentence + 1, target))
                if left:
                    first, total, target = sentence + 1, 0, next(targets)
    return np.array(stretches, np.int64).reshape(-1, 3)


def truncate(a: np.ndarray, b: np.ndarray, max_tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Both segments shortened to `max_tokens` together: the longer one loses tokens, b where they are equally long,
    each from its front or its back by the toss of a coin (arXiv:1810.04805's own code)."""
    if len(a) + len(b) <= max_tokens:
        return a, b
    left_b = min(len(b), max(max_tokens // 2, max_tokens - len(a)))
    left_a = max_tokens - left_b
    front_a, front_b = rng.binomial([len(a) - left_a, len(b) - left_b], 0.5)
    return a[front_a : front_a + left_a], b[front_b : front_b + left_b]


def choose_words(words: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Positions (count,) of whole words to predict, `budget` at most: n-grams of up to LONGEST_NGRAM words, P(n) ~ 1/n.

    words (seq,) numbers each position's word from 0, -1 outside. An n-gram that is longer than what is left of the
    budget gives up words from its end, and is passed over when its first word alone is too long.
    """
    places = np.flatnonzero(words >= 0)
    count = int(words.max(initial=-1)) + 1
    starts = np.searchsorted(words[places], np.arange(count + 1)).tolist()
    following = np.minimum(np.arange(count, 0, -1), LONGEST_NGRAM)
    draws = rng.random(count) * NGRAM_WEIGHTS[following - 1]
    sizes = (np.searchsorted(NGRAM_WEIGHTS, draws, side="right") + 1).tolist()
    taken = np.zeros(count, bool)
    for word in rng.permutation(count).tolist():
        size = sizes[word]
        while size and starts[word + size] - starts[word] > budget:
            size -= 1
        if size and not taken[word : word + size].any():
            taken[word : word + size] = True
            budget -= starts[word + size] - starts[word]
        if not budget:
            break
    return places[taken[words[places]]]


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int | None) -> None:
    """Raises UserError if the model has no embedding for some of the tokenizer's ids."""
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's vocabulary {model_vocab_size}: "
            f"use a vocabulary of {tokenizer.vocab_size} or more"
        )


def _check_ids(documents: Documents, tokenizer: Tokenizer) -> None:
    tokens = documents.tokens
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size):
        raise UserError(
            f"{documents.name} has token ids from {tokens.min()} to {tokens.max()}; the tokenizer's are 0 to "
            f"{tokenizer.vocab_size - 1}"
        )


def read_texts(data: Sequence[str]) -> tuple[list[list[str]], str]:
    """(documents of sentences, their name) of the user's files, or of the standard library where none is named.

    A file ends a document. Raises UserError for what is no text.
    """
    corpora = [file_corpus([Path(name)]) for name in data] or [stdlib_corpus()]
    documents = [document for corpus in corpora for document in text_documents(corpus.tokens.tobytes())]
    return documents, ", ".join(corpus.name for corpus in corpora)


def make_tokenizer(
    kind: TokenizerKind, data: Sequence[str], vocab_size: int, split: str, vocab_file: Path | None, lower_case: bool
) -> Tokenizer:
    """The tokenizer that the options ask for; WordPiece without a vocabulary file is trained on the training split.

    `random` data is token ids already. Raises UserError where it cannot be made or has more tokens than `vocab_size`.
    """
    tokenizer: Tokenizer = ByteTokenizer()
    if list(data) == ["random"]:
        tokenizer = IdTokenizer(vocab_size)
    elif vocab_file:
        tokenizer = WordPieceTokenizer.from_file(vocab_file, lower_case)
    elif kind == "wordpiece":
        documents, _ = read_texts(data)
        training = documents[: split_points(split, len(documents))[1]]
        sentences = [sentence for document in training for sentence in document]
        tokenizer = WordPieceTokenizer.train(sentences, vocab_size, lower_case)
    check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def load_documents(data: Sequence[str], tokenizer: Tokenizer, split: str = DEFAULT_SPLIT) -> Splits:
    """What `--data` names (nothing: the standard library; `random`; files), encoded and divided by documents."""
    if list(data) == ["random"]:
        corpus = random_corpus(min(tokenizer.special_ids))
        return random_documents(corpus.tokens, 0, corpus.name).split(split)
    texts, name = read_texts(data)
    return encode_documents(texts, tokenizer.encode, name).split(split)
