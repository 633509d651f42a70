"""Tokenizers: what is encoded comes back, words are the field's, and training gives the same pieces everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

import cs336_systems.data.tokenizer as module
from cs336_systems.data.tokenizer import (
    SPECIAL_TOKENS,
    ByteTokenizer,
    IdTokenizer,
    WordPieceTokenizer,
)
from cs336_systems.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PIECES = [*SPECIAL_TOKENS, "un", "##aff", "##able", "a", "##b", ".", "ete", "Ete", "##"]
AWKWARD = [
    "def f(self, x_1):  # it's 3.5 <= 4",
    "\tif x:\treturn 'a\\n'",
    "Éte ÉTÉ naïve Straße ﬁn",
    "東京 tower 中文。“quoted”—dash",
    "zero\u200bwidth nbsp\u00a0here soft\u00adhyphen",
    "form\x0cfeed bell\x07 nul-like \ufffd",
    "euro € sum ∑ 5° ½ emoji 🙂 combining e\u0301",
    "form\x0cfeed be\x07ll one\ttwo",
    "   ",
    "",
]


def test_bytes_are_utf_8_and_a_word_of_them_is_a_run_without_space():
    tokenizer = ByteTokenizer()
    for text in ("two  spaces\tand tab", "déjà 東京 🙂", "", "\x00\x7f"):
        assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.vocab_size, sorted(tokenizer.special_ids)) == (260, [256, 257, 258, 259])
    row = np.array([tokenizer.cls, *b" ab  c", tokenizer.sep, *b"d\te", tokenizer.mask, *b"f"])
    assert tokenizer.words(row).tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, 2, -1, 3, -1, 4]


def test_pieces_join_the_word_before_them_but_no_special_token():
    tokenizer = WordPieceTokenizer(PIECES, lower_case=False)
    names = ["[CLS]", "##able", "un", "##aff", "##able", "[UNK]", "##"]
    names += [".", "[SEP]", "a", "##b", "[MASK]", "##b", "[PAD]"]
    words = tokenizer.words(np.array([PIECES.index(name) for name in names]))
    # A first ##able stands where truncation cut its word; [UNK] and the piece "##" itself are words.
    assert words.tolist() == [-1, 0, 1, 1, 1, 2, 3, 4, -1, 5, 5, -1, 6, -1]


def test_ids_are_words():
    tokenizer = IdTokenizer(10)
    assert tokenizer.words(np.array([7, 3, 3, 8, 5, 6])).tolist() == [-1, 0, 1, -1, 2, -1]
    with pytest.raises(UserError, match="vocabulary of 4 has four special tokens and no other"):
        IdTokenizer(4)


@pytest.mark.parametrize("lower_case", [False, True])
def test_encoding_is_the_librarys(lower_case):
    tokenizer = WordPieceTokenizer.train([*AWKWARD, *TEXT.split("\n")], 600, lower_case)
    ids = {piece: number for number, piece in enumerate(tokenizer.pieces)}
    library = BertWordPieceTokenizer(ids, lowercase=lower_case)
    for sentence in [*AWKWARD, *TEXT.split("\n"), "x" * 100, "x" * 101]:
        assert tokenizer.encode(sentence) == library.encode(sentence, add_special_tokens=False).ids


def test_training_is_the_same_in_another_process():
    code = (
        "import sys; from cs336_systems.data.tokenizer import WordPieceTokenizer;"
        "print(WordPieceTokenizer.train(sys.stdin.read().split('\\n'), 700, False).pieces)"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=TEXT, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(WordPieceTokenizer.train(TEXT.split("\n"), 700, False).pieces)


def test_a_trained_vocabulary_knows_its_letters_and_frequent_words():
    tokenizer = WordPieceTokenizer.train(TEXT.split("\n"), 700, lower_case=True)
    assert tokenizer.pieces[:5] == list(SPECIAL_TOKENS)
    assert tokenizer.special_ids == (0, 2, 3, 4)
    assert tokenizer.vocab_size == len(set(tokenizer.pieces)) == 700
    assert tokenizer.unknown not in {number for line in TEXT.split("\n") for number in tokenizer.encode(line)}
    assert len(tokenizer.encode("the")) == 1
    assert not any(piece.lower() != piece for piece in tokenizer.pieces[5:])
    once = WordPieceTokenizer.train(["abc abc abc xyz"], 1000, lower_case=False)  # and no word that occurs once
    assert "abc" in once.pieces
    assert [once.pieces[number] for number in once.encode("xyz")] == ["x", "##y", "##z"]
    with pytest.raises(UserError, match="WordPiece needs a vocabulary of 64 at least, not 63; use bytes"):
        WordPieceTokenizer.train(["a"], 63, False)


def test_rare_letters_leave_room_for_words():
    letters = [chr(0x4E00 + i) for i in range(100)]
    # With 64 ids, 14 letters are kept: a and b, then the more frequent ones, the first of equals.
    tokenizer = WordPieceTokenizer.train(["ab " * 99, " ".join(letters[::-1]), " ".join(letters[50:60])], 64, False)
    assert {piece for piece in tokenizer.pieces if len(piece) == 1} == {"a", "b", *letters[50:60], *letters[:2]}
    assert "ab" in tokenizer.pieces
    assert tokenizer.encode(letters[2]) == [tokenizer.unknown]


def test_training_thins_the_text_evenly(monkeypatch):
    sentences = ["even" if i % 2 == 0 else "oddd" for i in range(1500)]
    for characters, learned in ((3000, {"even"}), (6000, {"even", "oddd"})):
        monkeypatch.setattr(module, "TRAINING_CHARACTERS", characters)
        pieces = WordPieceTokenizer.train(sentences, 64, False).pieces
        assert {"even", "oddd"} & {*pieces} == learned
        assert ("o" in pieces) == ("oddd" in learned)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_vocabulary_file_numbers_its_lines(tmp_path, end):
    path = tmp_path / "vocab.txt"
    # Published vocabularies have other special tokens between ours.
    text = "".join(piece + end for piece in ["[PAD]", "[unused1]", *PIECES[1:]])
    path.write_bytes(text.encode("utf-8" if end == "\n" else "utf-8-sig"))  # as Windows marks its files
    tokenizer = WordPieceTokenizer.from_file(path, lower_case=False)
    assert tokenizer.vocab_size == len(PIECES) + 1
    assert tokenizer.special_ids == (0, 3, 4, 5)
    assert tokenizer.encode("unable?") == [6, 8, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        (b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        (b"", r"has no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\] among its 1 pieces"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na", r"has no \[MASK\] among its 5 pieces"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "has 'a' twice; each of its 7 lines"),
    ],
)
def test_a_bad_vocabulary_file_is_refused(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        WordPieceTokenizer.from_file(path, lower_case=False)
