"""Context parallelism alone: the tokens of each rank, the traffic and memory of each variant, and refusals; and packed
documents, which do not attend to each other."""

import copy
import itertools
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.comm import CommError, Mesh, all_reduce, fake_ranks, record
from cs336_systems.context_parallel import attention_work, context_parallel, join_sequence, parts_of, split_sequence
from cs336_systems.data.corpus import IGNORED, Batch
from cs336_systems.errors import UserError
from cs336_systems.layout import Layout
from cs336_systems.model.attention import SelfAttention
from cs336_systems.model.blockwise import BlockKernel, Rectangle
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel.plan import tensor_parallel
from cs336_systems.train.observation import observe
from cs336_systems.train.recipe import Recipe
from tests.support import ranks
from tests.support.layout_cases import dense_attention, relative
from tests.support.tolerances import bound

SEQ, LAYERS, ROWS = 32, 2, 3
CONFIG = ModelConfig(50, SEQ, 32, 64, LAYERS, 8, positions="rotary")
KINDS = ("ring", "gather", "ulysses")


def packed(seed: int, rows: int = ROWS, seq: int = SEQ) -> Tensor:
    """Positions (rows seq) in documents of about six tokens."""
    starts = torch.rand(rows, seq, generator=torch.Generator().manual_seed(seed)) < 1 / 6
    starts[:, 0] = True
    places = torch.arange(seq)
    return places - torch.where(starts, places, 0).cummax(1).values


def batch_of(seed: int, is_packed: bool) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(CONFIG.vocab_size, (ROWS, SEQ), generator=draw) for _ in range(2))
    positions = packed(seed) if is_packed else None
    if positions is not None:
        targets[:, :-1][positions[:, 1:] == 0] = IGNORED
    return Batch(tokens, targets, positions=positions)


# Two cases of each kind with each kernel, in which any two options meet; one with flash, which is slow here.
CASES = [
    (kind, attention, kv_heads, is_packed, 0.0 if attention == "flash" or bool(kv_heads) == (kind == "ring") else 0.1)
    for (i, kind), (j, attention) in itertools.product(enumerate(KINDS), enumerate(("naive", "sdpa", "flash")))
    for kv_heads in (0, 2)
    for is_packed in [bool(kv_heads) == ((i + j) % 2 == 0)]
    if attention != "flash" or is_packed == (kind == "ring")
]


def loss_and_gradients(model: TransformerLM, batch: Batch, key: Tensor | None) -> dict[str, Tensor]:
    loss = model.losses(model.run_blocks(batch, key=key), batch).tokens
    loss.backward()
    return {"loss": loss.detach().clone()} | {name: p.grad for name, p in model.named_parameters()}


def three_ways_case(group, cases: list) -> list[tuple]:
    """The largest error of loss and gradients of each case against one process with a mask of all pairs of tokens, on
    rank 0."""
    torch.set_default_dtype(torch.float64)
    worst = []
    for kind, attention, kv_heads, is_packed, dropout in cases:
        model = TransformerLM(replace(CONFIG, attention=attention, num_kv_heads=kv_heads, dropout=dropout))
        model.init_weights(1)
        whole, batch = copy.deepcopy(model), batch_of(3, is_packed)
        key = dropout_key(5, 2, torch.arange(ROWS)) if dropout else None
        context_parallel(model, group, kind)
        part = split_sequence(batch, group)
        assert torch.equal(join_sequence(part.tokens[..., None], group)[..., 0], batch.tokens)
        got = loss_and_gradients(model, part, key)
        for total in got.values():
            all_reduce(total.view(-1), group, "test", "sum").wait()
        if group.rank() == 0:
            for module in whole.modules():
                if isinstance(module, SelfAttention):
                    module.blockwise = dense_attention
            want = loss_and_gradients(whole, batch, key)
            worst.append(max((relative(got[name], one, one), name) for name, one in want.items()))
    return worst


@pytest.mark.parametrize("world", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 8))])
def test_three_ways_with_every_kernel_equal_one_process(world):
    """Grouped queries with fewer heads of keys than ranks, dropout by place, packed documents; several kernels on two
    ranks."""
    allowed = bound(torch.float64, stages=3 * 16 * (LAYERS + 1), longest_sum=CONFIG.vocab_size)
    cases = CASES if world == 2 else [each for each in CASES if each[1] == "sdpa"]
    worst, *_ = ranks.run(three_ways_case, world, cases=cases)
    assert not [(case, *each) for case, each in zip(cases, worst, strict=True) if each[0] > allowed]


