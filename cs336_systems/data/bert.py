"""BERT's samples: two segments of a document, swapped in half of the cases, with some words masked.

Sample i is a pure function of (documents, seed, i), so a run that is resumed, or runs on another number of ranks, sees
the same samples.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from cs336_systems.data import corpus
from cs336_systems.data.corpus import DEFAULT_SPLIT, IGNORED, Batch, Documents
from cs336_systems.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, WordPieceTokenizer
from cs336_systems.errors import UserError

TokenizerKind = Literal["bytes", "wordpiece"]

SPECIAL_PER_SAMPLE = 3  # [CLS] A [SEP] B [SEP]
SHORTEST = 2 + SPECIAL_PER_SAMPLE  # one token in each segment
LONG_SENTENCE = 512  # tokens; a document with a longer sentence is hardly prose, and is skipped
LONGEST_NGRAM = 3  # words that are masked together
# Cumulative sums of 1/n, which P(n) is proportional to; if fewer words are left, only the first entries are used.
NGRAM_WEIGHTS = np.cumsum(1 / np.arange(1, LONGEST_NGRAM + 1))
MASKED, KEPT = 0.8, 0.1  # shares of the tokens to predict; the others are replaced by random ones
PACKING, SHUFFLE, SAMPLE = 1, 2, 3  # seeds of separate random streams


class Sample(NamedTuple):
    """A row of a batch: tokens, targets and token_types (seq), of which the first `length` are real."""

    tokens: np.ndarray
    targets: np.ndarray
    token_types: np.ndarray
    length: int
    swapped: bool


class BertData:
    """Batches of one split, over any number of epochs. Each epoch shuffles the packed spans of sentences, and cuts,
    swaps and masks them again. The spans are the same in every epoch (Megatron-LM draws new lengths), so any sample can
    be made without those before it. Raises UserError for documents without any sample, and for invalid sizes."""

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, seq_length: int, seed: int = 0, mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
    ) -> None:  # fmt: skip
        if seq_length < SHORTEST:
            raise UserError(f"a BERT sample needs a context of {SHORTEST} tokens at least, not {seq_length}")
        if not 0 < mask_prob < 1 or not 0 <= short_seq_prob <= 1:
            raise UserError(f"mask_prob {mask_prob} must lie in (0, 1), and short_seq_prob {short_seq_prob} in [0, 1]")
        self.documents, self.tokenizer, self.seq_length = documents, tokenizer, seq_length
        self.seed, self.mask_prob = seed, mask_prob
        self.ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
        self.spans = pack(documents, seq_length - SPECIAL_PER_SAMPLE, short_seq_prob, seed)
        if not (count := len(self.spans)):
            none = f"no document has two sentences of at most {LONG_SENTENCE} tokens"
            rules = "(a line is a sentence, a blank line ends a document)"
            raise UserError(f"{documents.name}: {none} {rules}; use a longer text or another split")
        # Two epochs' orders are kept, since a batch may reach from one epoch into the next.
        self._order = lru_cache(2)(lambda epoch: np.random.default_rng((SHUFFLE, seed, epoch)).permutation(count))

    def sample(self, index: int) -> Sample:
        """Make sample number `index`, counted from 0 over all epochs."""
        epoch, place = divmod(index, len(self.spans))
        first, end, target_length = self.spans[self._order(epoch)[place]]
        rng = np.random.default_rng((SAMPLE, self.seed, index))
        sentences, tokens = self.documents.sentences, self.documents.tokens
        cut = rng.integers(first + 1, end)
        a, b = tokens[sentences[first] : sentences[cut]], tokens[sentences[cut] : sentences[end]]
        swapped = bool(rng.random() < 0.5)
        a, b = truncate(*((b, a) if swapped else (a, b)), target_length, rng)
        cls, sep = [self.tokenizer.cls], [self.tokenizer.sep]
        row = np.concatenate((cls, a, sep, b, sep))
        tokens, targets, token_types = (np.full(self.seq_length, fill) for fill in (self.tokenizer.pad, IGNORED, 0))
        tokens[: len(row)], targets[: len(row)] = self.hide(row, rng)
        token_types[len(a) + 2 : len(row)] = 1
        return Sample(tokens, targets, token_types, len(row), swapped)

    def hide(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Choose tokens to predict, and mask, replace or keep them; returns tokens (seq) and targets (seq), IGNORED at
        other tokens. The share `mask_prob` of the row, special tokens counted, is chosen, and at least one token."""
        chosen = choose_words(self.tokenizer.words(row), max(1, round(self.mask_prob * len(row))), rng)
        if not len(chosen):  # no whole word is short enough, or all bytes are white space
            chosen = rng.choice(np.flatnonzero(~np.isin(row, self.tokenizer.special_ids)), 1)
        fate = rng.random(len(chosen))
        tokens, targets = row.copy(), np.full(len(row), IGNORED)
        targets[chosen] = row[chosen]
        tokens[chosen[fate < MASKED]] = self.tokenizer.mask
        replaced = chosen[fate >= MASKED + KEPT]
        tokens[replaced] = rng.choice(self.ordinary, len(replaced))
        return tokens, targets

    def batch(self, step: int, global_batch: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Make this rank's rows (global_batch/world_size seq) of one step's global batch, whose row r is sample step *
        global_batch + r. Pair label 1 means swapped. Raises UserError if the batch does not divide over the ranks."""
        rows = corpus.rank_rows(global_batch, rank, world_size)
        columns = zip(*(self.sample(step * global_batch + row) for row in rows), strict=True)
        tokens, targets, token_types, lengths, swapped = (torch.from_numpy(np.stack(each)) for each in columns)
        mask = torch.arange(self.seq_length) < lengths[:, None]
        return Batch(tokens, targets, torch.tensor(rows), token_types, mask, swapped.long())


def pack(documents: Documents, max_tokens: int, short_seq_prob: float, seed: int) -> np.ndarray:
    """Pack consecutive sentences into spans, (samples 3): first sentence, end, target length in tokens. A span takes
    sentences of a document until it has `max_tokens`; or, with probability `short_seq_prob`, a random number from 2 up,
    so that the model also sees short rows. A span has at least two sentences, so a document's last one is never left
    alone (Megatron-LM v2.5, build_mapping)."""
    lengths = np.diff(documents.sentences)
    rng = np.random.default_rng((PACKING, seed))
    # Every span takes at least two sentences, which bounds the number of spans.
    short = rng.random(len(lengths) // 2) < short_seq_prob
    targets = iter(np.where(short, rng.integers(2, max_tokens + 1, len(short)), max_tokens).tolist())
    spans = []
    for begin, end in pairwise(documents.documents.tolist()):
        if end - begin < 2 or lengths[begin:end].max() > LONG_SENTENCE:
            continue
        first, total, target = begin, 0, next(targets)
        for sentence, length in enumerate(lengths[begin:end].tolist(), begin):
            total += length
            left = end - sentence - 1
            if left == 0 or (total >= target and left > 1 and sentence > first):
                spans.append((first, sentence + 1, target))
                if left:
                    first, total, target = sentence + 1, 0, next(targets)
    return np.array(spans, np.int64).reshape(-1, 3)


def truncate(a: np.ndarray, b: np.ndarray, max_tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shorten two segments to `max_tokens` in total. The longer one (b if they are equal) loses tokens one by one, from
    its front or back at random (as in the code of arXiv:1810.04805)."""
    if len(a) + len(b) <= max_tokens:
        return a, b
    left_b = min(len(b), max(max_tokens // 2, max_tokens - len(a)))
    left_a = max_tokens - left_b
    front_a, front_b = rng.binomial([len(a) - left_a, len(b) - left_b], 0.5)
    return a[front_a : front_a + left_a], b[front_b : front_b + left_b]


def choose_words(words: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Choose positions (count,) of whole words to predict, at most `budget`: n-grams of up to LONGEST_NGRAM words,
    P(n) ~ 1/n. `words` (seq,) has the number of each position's word from 0, -1 outside words. An n-gram longer than
    the rest of the budget loses words from its end, and is skipped if its first word alone is too long."""
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


def read_texts(data: Sequence[str]) -> tuple[list[list[str]], str]:
    """Read documents of sentences, and their name, from the user's files, or by default from the standard library. The
    end of a file ends a document. Raises UserError for a file that is not text."""
    texts = [corpus.file_corpus([Path(name)]) for name in data] or [corpus.stdlib_corpus()]
    documents = [document for text in texts for document in corpus.text_documents(text.tokens.tobytes())]
    return documents, ", ".join(text.name for text in texts)


def make_tokenizer(
    kind: TokenizerKind, data: Sequence[str], vocab_size: int, split: str, vocab_file: Path | None, lower_case: bool
) -> Tokenizer:
    """Make the tokenizer that the options name. WordPiece without a vocabulary file is trained on the training split;
    `random` data has token ids already. Raises UserError if it cannot be made or has more tokens than `vocab_size`."""
    tokenizer: Tokenizer = ByteTokenizer()
    if list(data) == ["random"]:
        tokenizer = IdTokenizer(vocab_size)
    elif vocab_file:
        tokenizer = WordPieceTokenizer.from_file(vocab_file, lower_case)
    elif kind == "wordpiece":
        documents, _ = read_texts(data)
        training = documents[: corpus.split_points(split, len(documents))[1]]
        sentences = [sentence for document in training for sentence in document]
        tokenizer = WordPieceTokenizer.train(sentences, vocab_size, lower_case)
    if (size := tokenizer.vocab_size) > vocab_size:
        numbers = f"the tokenizer has {size} tokens and the model's vocabulary {vocab_size}"
        raise UserError(f"{numbers}: use a vocabulary of {size} or more")
    return tokenizer


def load_documents(data: Sequence[str], tokenizer: Tokenizer, split: str = DEFAULT_SPLIT) -> list[Documents]:
    """Load, encode and split the documents that `--data` names: files, `random`, or by default the standard library."""
    if list(data) == ["random"]:
        stream = corpus.random_corpus(min(tokenizer.special_ids))
        return corpus.random_documents(stream.tokens, 0, stream.name).split(split)
    texts, name = read_texts(data)
    return corpus.encode_documents(texts, tokenizer.encode, name).split(split)
