"""Tokenizers: bytes, WordPiece, and data that consists of token ids.

A tokenizer also groups tokens into words, since BERT masks whole words.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from cs336_systems.data.corpus import read_text
from cs336_systems.errors import UserError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALLEST_VOCABULARY = 64  # a smaller one has no room for the letters
LARGEST_ALPHABET = 1000  # characters; a word with a rarer one is [UNK], as in BERT's own vocabularies
TRAINING_CHARACTERS = 4_000_000  # characters of text, which take a second; useful pieces all occur in them
LONGEST_WORD = 100  # characters; a longer word is [UNK], which limits the time to split a word
CACHED_WORDS = 1 << 16
CONTINUES = "##"
# BERT's pre-tokenizer on printable ASCII: each punctuation mark alone, spaces between words.
ASCII_WORD = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9 ]")


class Tokenizer:
    """Token ids below `vocab_size`. Four are special, and never in encoded text: `pad`, `cls`, `sep` and `mask`.
    `outside` (vocab_size,) is True for tokens outside words; `joins` (vocab_size,) for those that continue a word."""

    pieces: list[str] | None = None  # of WordPiece, by which other ranks make the same

    def __init__(self, special_ids: tuple[int, int, int, int], outside: np.ndarray, joins: np.ndarray) -> None:
        self.vocab_size, self.special_ids = len(outside), special_ids
        self.pad, self.cls, self.sep, self.mask = special_ids
        self._outside, self._joins = outside.copy(), joins
        self._outside[list(special_ids)] = True

    def encode(self, sentence: str) -> list[int]:
        """Convert a sentence to token ids, none of them special."""
        raise NotImplementedError  # data that consists of token ids has no sentences

    def words(self, tokens: np.ndarray) -> np.ndarray:
        """Index of each token's word, -1 outside words, (seq) -> (seq). A special token ends a word."""
        inside = ~self._outside[tokens]
        before = np.concatenate(([False], inside[:-1]))
        starts = inside & ~(self._joins[tokens] & before)
        return np.where(inside, starts.cumsum() - 1, -1)


class ByteTokenizer(Tokenizer):
    """Tokens are the 256 bytes, then PAD, CLS, SEP and MASK. A word is a run of bytes other than white space."""

    def __init__(self) -> None:
        space = np.zeros(260, bool)
        space[list(b" \t\n\v\f\r")] = True
        super().__init__((256, 257, 258, 259), outside=space, joins=~space)

    def encode(self, sentence: str) -> list[int]:
        return list(sentence.encode())