def test_every_rank_has_the_same_work():
    assert [parts_of(rank, 2, 16) for rank in range(2)] == [(range(4), range(12, 16)), (range(4, 8), range(8, 12))]
    for world in (1, 2, 3, 4, 8):
        work = attention_work(world, 48)
        assert sum(work) == 48 * 49 // 2
        assert len(set(work)) == 1
    assert sum(attention_work(2, SEQ, packed(3))) == (packed(3) + 1).sum()


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_each_way_sends_its_closed_form(world, kv_heads):
    """Elements that a rank sends in forward and backward of a layer, with q of b s d / N elements on each rank, and k
    and v of b s d_kv / N. Gradients travel the ring in float32 at least."""
    tokens = ROWS * SEQ // world
    q, kv = tokens * CONFIG.d_model, 2 * tokens * kv_heads * CONFIG.head_dim
    copied = 2 * tokens * max(kv_heads, world) * CONFIG.head_dim  # heads of keys that ulysses repeats
    others = world - 1
    forms = {
        "ring": others * kv + others * kv + world * kv,  # keys and values there, again, and their gradients home
        "gather": others * kv + others * kv,
        "ulysses": 2 * (q + copied + q) * others / world,
    }
    for kind, elements in forms.items():
        with fake_ranks(0, world) as group, record() as events:
            model = TransformerLM(replace(CONFIG, num_kv_heads=kv_heads), "meta")
            context_parallel(model, group, kind)
            batch = Batch(torch.zeros(ROWS, SEQ // world, dtype=torch.int64, device="meta"))
            model.run_blocks(batch).sum().backward()
        sent = sum(event.bytes_sent for event in events if event.verb != "receive")
        assert sent == 4 * LAYERS * elements, kind


def test_what_a_rank_keeps_for_backward_to_the_byte():
    """The ring: everything by the number of ranks but the loss, a number. Gather keeps all keys and values. Ulysses
    keeps two lists of places, 8 bytes each."""
    config = replace(CONFIG, attention="sdpa", context_length=64)

    def kept(**degrees: object) -> int:
        return observe(Recipe.of(context=64, **degrees), config, Layout(**degrees)).kept

    scalar, alone = 8, kept()
    keys = 4 * 64 * 2 * config.d_model
    share = (alone - scalar) // 4 + scalar
    assert kept(cp=4) == share
    assert kept(cp=4, cp_type="gather") == share + LAYERS * keys * 3 // 4
    assert kept(cp=4, cp_type="ulysses") == share + LAYERS * 2 * 8 * 64


def logits(positions: Tensor, tokens: Tensor, attention: str) -> Tensor:
    model = TransformerLM(replace(CONFIG, attention=attention))
    model.init_weights(1)
    with torch.no_grad():
        return model(tokens, positions=positions)


@pytest.mark.parametrize("attention", ["naive", "sdpa", pytest.param("flash", marks=pytest.mark.slow)])
def test_a_document_changes_nothing_in_the_others(attention):
    """The logits of all other documents are the same bits."""
    rows = 1 if attention == "flash" else ROWS  # Triton's interpreter is slow
    tokens, positions = (each[:rows] for each in (batch_of(5, True).tokens, batch_of(5, True).positions))
    before = logits(positions, tokens, attention)
    changed = (positions == 0).cumsum(1) == 2
    after = logits(positions, torch.where(changed, (tokens + 1) % CONFIG.vocab_size, tokens), attention)
    assert torch.equal(before[~changed], after[~changed])
    assert not torch.equal(before[changed], after[changed])


@pytest.mark.parametrize("positions", ["learned", "rotary", "sinusoidal", "none"])
def test_packed_documents_equal_the_documents_apart(positions):
    """Logits of a row, and the gradient of its loss, against each document as a sequence of its own."""
    torch.set_default_dtype(torch.float64)
    try:
        batch = batch_of(9, True)
        one = TransformerLM(replace(CONFIG, positions=positions, attention="sdpa", dropout=0.0))
        one.init_weights(1)
        apart = copy.deepcopy(one)
        found = one(batch.tokens, positions=batch.positions)
        one.losses(one.run_blocks(batch), batch).tokens.backward()
        pieces = []
        for row, places in enumerate(batch.positions):
            borders = [*(places == 0).nonzero().flatten().tolist(), SEQ]
            for first, last in itertools.pairwise(borders):
                document = Batch(batch.tokens[row : row + 1, first:last], batch.targets[row : row + 1, first:last])
                pieces.append(apart(document.tokens)[0].detach())
                apart.losses(apart.run_blocks(document), document).tokens.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    allowed = bound(torch.float64, stages=3 * 16 * (LAYERS + 1), longest_sum=CONFIG.vocab_size)
    assert relative(found.flatten(0, 1), torch.cat(pieces), torch.cat(pieces)) < allowed
    for name, parameter in apart.named_parameters():
        assert relative(one.get_parameter(name).grad, parameter.grad, parameter.grad) < allowed, name


def test_the_fused_kernel_reads_tensors_of_any_strides():
    """One of q, k, v, gradient and output at a time has its last dim far apart, as rotated heads of 2 have."""
    whole, draw = Rectangle(slice(None), slice(6), slice(6), True, 0, 0), torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 3, 6, 4, generator=draw, dtype=torch.float64)
    output, log_sum_exp = BlockKernel("naive").forward(q, k, v, whole)
    dense = [q, k, v, grad, output]
    want = [output, log_sum_exp, *BlockKernel("naive").backward(grad, q, k, v, output, log_sum_exp, whole)]
    for which in range(5):
        q, k, v, grad, output = (each.mT.contiguous().mT if i == which else each for i, each in enumerate(dense))
        found = [*BlockKernel("sdpa").forward(q, k, v, whole)]
        found += BlockKernel("sdpa").backward(grad, q, k, v, output, log_sum_exp, whole)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cp": 2, "tp": 2, "sequence_parallel": True, "context": 36},
            "36 tokens do not divide into 2 x cp 2 x tp 2 = 8 parts: use --context 32, or a lower --cp",
        ),
        (
            {"cp": 8, "cp_type": "ulysses", "context": 64},
            "4 heads do not divide over tp 1 x cp 8 = 8 ranks: use --cp-type ring or gather, or degrees whose product "
            "divides 4",
        ),
        (
            {"cp": 2, "objective": "bert", "context": 64},
            "cp 2 splits the sequence of a decoder, and this model is an encoder: leave --cp out",
        ),
        (
            {"cp": 3, "context": 48},
            "tp 1 x pp 1 x ep 1 x cp 3 = 3 does not divide the 8 ranks: start a multiple of 3, or lower a degree",
        ),
        (
            {"objective": "bert", "pack": True},
            "--pack is about a decoder's rows; a row of BERT's is one pair of stretches of text",
        ),
    ],
)
def test_refusals(options, message):
    recipe = Recipe.of(num_heads=4, d_model=64, batch_size=8, **options)
    with pytest.raises(UserError) as error:
        recipe.check(recipe.model_config(), 8)
    assert str(error.value) == message


