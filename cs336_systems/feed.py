"""What a run reads: the batches of its objective, for training and evaluation, each a function of its number."""

import hashlib
import json
from typing import Protocol

import numpy as np
import torch

from cs336_systems.bert_data import BertData, load_documents, make_tokenizer
from cs336_systems.comm import Group, agree
from cs336_systems.data import Batch, Corpus, check_length, lm_batch, load_corpus
from cs336_systems.errors import UserError
from cs336_systems.recipe import Recipe
from cs336_systems.tokenizer import Tokenizer, tokenizer_from_json

LEARNED_PIECES = 4096  # of a WordPiece vocabulary for a model that has none of its own


class Feed(Protocol):
    """Batches of a run. `rank` and `ranks` are this rank's place among those that read different rows."""

    name: str
    sha256: str
    tokens: int  # in the training text
    counted: int | None  # targets in a global batch, None where that varies
    vocab_size: int  # of the tokens

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """This rank's rows of a step's batch."""

    def validation(self, number: int, rank: int, ranks: int) -> Batch | None:
        """This rank's rows of a batch of the text that is kept for evaluation; None if there is none."""


class LanguageFeed:
    """Text as bytes, or random tokens: the target is the next token. The last tenth is kept for evaluation."""

    def __init__(self, recipe: Recipe, batch: int) -> None:
        config = recipe.model_config()
        self.seed, self.rows, self.seq = recipe.seed, batch, recipe.seq(config)
        corpus = load_corpus(recipe.data, config.vocab_size, self.seq)
        self.training, self.kept = corpus.split(0.1)
        check_length(self.training, self.seq)
        self.name, self.sha256, self.tokens = self.training.name, corpus.sha256, len(self.training.tokens)
        self.vocab_size = config.vocab_size
        self.counted: int | None = batch * self.seq

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """See Feed."""
        return self._batch(self.training, step, rank, ranks)

    def validation(self, number: int, rank: int, ranks: int) -> Batch | None:
        """See Feed."""
        if len(self.kept.tokens) <= self.seq:
            return None
        return self._batch(self.kept, number, rank, ranks)

    def _batch(self, corpus: Corpus, step: int, rank: int, ranks: int) -> Batch:
        tokens, targets = lm_batch(corpus, step, self.seed, self.rows, self.seq, rank, ranks)
        return Batch(tokens, targets, torch.arange(rank * len(tokens), (rank + 1) * len(tokens)))


class BertFeed:
    """Pairs of stretches of text with masked tokens. Documents are divided by `--split`."""

    def __init__(self, recipe: Recipe, batch: int, group: Group) -> None:
        tokenizer = shared_tokenizer(recipe, group)
        config = recipe.model_config(tokenizer.vocab_size)
        splits = load_documents(recipe.data, tokenizer, recipe.split)
        arguments = (
            tokenizer,
            recipe.seq(config),
            recipe.seed,
            recipe.mask_prob,
            recipe.short_seq_prob,
            config.vocab_size,
        )
        self.rows, self.vocab_size = batch, tokenizer.vocab_size
        self.counted: int | None = None
        self.training = BertData(splits.training, *arguments)
        self.kept = BertData(splits.validation, *arguments) if len(splits.validation) else None
        training = splits.training
        first, last = (int(training.sentences[training.documents[end]]) for end in (0, -1))
        self.name, self.tokens = training.name, last - first
        self.sha256 = hashlib.sha256(np.ascontiguousarray(training.tokens[first:last]).tobytes()).hexdigest()

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """See Feed."""
        return self.training.batch(step, self.rows, rank, ranks)

    def validation(self, number: int, rank: int, ranks: int) -> Batch | None:
        """See Feed."""
        return self.kept.batch(number, self.rows, rank, ranks) if self.kept is not None else None


def shared_tokenizer(recipe: Recipe, group: Group) -> Tokenizer:
    """The recipe's tokenizer, the same on every rank: rank 0 makes it, which may mean to learn it from the text.

    Raises UserError on every rank if that cannot be.
    """
    made = ""
    if group.rank() == 0:
        try:
            made = json.dumps({"made": _make_tokenizer(recipe).to_json()}, allow_nan=False)
        except UserError as error:
            made = json.dumps({"error": str(error)}, allow_nan=False)
    answer = json.loads(agree("tokenizer", made, group)[0])
    if "error" in answer:
        raise UserError(answer["error"])
    return tokenizer_from_json(answer["made"])


def _make_tokenizer(recipe: Recipe) -> Tokenizer:
    preset = recipe.preset.model
    learned = preset.vocab_size if not preset.causal else LEARNED_PIECES
    largest = recipe.vocab_size or (10**9 if recipe.vocab_file and not recipe.size else learned)
    return make_tokenizer(recipe.tokenizer, recipe.data, largest, recipe.split, recipe.vocab_file, recipe.lower_case)


def make_feed(recipe: Recipe, batch: int, group: Group) -> Feed:
    """The feed of the recipe's objective. Every rank must call this."""
    return BertFeed(recipe, batch, group) if recipe.is_bert else LanguageFeed(recipe, batch)