class IdTokenizer(Tokenizer):
    """Tokenizer for data that consists of token ids: each is a word, and the last four of the vocabulary are special.
    Raises UserError for a vocabulary of special tokens only."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 5:
            raise UserError(f"a vocabulary of {vocab_size} has four special tokens and no other: use 5 or more")
        none, first = np.zeros(vocab_size, bool), vocab_size - 4
        super().__init__((first, first + 1, first + 2, first + 3), outside=none, joins=none)


class WordPieceTokenizer(Tokenizer):
    """WordPiece as in BERT (arXiv:1810.04805, section 3; arXiv:1609.08144, section 4.1): words are split greedily into
    the longest pieces of the vocabulary, and `##` marks a piece that is not the first of its word. `pieces` are in the
    order of their ids. A word that cannot be split is [UNK]. Lower-casing also strips accents. Raises UserError for a
    repeated piece or a missing special token."""

    def __init__(self, pieces: Sequence[str], lower_case: bool, name: str = "the vocabulary") -> None:
        ids = {piece: number for number, piece in enumerate(pieces)}
        if len(ids) < len(pieces):
            twice = next(piece for number, piece in enumerate(pieces) if ids[piece] != number)
            raise UserError(f"{name} has {twice!r} twice; each of its {len(pieces)} lines is a piece of its own")
        if absent := [token for token in SPECIAL_TOKENS if token not in ids]:
            raise UserError(f"{name} has no {', '.join(absent)} among its {len(pieces)} pieces; a BERT vocabulary does")
        pad, self.unknown, cls, sep, mask = (ids[token] for token in SPECIAL_TOKENS)
        joins = np.array([piece.startswith(CONTINUES) and piece != CONTINUES for piece in pieces])
        super().__init__((pad, cls, sep, mask), outside=np.zeros(len(pieces), bool), joins=joins)
        self.pieces, self.lower_case = list(pieces), lower_case
        model = WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
        # Cached by word: the library spends most of its time on offsets, which are not needed here, and words repeat.
        self._encode_word = lru_cache(CACHED_WORDS)(lambda word: [token.id for token in model.tokenize(word)])

    @classmethod
    def train(cls, sentences: Sequence[str], vocab_size: int, lower_case: bool) -> "WordPieceTokenizer":
        """Learn at most `vocab_size` pieces from every k-th sentence, TRAINING_CHARACTERS in total. The same sentences
        give the same pieces in every process. By itself the library's trainer would number continuing letters such as
        `##a` in the order of a randomly seeded hash map, and break ties by these numbers, so it gets them in order, as
        special tokens. Raises UserError for a vocabulary that is too small."""
        if vocab_size < SMALLEST_VOCABULARY:
            least = f"WordPiece needs a vocabulary of {SMALLEST_VOCABULARY} at least"
            raise UserError(f"{least}, not {vocab_size}; use bytes")
        every = max(1, -(-sum(map(len, sentences)) // TRAINING_CHARACTERS))
        words = chain.from_iterable(split_words(sentence, lower_case) for sentence in sentences[::every])
        counts = Counter(word for word in words if len(word) <= LONGEST_WORD)
        letters = Counter(chain.from_iterable(counts.elements()))
        # A letter takes two ids; half of the vocabulary is left to longer pieces.
        largest = min(LARGEST_ALPHABET, (vocab_size - len(SPECIAL_TOKENS)) // 4)
        alphabet = set(sorted(letters, key=lambda letter: (-letters[letter], letter))[:largest])
        known = {word: count for word, count in counts.items() if alphabet.issuperset(word)}
        continuing = sorted({CONTINUES + letter for word in known for letter in word[1:]})
        trainer = WordPieceTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=[*SPECIAL_TOKENS, *sorted(alphabet), *continuing],
            show_progress=False, initial_alphabet=[],
        )  # fmt: skip
        library = LibraryTokenizer(WordPiece(unk_token="[UNK]"))
        library.pre_tokenizer = WhitespaceSplit()
        library.train_from_iterator((" ".join([word] * count) for word, count in known.items()), trainer)
        pieces = library.get_vocab()
        return cls(sorted(pieces, key=lambda piece: pieces[piece]), lower_case)

    @classmethod
    def from_file(cls, path: Path, lower_case: bool) -> "WordPieceTokenizer":
        """Read a published vocabulary, one piece per line in the order of ids (BERT's `vocab.txt`). Raises UserError
        for a file that cannot be read or is not such a vocabulary."""
        lines = read_text(path).decode("utf-8-sig").removesuffix("\n").split("\n")
        return cls([line.removesuffix("\r") for line in lines], lower_case, str(path))

    def encode(self, sentence: str) -> list[int]:
        return [piece for word in split_words(sentence, self.lower_case) for piece in self._encode_word(word)]


def split_words(sentence: str, lower_case: bool) -> list[str]:
    """Split into words and punctuation marks, as BERT's tokenizer does."""
    sentence = sentence.replace("\t", " ")
    if sentence.isascii() and sentence.isprintable():
        return ASCII_WORD.findall(sentence.lower() if lower_case else sentence)
    # The library splits the rest of Unicode, at a fifth of the speed.
    clean = BertNormalizer(lowercase=lower_case).normalize_str(sentence)
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(clean)]
