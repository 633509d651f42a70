"""Text to token ids and back. A tokenizer also knows which tokens make a word, since BERT masks whole words, and is
written as JSON, so that one rank can train it and send it to the others."""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from cs336_systems.errors import UserError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALLEST_VOCABULARY = 64  # below it WordPiece has no room for the letters
LARGEST_ALPHABET = 1000  # characters; a word with a rarer one is [UNK], as in BERT's own vocabularies
TRAINING_CHARACTERS = 4_000_000  # of text: a second's work, and no piece worth having is rarer
LONGEST_WORD = 100  # characters; a longer word is [UNK], which bounds the search for its pieces
CACHED_WORDS = 1 << 16
CONTINUES = "##"
# What BERT's pre-tokenizer does on printable ASCII: punctuation stands alone, spaces part words.
ASCII_WORD = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9 ]")


class Tokenizer(ABC):
    """Token ids below `vocab_size`, four of them special: `pad`, `cls`, `sep` and `mask` are never in encoded text.

    `outside` (vocab_size,) is True at tokens that are in no word; `joins` (vocab_size,) at tokens that belong to the
    word of the token before them.
    """

    def __init__(
        self, vocab_size: int, pad: int, cls: int, sep: int, mask: int, outside: np.ndarray, joins: np.ndarray
    ) -> None:
        self.vocab_size = vocab_size
        self.pad, self.cls, self.sep, self.mask = pad, cls, sep, mask
        self.special_ids = (pad, cls, sep, mask)
        self._outside, self._joins = outside.copy(), joins
        self._outside[list(self.special_ids)] = True

    @abstractmethod
    def encode(self, sentence: str) -> list[int]:
        """The token ids of a sentence, none of them special."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids."""

    @abstractmethod
    def to_json(self) -> str:
        """The whole tokenizer as text, for `tokenizer_from_json`."""

    def words(self, tokens: np.ndarray) -> np.ndarray:
        """The number of each token's word, counted from 0, and -1 outside words, (seq) -> (seq).

        A special token ends a word.
        """
        inside = ~self._outside[tokens]
        before = np.concatenate(([False], inside[:-1]))
        starts = inside & ~(self._joins[tokens] & before)
        return np.where(inside, starts.cumsum() - 1, -1)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then PAD, CLS, SEP and MASK. A word is a run of bytes that are no white space."""

    def __init__(self) -> None:
        space = np.zeros(260, bool)
        space[list(b" \t\n\v\f\r")] = True
        super().__init__(260, 256, 257, 258, 259, outside=space, joins=~space)

    def encode(self, sentence: str) -> list[int]:
        """The sentence's bytes."""
        return list(sentence.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, special tokens left out, and U+FFFD for what is not UTF-8."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def to_json(self) -> str:
        """See Tokenizer."""
        return json.dumps({"kind": "bytes"}, allow_nan=False)


class IdTokenizer(Tokenizer):
    """For data that is token ids already: each is a word, and the last four of the vocabulary are special.

    Raises UserError for a vocabulary that has nothing but special tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 5:
            raise UserError(f"a vocabulary of {vocab_size} has four special tokens and no other: use 5 or more")
        none = np.zeros(vocab_size, bool)
        pad, cls, sep, mask = range(vocab_size - 4, vocab_size)
        super().__init__(vocab_size, pad, cls, sep, mask, outside=none, joins=none)

    def encode(self, sentence: str) -> list[int]:
        """The ids written in the sentence, with spaces between them."""
        return [int(number) for number in sentence.split()]

    def decode(self, tokens: Iterable[int]) -> str:
        """The ids with spaces between them."""
        return " ".join(str(token) for token in tokens)

    def to_json(self) -> str:
        """See Tokenizer."""
        return json.dumps({"kind": "ids", "vocab_size": self.vocab_size}, allow_nan=False)


class WordPieceTokenizer(Tokenizer):
    """WordPiece as in BERT (arXiv:1810.04805, section 3; arXiv:1609.08144, section 4.1): words are cut greedily into
    the longest pieces of the vocabulary, and `##` marks a piece that is not the first of its word.

    `pieces` are in the order of their ids. Lower-casing also strips accents. Raises UserError for a piece that is
    there twice and a special token that is missing.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool, name: str = "the vocabulary") -> None:
        ids = {piece: number for number, piece in enumerate(pieces)}
        if len(ids) < len(pieces):
            twice = next(piece for number, piece in enumerate(pieces) if ids[piece] != number)
            raise UserError(f"{name} has {twice!r} twice; each of its {len(pieces)} lines is a piece of its own")
        if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
            raise UserError(
                f"{name} has no {', '.join(missing)} among its {len(pieces)} pieces; a BERT vocabulary does"
            )
        pad, unknown, cls, sep, mask = (ids[token] for token in SPECIAL_TOKENS)
        joins = np.array([piece.startswith(CONTINUES) and piece != CONTINUES for piece in pieces])
        super().__init__(len(pieces), pad, cls, sep, mask, outside=np.zeros(len(pieces), bool), joins=joins)
        self.pieces, self.lower_case, self.unknown = list(pieces), lower_case, unknown
        self._model = WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
        # The library spends most of its time on offsets that nobody asks for here, and text repeats its words.
        self._encode_word = lru_cache(CACHED_WORDS)(lambda word: [token.id for token in self._model.tokenize(word)])

    @classmethod
    def train(cls, sentences: Sequence[str], vocab_size: int, lower_case: bool) -> "WordPieceTokenizer":
        """Learn at most `vocab_size` pieces from the sentences, evenly thinned to TRAINING_CHARACTERS.

        The same sentences give the same pieces in every process. The library's trainer numbers `##a` and its like in
        the order of a hash map that is seeded at random, and breaks ties between pairs by those numbers; so they are
        given to it in order, as if they were special. Raises UserError for a vocabulary that is too small.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"WordPiece needs a vocabulary of {SMALLEST_VOCABULARY} at least, not {vocab_size}; use bytes"
            )
        counts = _count_words(sentences, lower_case)
        letters: Counter[str] = Counter()
        for word, count in counts.items():
            for letter in word:
                letters[letter] += count
        # A letter takes two ids; half of the vocabulary is left to longer pieces.
        largest = min(LARGEST_ALPHABET, (vocab_size - len(SPECIAL_TOKENS)) // 4)
        alphabet = set(sorted(letters, key=lambda letter: (-letters[letter], letter))[:largest])
        known = {word: count for word, count in counts.items() if alphabet.issuperset(word)}
        continuing = {letter for word in known for letter in word[1:]}
        fixed = [*SPECIAL_TOKENS, *sorted(alphabet), *(CONTINUES + letter for letter in sorted(continuing))]
        library = LibraryTokenizer(WordPiece(unk_token="[UNK]"))
        library.pre_tokenizer = WhitespaceSplit()
        trainer = WordPieceTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=fixed, show_progress=False, initial_alphabet=[]
        )
        library.train_from_iterator((" ".join([word] * count) for word, count in known.items()), trainer)
        pieces = library.get_vocab()
        return cls(sorted(pieces, key=lambda piece: pieces[piece]), lower_case)

    @classmethod
    def from_file(cls, path: Path, lower_case: bool) -> "WordPieceTokenizer":
        """A published vocabulary, one piece a line in the order of their ids (BERT's `vocab.txt`).

        Raises UserError for a file that cannot be read and for what is no such vocabulary.
        """
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: byte {error.start} is no character") from None
        return cls([line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")], lower_case, str(path))

    def encode(self, sentence: str) -> list[int]:
        """The ids of the words' pieces; a word that cannot be pieced together is [UNK]."""
        ids: list[int] = []
        for word in split_words(sentence, self.lower_case):
            ids += self._encode_word(word)
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The words with one space between them: where the text had spaces is lost."""
        return " ".join(self.pieces[token] for token in tokens).replace(f" {CONTINUES}", "")

    def to_json(self) -> str:
        """See Tokenizer."""
        return json.dumps({"kind": "wordpiece", "lower_case": self.lower_case, "pieces": self.pieces}, allow_nan=False)


def split_words(sentence: str, lower_case: bool) -> list[str]:
    """Words and marks of punctuation, as BERT's tokenizer parts them."""
    sentence = sentence.replace("\t", " ")
    if sentence.isascii() and sentence.isprintable():
        return ASCII_WORD.findall(sentence.lower() if lower_case else sentence)
    # The rest of Unicode is the library's business, at a fifth of the speed.
    clean = BertNormalizer(lowercase=lower_case).normalize_str(sentence)
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(clean)]


def _count_words(sentences: Sequence[str], lower_case: bool) -> Counter[str]:
    every = -(-sum(map(len, sentences)) // TRAINING_CHARACTERS)
    counts: Counter[str] = Counter()
    for sentence in sentences[:: max(1, every)]:
        counts.update(word for word in split_words(sentence, lower_case) if len(word) <= LONGEST_WORD)
    return counts


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote."""
    saved = json.loads(text)
    if saved["kind"] == "wordpiece":
        return WordPieceTokenizer(saved["pieces"], saved["lower_case"])
    return IdTokenizer(saved["vocab_size"]) if saved["kind"] == "ids" else ByteTokenizer()
