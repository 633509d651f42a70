"""Batches of a run's objective, for training and evaluation."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cs336_systems.checkpoint.disk import on_rank_0
from cs336_systems.comm import Group
from cs336_systems.data import corpus
from cs336_systems.data.bert import BertData, load_documents, make_tokenizer
from cs336_systems.data.corpus import Batch, Corpus, Documents
from cs336_systems.data.tokenizer import ByteTokenizer, IdTokenizer, WordPieceTokenizer
from cs336_systems.train.recipe import Recipe

LEARNED_PIECES = 4096  # size of a WordPiece vocabulary for a model without one of its own
Rows = Callable[[int, int, int], Batch]  # (number of the batch, rank, ranks) -> that rank's rows of it


class Batches(NamedTuple):
    """Batches of a text. Each depends on the seed and its number only."""

    name: str
    sha256: str
    tokens: int  # number of tokens in the training text
    vocab_size: int
    targets: int | None  # number of targets in a global batch; None if it varies
    batch: Rows
    validation: Rows | None  # batches of the text that is kept for evaluation, if there is any
    boundaries: str = ""  # SHA-256 of the positions of sentences and documents, for BERT


def make_batches(recipe: Recipe, rows: int, group: Group) -> Batches:
    """Make the batches of the recipe's objective. For a decoder: text as bytes, or random tokens; targets are the next
    tokens, and the last tenth is kept for evaluation. Every rank must call this. Raises UserError."""
    if recipe.model.is_bert:
        return bert_batches(recipe, rows, group)
    config = recipe.model_config()
    seq = recipe.seq(config)
    whole = corpus.load_corpus(recipe.data.data, config.vocab_size, seq)
    training, held_out = whole.split(0.1)
    corpus.check_length(training, seq)

    def reader(text: Corpus) -> Rows:
        starts, seed = corpus.document_starts(text) if recipe.data.pack else None, recipe.run.seed
        return lambda number, rank, ranks: corpus.lm_batch(text, number, seed, rows, seq, rank, ranks, starts)

    validation = reader(held_out) if len(held_out.tokens) > seq else None
    text = training.name, digest(whole.tokens), len(training.tokens), config.vocab_size
    targets = None if recipe.data.pack else rows * seq  # in packed rows a document's last token has no target
    return Batches(*text, targets, reader(training), validation)


def bert_batches(recipe: Recipe, rows: int, group: Group) -> Batches:
    """Make BERT's batches: pairs of segments of text with masked tokens. `--split` divides the documents; rank 0 makes
    the tokenizer, perhaps from the text. Raises UserError on every rank."""
    data = recipe.data
    of_file = data.vocab_file and not (data.is_random or recipe.model.size or recipe.model.vocab_size)
    largest = 10**9 if of_file else most_pieces(recipe)

    def make() -> Any:
        made = make_tokenizer(data.tokenizer, data.data, largest, data.split, data.vocab_file, data.lower_case)
        return made.vocab_size, made.pieces

    size, pieces = on_rank_0("tokenizer", make, Path(), group, failed=None)
    other = IdTokenizer(size) if data.is_random else ByteTokenizer()
    tokenizer = WordPieceTokenizer(pieces, data.lower_case) if pieces else other
    seq, seed = recipe.seq(recipe.model_config(tokenizer.vocab_size)), recipe.run.seed
    text, held_out, _ = load_documents(data.data, tokenizer, data.split)

    def batches(documents: Documents) -> Rows:
        samples = BertData(documents, tokenizer, seq, seed, data.mask_prob, data.short_seq_prob)
        return lambda number, rank, ranks: samples.batch(number, rows, rank, ranks)

    validation = batches(held_out) if len(held_out) else None
    begin, end = text.documents[[0, -1]].tolist()
    first, last = text.sentences[[begin, end]].tolist()
    facts = text.name, digest(text.tokens[first:last]), last - first, tokenizer.vocab_size, None
    return Batches(*facts, batches(text), validation, digest(text.sentences[begin : end + 1], text.documents))


def digest(*arrays: np.ndarray) -> str:
    """SHA-256 of the arrays' bytes."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def most_pieces(recipe: Recipe) -> int:
    """Size of a BERT's vocabulary in the model, or most pieces that WordPiece may learn for one without."""
    model = recipe.model
    return model.vocab_size or (LEARNED_PIECES if model.preset.model.causal else model.preset.model.vocab_size)


def most_tokens(recipe: Recipe) -> int:
    """Upper bound of the vocabulary of BERT's tokenizer, before any text is read; exact unless WordPiece learns it."""
    data = recipe.data
    if not data.is_random and data.vocab_file is not None and data.vocab_file.is_file():
        return len(data.vocab_file.read_bytes().splitlines())
    return most_pieces(recipe) if data.is_random or data.tokenizer == "wordpiece" else ByteTokenizer().vocab_size
