"""Pictures of split layers: what they observe is what the code is known to do."""

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from writeup.layer_schematics import block_order, moments, sorted_choices


def test_weights_are_gathered_two_layers_ahead_and_freed_after_use():
    ahead = [("forward", layer, list(range(layer, min(layer + 3, 8)))) for layer in range(8)]
    back = [("backward", layer, list(range(max(layer - 2, 0), layer + 1))) for layer in reversed(range(8))]
    assert moments() == ahead + back


def test_a_block_reduces_behind_out_and_down_and_with_sequence_parallelism_gathers_before():
    first = ["query", "key", "value", "out", "all-reduce"]
    assert [word for word, _ in block_order(False)] == ["norm", *first, "norm", "up", "down", "all-reduce"]
    attention = ["norm", "all-gather", *first[:-1], "reduce-scatter"]
    feed_forward = ["norm", "all-gather", "up", "down", "reduce-scatter"]
    assert [word for word, _ in block_order(True)] == attention + feed_forward


def test_choices_are_sorted_by_expert_first_ones_before_second_ones_and_dropped_beyond_the_slots():
    found = [(1, 0), (0, 0), (4, 0), (3, 1), (2, 1), (0, 2), (2, 2), (4, 2), (3, 2), (5, 2), (5, 3), (1, 3)]
    assert sorted_choices() == [(token, expert, (token, expert) not in ((3, 2), (5, 2))) for token, expert in found]