def test_what_cannot_be_split_is_refused():
    with fake_ranks(0, 2) as group:
        with pytest.raises(UserError, match="10 tokens do not divide into 2 x cp 2 = 4 parts"):
            split_sequence(Batch(torch.zeros(1, 10, dtype=torch.int64)), group)
        with pytest.raises(UserError, match="is called 'Ring': choose from ring, gather, ulysses"):
            context_parallel(TransformerLM(CONFIG, "meta"), kind="Ring")
        model = context_parallel(TransformerLM(replace(CONFIG, num_heads=2)), group, "ulysses")
        with pytest.raises(UserError, match="tp 2 is not a process group that this rank is in"):
            tensor_parallel(model, Mesh(tp=2))
        tensor_parallel(model)
        with pytest.raises(UserError, match="1 heads on each rank do not divide over cp 2: use ring or gather"):
            model.run_blocks(Batch(torch.zeros(1, SEQ // 2, dtype=torch.int64)))
    tokens, model = torch.zeros(2, 4, dtype=torch.int64), TransformerLM(CONFIG)
    for positions, message in (
        (torch.arange(4)[None], r"int64 of shape \(1, 4\): whole numbers of shape \(2, 4\) are meant"),
        (torch.arange(4), r"of shape \(4,\)"),
        (torch.zeros(2, 5, dtype=torch.int64), r"of shape \(2, 5\)"),
        (torch.zeros(2, 4), "torch.float32"),
        (torch.arange(1, 5).expand(2, -1), "a row's positions begin at 0"),
    ):
        with pytest.raises(UserError, match=message):
            model(tokens, positions=positions)
    positions = torch.tensor([[0, 1, 0, 1]] * 2)
    with pytest.raises(UserError, match="causal attention without padding"):
        TransformerLM(replace(CONFIG, causal=False))(tokens, positions=positions)
    with pytest.raises(UserError, match="without padding"):
        model(tokens, padding_mask=torch.ones(2, 4, dtype=torch.bool), positions=positions)
    with pytest.raises(UserError, match="pass the model a dropout key"):
        TransformerLM(replace(CONFIG, dropout=0.1))(tokens, positions=positions)


def test_ranks_without_targets_have_a_loss_of_zero():
    """In the fused form the mean of none is not a number."""
    model = TransformerLM(replace(CONFIG, kernels="triton"))
    batch = batch_of(4, False)._replace(targets=torch.full((ROWS, SEQ), IGNORED))
    loss = model.losses(model.run_blocks(batch), batch).tokens
    loss.backward()
    assert loss.item() == 0.0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def dead_rank_case(group, kind: str) -> None:
    """A rank that is killed after its first attention."""
    model = context_parallel(TransformerLM(CONFIG), group, kind)
    if group.rank() == 1:
        model.blocks[0].attention.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    part = split_sequence(batch_of(1, False), group)
    for _ in range(2):
        model.losses(model.run_blocks(part), part).tokens.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_is_named(kind):
    kind_of_error, message = ranks.run_failing(dead_rank_case, 2, 20.0, kind=kind)[0]
    assert kind_of_error == CommError.__name__
    assert "rank 1 died" in message


def test_numbers_of_collectives_do_not_depend_on_documents():
    """Packed or not, the same messages pass: ranks never wait for what another one left out."""
    counts = []
    for is_packed in (False, True):
        with fake_ranks(1, 2) as group, record() as events:
            model = context_parallel(TransformerLM(CONFIG), group, "ring")
            part = split_sequence(batch_of(2, is_packed), group)
            model.losses(model.run_blocks(part), part).tokens.backward()
        counts.append(Counter((event.verb, event.label, event.numel) for event in events))
    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {LAYERS}
