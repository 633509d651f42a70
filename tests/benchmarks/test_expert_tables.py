"""The page on experts: arithmetic that follows from a shape, and tables of records."""

from benchmarks.expert_tables import NOT_YET, arithmetic, expert_tables


def test_the_published_runs_arithmetic():
    # 512 experts x 103 slots, 2048 tokens x 2 choices, 768 numbers of 2 bytes; two products of 2 x 768 x 3072 a row;
    # two one-hot products of 2 x 2048 x 52,736 x 768.
    rows = {row[0]: row[1:] for row in arithmetic().rows}
    assert rows["rows of an all-to-all"] == ["52,736", "4,096", "12.9"]
    assert rows["bytes of it, in half precision"] == ["81.0 MB", "6.3 MB", "12.9"]
    assert rows["FLOPs of a layer's experts"] == ["498 G", "38.7 G", "12.9"]
    assert rows["FLOPs of one-hot products"] == ["332 G", "0", "8.6 x the useful experts'"]


def test_what_was_not_measured_says_so(tmp_path):
    assert expert_tables(tmp_path)[1:] == [NOT_YET]
