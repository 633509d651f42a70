"""Split sequences, packed documents and zero-bubble pipelines give one process's results: losses, every parameter's
gradient, its norm, and the parameters after two steps of AdamW, in float64, with every other axis and ZeRO stage."""

import pytest

from tests.support.layout_table import Layout
from tests.test_layouts import Proof

PACKED = {"pack": True, "dropout": 0.1}
LAYOUTS = {
    1: [
        Layout(**PACKED),
        Layout(model="llama", pack=True, accumulate=True, recompute="attention"),
    ],
    2: [
        Layout(dp=2, pack=True, zero=2),
        Layout(cp=2, recompute="nested", dropout=0.1),
        Layout(cp=2, model="llama", pack=True, accumulate=True),
        Layout(cp=2, cp_type="gather", recompute="attention", **PACKED),
        Layout(cp=2, cp_type="ulysses", model="llama", recompute="segments", **PACKED),
        Layout(cp=2, cp_type="ulysses", zero=3),
        Layout(tp=2, sequence_parallel=True, **PACKED),
        Layout(pp=2, pack=True, accumulate=True),
        Layout(pp=2, accumulate=True, schedule="zb-h1", dropout=0.1, zero=1),
        Layout(pp=2, accumulate=True, schedule="zbv", dropout=0.1, zero=2),
    ],
    4: [
        Layout(tp=2, cp=2, model="llama", sequence_parallel=True, **PACKED),
        Layout(tp=2, cp=2, cp_type="ulysses", dropout=0.1),
        Layout(pp=2, cp=2, accumulate=True, **PACKED),
        Layout(pp=2, cp=2, cp_type="ulysses", model="llama", accumulate=True, schedule="interleaved", zero=1),
        Layout(pp=2, cp=2, cp_type="gather", accumulate=True, schedule="gpipe", pack=True, zero=3),
        Layout(dp=2, cp=2, model="llama", zero=3, **PACKED),
        Layout(dp=2, cp=2, cp_type="gather", zero=2, recompute="segments"),
        Layout(pp=2, dp=2, model="bert", accumulate=True, schedule="zb-h1", zero=2, dropout=0.1),
        Layout(pp=2, cp=2, accumulate=True, schedule="zbv", pack=True),
        Layout(tp=2, pp=2, model="bert", accumulate=True, schedule="zbv", sequence_parallel=True, dropout=0.1),
        Layout(cp=4, model="llama", pack=True),
        Layout(cp=4, cp_type="ulysses", zero=2, **PACKED),
    ],
    8: [
        Layout(tp=2, pp=2, cp=2, model="llama", accumulate=True, sequence_parallel=True, **PACKED),
        Layout(tp=2, dp=2, cp=2, cp_type="ulysses", model="llama", zero=3, pack=True),
        Layout(tp=2, pp=2, dp=2, accumulate=True, schedule="zbv", zero=2, sequence_parallel=True),
    ],
}


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Proof(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("ranks", LAYOUTS, ids=str)
def test_split_and_packed_sequences_learn_what_one_process_learns(proof, ranks):
    layouts = LAYOUTS[ranks]
    assert {layout.ranks for layout in layouts} == {ranks}
    for some in (layouts[:1], layouts[1:]):  # the first alone, so that much of what may be wrong is seen soon
        proof.check_all(some)
