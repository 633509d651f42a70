"""Corpora and batches: the global batch depends on (seed, step) alone, and bad text is refused in one line."""

import gzip

import numpy as np
import pytest
import torch

from cs336_systems.data.corpus import (
    IGNORED,
    Corpus,
    document_starts,
    file_corpus,
    lm_batch,
    load_corpus,
    random_corpus,
    stdlib_corpus,
)
from cs336_systems.errors import UserError

COUNTING = Corpus(np.arange(1000, dtype=np.int32), "counting")


def test_a_batch_is_a_function_of_seed_and_step_which_ranks_share():
    tokens, targets, rows, *_ = lm_batch(COUNTING, step=5, seed=1, batch=6, context=9)
    assert torch.equal(targets, tokens + 1)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (6, 9)
    for world_size in (1, 2, 3, 6):
        parts = [lm_batch(COUNTING, 5, 1, 6, 9, rank, world_size) for rank in range(world_size)]
        for i, whole in enumerate((tokens, targets, rows)):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole)
    for step, seed in ((4, 1), (5, 0)):
        assert not torch.equal(lm_batch(COUNTING, step, seed, 6, 9)[0], tokens)
    with pytest.raises(UserError, match="global batch of 6 does not divide over 4 ranks"):
        lm_batch(COUNTING, 0, 0, 6, 5, rank=0, world_size=4)
    short = Corpus(np.arange(6, dtype=np.uint8), "six")
    starts = {int(tokens[0]) for step in range(20) for tokens in lm_batch(short, step, 0, 8, 4)[0]}
    assert starts == {0, 1}, "every window can be drawn, and none beyond"


def test_documents_begin_after_blank_lines():
    text = "one\ntwo\n\nthree\n\n\n\nfour\r\n\r\nfive\n six"
    corpus = Corpus(np.frombuffer(text.encode(), np.uint8), "text")
    starts = document_starts(corpus).nonzero()[0].tolist()
    assert [text[start:][:4] for start in starts] == ["one\n", "thre", "four", "five"]
    indented = b"a\n  \n\t\n    b\n c\n\n"
    assert document_starts(Corpus(np.frombuffer(indented, np.uint8), "text")).nonzero()[0].tolist() == [0, 7]
    assert document_starts(Corpus(np.frombuffer(b"\n\na", np.uint8), "text")).tolist() == [True, False, False]
    random = document_starts(random_corpus(100, length=100_000))
    assert 300 < random.sum() < 500


def test_packed_rows_are_the_same_tokens_without_targets_across_documents():
    text = b"".join(b"%d\n\n" % number for number in range(100, 400))
    corpus = Corpus(np.frombuffer(text, np.uint8), "text")
    which = (3, 0, 8, 21)
    starts = document_starts(corpus)
    tokens, targets, *_, positions = lm_batch(corpus, *which, starts=starts)
    plain_tokens, plain_targets, *_ = lm_batch(corpus, *which)
    assert torch.equal(tokens, plain_tokens)
    for row, found in enumerate(positions.tolist()):
        said, first = [chr(token) for token in tokens[row].tolist()], 0
        for place, position in enumerate(found):
            if place and said[place - 1] == "\n" != said[place]:
                first = place
            assert position == place - first
            following = int(plain_targets[row, place])
            crosses = said[place] == "\n" != chr(following)
            assert targets[row, place] == (IGNORED if crosses else following)
    halves = [lm_batch(corpus, *which, rank, 2, starts) for rank in range(2)]
    for whole, *parts in zip((tokens, targets, positions), *(half[:2] + half[-1:] for half in halves), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_the_standard_library_and_random_tokens_are_corpora():
    corpus = stdlib_corpus(cap=200_000)
    assert len(corpus.tokens) == 200_000
    assert b"import " in corpus.tokens.tobytes()
    assert np.array_equal(stdlib_corpus(cap=200_000).tokens, corpus.tokens)
    assert load_corpus(["random"], vocab_size=100, context=8).tokens.max() == 99
    with pytest.raises(UserError, match="vocabulary of 256, not 100"):
        load_corpus([], vocab_size=100, context=8)


def test_splitting_keeps_every_token_once():
    training, validation = COUNTING.split(0.1)
    assert len(validation.tokens) == 100
    assert np.array_equal(np.concatenate((training.tokens, validation.tokens)), COUNTING.tokens)


def test_files_are_joined_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("first ")
    (tmp_path / "a.txt").write_text("sécond")
    corpus = file_corpus([tmp_path / "b.txt", tmp_path / "a.txt"])
    assert corpus.tokens.tobytes().decode() == "first sécond"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        (b"", "is empty"),
        (b"abc", "has 3 tokens; a context of 8 needs 9: use a longer text or --context 2"),
        (b"a", "has 1 tokens; a context of 8 needs 9: use a longer text$"),
        (b"\x89PNG" * 9, "is not UTF-8 text: byte 0 is 0x89"),
        (b"text\0text and more", "is not text: byte 4 is zero"),
        (gzip.compress(bytes(100), mtime=0), "is not UTF-8 text: byte 1 is 0x8b"),
    ],
)
def test_bad_text_is_refused(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_corpus([str(path)], vocab_size=256, context=8)
