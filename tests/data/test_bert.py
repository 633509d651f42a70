"""BERT's samples against what the papers say of them: packing, order, truncation, masking, and the same rows for every
layout of the ranks."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from cs336_systems.data.bert import (
    LONG_SENTENCE,
    BertData,
    choose_words,
    load_documents,
    make_tokenizer,
    pack,
    truncate,
)
from cs336_systems.data.corpus import (
    IGNORED,
    Documents,
    encode_documents,
    random_documents,
    split_points,
    text_documents,
)
from cs336_systems.data.tokenizer import ByteTokenizer, IdTokenizer, WordPieceTokenizer
from cs336_systems.errors import UserError


def documents_of(*lengths):
    """Documents of sentences of these lengths; the tokens count up through all of them, so that a token is a place."""
    sentences = np.cumsum([0, *(length for document in lengths for length in document)])
    starts = np.cumsum([0, *map(len, lengths)])
    return Documents(np.arange(sentences[-1]), sentences, starts, "counting")


def counting_data(documents, seq_length=32, **options):
    return BertData(documents, IdTokenizer(len(documents.tokens) + 4), seq_length, **options)


def varied_lengths(count):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 12, rng.integers(1, 20)).tolist() for _ in range(count)]


VARIED_LENGTHS = varied_lengths(60)
VARIED = documents_of(*VARIED_LENGTHS)


def original(sample):
    """The row before masking."""
    return np.where(sample.targets == IGNORED, sample.tokens, sample.targets)


def segments(data, sample):
    """A and B before masking, and what stands around them checked."""
    row, tokenizer = original(sample), data.tokenizer
    first, second = np.flatnonzero(row == tokenizer.sep)
    assert row[0] == tokenizer.cls
    assert second == sample.length - 1
    assert (row[sample.length :] == tokenizer.pad).all()
    return row[1:first], row[first + 1 : second]


def six_deviations(trials, probability):
    """Six standard deviations of a binomial count, within which every right sampler is seen to stay."""
    return 6 * math.sqrt(trials * probability * (1 - probability))


def near(count, trials, probability):
    return abs(count - trials * probability) <= six_deviations(trials, probability)


def test_blank_lines_part_documents_of_lines():
    raw = b"\n one \r\ntwo\n \t \n\n\nthree\x0cx\n\n"
    assert text_documents(raw) == [[" one ", "two"], ["three\x0cx"]]
    assert text_documents(b"\n\n") == []


def test_encoded_documents_hold_every_sentence_that_has_tokens():
    texts = [["ab", "\x00", "c"], ["\x00"], ["d", "ef"]]
    got = encode_documents(texts, lambda text: list(text.replace("\0", "").encode()), "letters")
    assert got.tokens.tolist() == [*b"abcdef"]
    assert got.sentences.tolist() == [0, 2, 3, 4, 6]
    assert got.documents.tolist() == [0, 2, 2, 4]
    assert len(got) == 3


def test_a_split_has_rounded_shares_or_is_refused():
    assert split_points("949,50,1", 1000) == [0, 949, 999, 1000]
    assert split_points("949,50,1", 100) == [0, 95, 100, 100]
    assert split_points("0.5, 0.5", 7) == [0, 4, 7, 7]
    assert split_points("0,0,3", 7) == [0, 0, 0, 7]
    for weights in ("a,b", "", "1,2,3,4", "1,-1", "0,0,0", "inf,1", "nan"):
        with pytest.raises(UserError, match="split "):
            split_points(weights, 10)


def test_splits_are_whole_documents_in_order():
    parts = VARIED.split("7,2,1")
    assert [len(part) for part in parts] == [42, 12, 6]
    bounds = VARIED.sentences[[part.documents[0] for part in parts]]
    for part, low, high in zip(parts, bounds, [*bounds[1:], len(VARIED.tokens)], strict=True):
        data = counting_data(part)
        seen = {int(token) for i in range(len(data.spans)) for token in original(data.sample(i))}
        words = {token for token in seen if token < len(VARIED.tokens)}
        assert low <= min(words) <= max(words) < high


def test_every_sentence_of_a_document_is_packed_once():
    documents = documents_of(*VARIED_LENGTHS, [1, LONG_SENTENCE + 1], [1, LONG_SENTENCE])
    lengths, used = np.diff(documents.sentences), []
    for first, end, target in pack(documents, 20, 0.5, 3).tolist():
        assert end - first >= 2
        assert 2 <= target <= 20
        if end not in documents.documents:
            assert lengths[first:end].sum() >= target
            assert end - first == 2 or lengths[first : end - 1].sum() < target
        used += range(first, end)
    whole = [range(a, b) for a, b in pairwise(documents.documents.tolist()) if b - a > 1]
    assert used == [
        sentence for document in whole for sentence in document if lengths[[*document]].max() <= LONG_SENTENCE
    ]


def test_some_spans_are_short_on_purpose():
    documents = documents_of(*[[1, 1]] * 20_000)
    targets = pack(documents, 50, 0.1, 0)[:, 2]
    # A drawn length is 50 itself in one of 49 cases.
    assert near((targets < 50).sum(), 20_000, 0.1 * 48 / 49)
    assert not np.array_equal(pack(documents, 50, 0.1, 1)[:, 2], targets)
    counts = np.bincount(pack(documents, 50, 1.0, 0)[:, 2], minlength=51)
    assert not counts[:2].any()
    assert all(near(count, 20_000, 1 / 49) for count in counts[2:])
    assert (pack(documents, 50, 0.0, 0)[:, 2] == 50).all()


def test_a_sample_is_two_segments_of_a_stretch_and_says_their_order():
    data = counting_data(VARIED, seq_length=24)
    spans = {VARIED.sentences[first]: (first, end, target) for first, end, target in data.spans.tolist()}
    whole = 0
    for index in range(len(data.spans)):
        sample = data.sample(index)
        a, b = segments(data, sample)
        assert sample.token_types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (24 - sample.length)
        early, late = (b, a) if sample.swapped else (a, b)
        assert early[-1] < late[0]
        for part in (a, b):
            assert len(part)
            assert (np.diff(part) == 1).all()
        start = max(each for each in spans if each <= early[0])
        first, end, target = spans[start]
        length = VARIED.sentences[end] - VARIED.sentences[first]
        assert len(a) + len(b) == min(length, target)
        if length <= target:
            whole += 1
            assert early[-1] + 1 == late[0]
            assert late[0] in VARIED.sentences
    assert 0 < whole < len(data.spans)


def test_half_of_the_samples_are_swapped_and_every_cut_is_as_likely():
    data = counting_data(documents_of([3, 3, 3, 3, 3]))
    samples = [data.sample(i) for i in range(1500)]
    assert near(sum(sample.swapped for sample in samples), 1500, 0.5)
    cuts = np.bincount([max(part[0] for part in segments(data, sample)) for sample in samples], minlength=15)
    assert set(np.flatnonzero(cuts)) == {3, 6, 9, 12}
    assert all(near(count, 1500, 0.25) for count in cuts[[3, 6, 9, 12]])


def test_truncation_takes_from_the_longer_segment_at_both_ends():
    rng = np.random.default_rng(0)
    for a, b, most in product(range(1, 9), range(1, 9), range(2, 17)):
        left = [a, b]
        while sum(left) > most:
            left[0 if left[0] > left[1] else 1] -= 1
        assert [len(part) for part in truncate(np.arange(a), np.arange(b), most, rng)] == left
    cut = [truncate(np.arange(9), np.arange(7), 9, rng) for _ in range(2000)]
    # Four and three are lost, each from the front or the back by the toss of a coin.
    for lost, parts in zip((4, 3), zip(*cut, strict=True), strict=True):
        fronts = [part[0] for part in parts]
        assert set(fronts) == set(range(lost + 1))
        assert near(sum(fronts), 2000 * lost, 0.5)
        assert all((np.diff(part) == 1).all() for part in parts)


def test_as_many_tokens_as_wanted_are_hidden_and_in_the_wanted_ways():
    documents = documents_of(*[[50] * 10] * 20)
    data = counting_data(documents, seq_length=128)
    rows = [data.sample(index) for index in range(500)]
    tokens, targets = (np.stack([getattr(row, name) for row in rows]) for name in ("tokens", "targets"))
    hidden, masked, kept = targets != IGNORED, tokens == data.tokenizer.mask, tokens == targets
    # Every token is a word here, so the share is met exactly.
    assert hidden.sum(1).tolist() == [max(1, round(0.15 * row.length)) for row in rows]
    assert not np.isin(targets, data.tokenizer.special_ids).any()
    new, count = tokens[hidden & ~masked & ~kept], hidden.sum()
    # A random token is the old one in 1 of 10,000 cases.
    same = 0.1 / len(documents.tokens)
    assert near((hidden & masked).sum(), count, 0.8)
    assert near((hidden & kept).sum(), count, 0.1 + same)
    assert near(len(new), count, 0.1 - same)
    assert max(new) < len(documents.tokens)
    assert all(near(each, len(new), 0.1) for each in np.histogram(new, 10, (0, len(documents.tokens)))[0])


def test_ngrams_of_words_have_lengths_in_inverse_proportion():
    rng, words, runs = np.random.default_rng(0), np.arange(3000), np.zeros(4, int)
    for _ in range(1000):
        chosen = choose_words(words, 3, rng)
        assert len(chosen) == 3
        runs[1 + (np.diff(chosen) > 1).sum()] += 1
    # P(1), P(2), P(3) = 6/11, 3/11, 2/11. A budget of 3 is one run if the first n-gram is 3; two if it is 2 (and one
    # word follows) or 1 (and what follows is 2 at least, shortened to 2); else three. Strangers meet in 6 of
    # 3000 cases at most.
    for count, probability in zip(runs[1:], (2 / 11, 3 / 11 + 6 / 11 * 5 / 11, 36 / 121), strict=True):
        assert abs(count - 1000 * probability) <= six_deviations(1000, probability) + 1000 * 6 / 3000


def test_words_are_hidden_whole():
    texts = [["the quick brown fox", "jumps over the lazy dog", "and runs", "away from it"]] * 3
    tokenizer = ByteTokenizer()
    data = BertData(encode_documents(texts, tokenizer.encode, "foxes"), tokenizer, 64, mask_prob=0.3)
    for sample in map(data.sample, range(100)):
        words, hidden = tokenizer.words(original(sample)), sample.targets != IGNORED
        assert not hidden[words < 0].any()
        assert 1 <= hidden.sum() <= round(0.3 * sample.length)
        assert all(len(set(hidden[words == word])) == 1 for word in range(words.max() + 1))


def test_a_word_too_long_for_the_budget_is_passed_over():
    words, rng = np.array([-1, 0, 0, 0, 0, 1, -1, 2, 2, 2]), np.random.default_rng(0)
    seen = {tuple(choose_words(words, 3, rng)) for _ in range(200)}
    # The second n-gram (words 1 and 2) does not fit after either was taken alone.
    assert seen == {(5,), (7, 8, 9)}
    assert choose_words(words, 4, rng).tolist() in ([1, 2, 3, 4], [5, 7, 8, 9])
    assert not len(choose_words(words, 0, rng))
    assert not len(choose_words(np.array([-1, -1]), 3, rng))


def test_a_row_always_has_something_to_predict():
    tokenizer = ByteTokenizer()
    for sentence in ("unbreakable", "       "):
        documents = encode_documents([[sentence, sentence]], tokenizer.encode, "long words")
        for sample in map(BertData(documents, tokenizer, 7).sample, range(50)):
            assert (sample.targets != IGNORED).sum() == 1
            assert sample.targets.max() < 256


def equal(one, other):
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_is_the_samples_in_order_as_tensors_which_ranks_share():
    data = counting_data(VARIED)
    batch = data.batch(step=3, global_batch=4)
    assert batch.rows.tolist() == [0, 1, 2, 3]
    for row, sample in enumerate(data.sample(i) for i in range(12, 16)):
        for name in ("tokens", "targets", "token_types"):
            assert getattr(batch, name)[row].tolist() == getattr(sample, name).tolist()
        assert batch.padding_mask[row].tolist() == [i < sample.length for i in range(32)]
        assert batch.pair_labels[row] == sample.swapped
    kinds = [each.dtype for each in (batch.tokens, batch.targets, batch.token_types, batch.rows, batch.pair_labels)]
    assert kinds == [torch.int64] * 5
    assert batch.padding_mask.dtype == torch.bool
    for world_size in (2, 4):
        parts = [counting_data(VARIED).batch(3, 4, rank, world_size) for rank in range(world_size)]
        assert equal([None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)], batch)


def test_a_sample_is_a_function_of_documents_seed_and_index():
    data, again = counting_data(VARIED, seed=1), counting_data(VARIED, seed=1)
    later = data.sample(10**9 + 7)
    assert all(np.array_equal(a, b) for a, b in zip(later, again.sample(10**9 + 7), strict=True))
    assert equal(data.batch(2, 8), again.batch(2, 8))
    assert not equal(data.batch(2, 8), counting_data(VARIED, seed=2).batch(2, 8))
    single = documents_of([20, 30])
    assert len({tuple(counting_data(single, seed=seed).sample(0).targets) for seed in range(5)}) == 5


def test_an_epoch_has_every_stretch_once_and_the_next_another_order_and_masks():
    data = counting_data(documents_of(*[[4, 4]] * 40))
    orders, hidden = [], set()
    for epoch in range(3):
        samples = [data.sample(i) for i in range(epoch * 40, (epoch + 1) * 40)]
        orders.append(tuple(min(part[0] for part in segments(data, sample)) for sample in samples))
        assert sorted(orders[-1]) == list(range(0, 320, 8))
        first = samples[orders[-1].index(0)]
        hidden.add((tuple(np.flatnonzero(first.targets != IGNORED)), first.swapped))
    assert len({*orders, (*range(0, 320, 8),)}) == 4
    assert len(hidden) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 4}, "context of 5 tokens at least, not 4"),
        ({"mask_prob": 0.0}, r"mask_prob 0.0 must lie in \(0, 1\)"),
        ({"mask_prob": 1.0}, r"mask_prob 1.0 must lie in \(0, 1\)"),
        ({"short_seq_prob": 1.1}, r"short_seq_prob 1.1 in \[0, 1\]"),
        ({"documents": documents_of([9], [7])}, "counting: no document has two sentences of at most 512 tokens"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    options = {"documents": documents_of([9, 8]), "tokenizer": IdTokenizer(21), "seq_length": 16} | change
    with pytest.raises(UserError, match=message):
        BertData(**options)


@pytest.fixture
def files(tmp_path):
    for name, animal in (("one", "cat"), ("two", "dog")):
        (tmp_path / name).write_text(f"the {animal} sat\non the mat\n\nand the {animal}\nsat still\nfor long")
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_text_becomes_samples_that_can_be_read(files):
    """The end of a file ends a document; only the training half is read to learn the pieces."""
    for kind in ("bytes", "wordpiece"):
        tokenizer = make_tokenizer(kind, files, 300, "1,1", None, lower_case=True)
        training, validation, test = load_documents(files, tokenizer, "1,1")
        assert (len(training), len(validation), len(test)) == (2, 2, 0)
        data = BertData(validation, tokenizer, 64)
        if kind == "bytes":
            ids = [id for i in range(2) for id in original(data.sample(i)).tolist() if id < 256]
            assert "the dog sat" in bytes(ids).decode().replace("dogsat", "dog sat")
        else:
            assert isinstance(tokenizer, WordPieceTokenizer)
            assert "cat" in tokenizer.pieces
            assert "dog" not in tokenizer.pieces
        with pytest.raises(UserError, match=r"test \(0 of 4 documents, split 1,1\): no document"):
            BertData(test, tokenizer, 64)


def test_random_tokens_are_documents_too():
    tokenizer = make_tokenizer("bytes", ["random"], 50, "949,50,1", None, lower_case=False)
    training, validation, _ = load_documents(["random"], tokenizer)
    assert isinstance(tokenizer, IdTokenizer)
    assert training.tokens.max() == 45
    assert BertData(training, tokenizer, 128).batch(0, 2).tokens.max() < 50
    assert len(validation) == pytest.approx(len(training) * 50 / 949, abs=1)
    assert set(np.diff(training.sentences)) == set(range(8, 64))
    assert set(np.diff(training.documents)) == set(range(2, 32))
    for length in range(1, 2000, 7):
        got = random_documents(np.arange(length), length, "random")
        assert got.documents[-1] <= len(got.sentences) - 1
        assert got.sentences[-1] <= length


def test_a_vocabulary_file_is_used_and_must_fit(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]))
    tokenizer = make_tokenizer("wordpiece", [], 6, "1", path, lower_case=False)
    assert tokenizer.encode("cat dog") == [5, 1]
    with pytest.raises(UserError, match="tokenizer has 6 tokens and the model's vocabulary 5"):
        make_tokenizer("wordpiece", [], 5, "1", path, lower_case=False)
    with pytest.raises(UserError, match="tokenizer has 260 tokens and the model's vocabulary 256"):
        make_tokenizer("bytes", [], 256, "1", None, lower_case=False)
