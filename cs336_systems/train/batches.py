"""Batches of a run's objective, for training and evaluation, each a function of the seed and its number.

Both kinds have a `name`, the text's `sha256`, the number of `tokens` in the training text, the `targets` of a global
batch (None where that varies) and the `vocab_size`. `rank` and `ranks` are a rank's position among those that read
different rows.
"""

import hashlib
import json

import numpy as np
import torch

from cs336_systems.comm import Group, agree
from cs336_systems.data.bert import BertData, load_documents, make_tokenizer
from cs336_systems.data.corpus import Batch, Corpus, check_length, lm_batch, load_corpus
from cs336_systems.data.tokenizer import Tokenizer, tokenizer_from_json
from cs336_systems.errors import UserError
from cs336_systems.train.recipe import Recipe

LEARNED_PIECES = 4096  # of a WordPiece vocabulary for a model that has none of its own


class LanguageBatches:
    """Text as bytes, or random tokens: the target is the next token. The last tenth is kept for evaluation."""

    def __init__(self, recipe: Recipe, batch: int) -> None:
        config = recipe.model_config()
        self.seed, self.rows, self.seq = recipe.run.seed, batch, recipe.seq(config)
        corpus = load_corpus(recipe.data.files, config.vocab_size, self.seq)
        self.training, self.held_out = corpus.split(0.1)
        check_length(self.training, self.seq)
        self.name, self.sha256, self.tokens = self.training.name, corpus.sha256, len(self.training.tokens)
        self.vocab_size, self.targets = config.vocab_size, batch * self.seq

    def batch(self, step: int, rank: int, ranks: int, corpus: Corpus | None = None) -> Batch:
        """This rank's rows of a step's batch, of the training text."""
        tokens, targets = lm_batch(corpus or self.training, step, self.seed, self.rows, self.seq, rank, ranks)
        return Batch(tokens, targets, torch.arange(rank * len(tokens), (rank + 1) * len(tokens)))

    def validation(self, number: int, rank: int, ranks: int) -> Batch | None:
        """This rank's rows of a batch of the text that is kept for evaluation; None if there is none."""
        return self.batch(number, rank, ranks, self.held_out) if len(self.held_out.tokens) > self.seq else None


class BertBatches:
    """Pairs of stretches of text with masked tokens. Documents are divided by `--split`."""

    def __init__(self, recipe: Recipe, batch: int, group: Group) -> None:
        tokenizer = shared_tokenizer(recipe, group)
        config = recipe.model_config(tokenizer.vocab_size)
        data, seq = recipe.data, recipe.seq(config)
        splits = load_documents(data.files, tokenizer, data.split)
        training = splits.training
        arguments = tokenizer, seq, recipe.run.seed, data.mask_prob, data.short_seq_prob, config.vocab_size
        self.rows, self.vocab_size, self.targets = batch, tokenizer.vocab_size, None
        self.training = BertData(training, *arguments)
        self.held_out = BertData(splits.validation, *arguments) if len(splits.validation) else None
        first, last = (int(training.sentences[training.documents[end]]) for end in (0, -1))
        self.name, self.tokens = training.name, last - first
        self.sha256 = hashlib.sha256(np.ascontiguousarray(training.tokens[first:last]).tobytes()).hexdigest()

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """This rank's rows of a step's batch."""
        return self.training.batch(step, self.rows, rank, ranks)

    def validation(self, number: int, rank: int, ranks: int) -> Batch | None:
        """See `LanguageBatches`."""
        return self.held_out.batch(number, self.rows, rank, ranks) if self.held_out is not None else None


def shared_tokenizer(recipe: Recipe, group: Group) -> Tokenizer:
    """The recipe's tokenizer, the same on every rank: rank 0 makes it, which may mean to learn it from the text.

    Raises UserError on every rank if that cannot be.
    """
    preset, data, made = recipe.model.preset.model, recipe.data, {}
    learned = preset.vocab_size if not preset.causal else LEARNED_PIECES
    largest = recipe.model.vocab_size or (10**9 if data.vocab_file and not recipe.model.size else learned)
    if group.rank() == 0:
        arguments = data.tokenizer, data.files, largest, data.split, data.vocab_file, data.lower_case
        try:
            made = {"made": make_tokenizer(*arguments).to_json()}
        except UserError as error:
            made = {"error": str(error)}
    answer = json.loads(agree("tokenizer", json.dumps(made, allow_nan=False), group)[0])
    if "error" in answer:
        raise UserError(answer["error"])
    return tokenizer_from_json(answer["made"])


def most_tokens(recipe: Recipe) -> int | None:
    """An upper bound of the tokenizer's vocabulary, before any text is read; None for bytes."""
    file = recipe.data.vocab_file
    if file is not None and file.is_file():
        return len(file.read_bytes().splitlines())
    return LEARNED_PIECES if recipe.data.tokenizer == "wordpiece" else None


def make_batches(recipe: Recipe, batch: int, group: Group) -> LanguageBatches | BertBatches:
    """The batches of the recipe's objective. Every rank must call this."""
    return BertBatches(recipe, batch, group) if recipe.model.is_bert else LanguageBatches(recipe, batch)
