"""Pipelines against gradient accumulation in one process: bit for bit but for the tied weight, in every schedule."""

import copy
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cs336_systems import pipeline
from cs336_systems.comm import Mesh, agreement, all_reduce, record
from cs336_systems.comm.store import wait_for
from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.model.heads import Losses
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.pipeline import Pipeline, Stage
from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import SPLIT
from cs336_systems.tensor_parallel.plan import tensor_parallel
from tests.support import ranks
from tests.support.parallel_models import (
    CONFIGS,
    SEQ,
    combine,
    compare_gradients,
    gradients,
    key_of,
    make_batch,
    rounding,
    whole_model,
)

ROWS, MOST = 2, 5  # of a microbatch; microbatches
TIED = "embedding.tokens.weight"


class Oracle(NamedTuple):
    """One process: the losses of each microbatch, and the gradients after the first m of them."""

    losses: list[Losses]
    after: dict[int, dict[str, Tensor]]


class Seen(NamedTuple):
    """Record of a run on this rank."""

    losses: list[Losses]
    peak: int  # microbatches that were live at once
    accumulated: int  # backwards inside `accumulate`
    timers: list[str]
    events: list


def microbatches(config, count: int) -> list:
    return make_batch(config, ROWS * MOST).split(ROWS)[:count]


def one_process(dense: TransformerLM) -> Oracle:
    stage = Stage(copy.deepcopy(dense), 0, 1)
    losses, after = [], {}
    for number, batch in enumerate(microbatches(dense.config, MOST)):
        losses.append(stage(batch, None, 0, key_of(batch)))
        combine(losses[-1]).backward()
        after[number + 1] = {name: p.grad.clone() for name, p in stage.model.named_parameters()}
    return Oracle(losses, after)


def watched(pipe: Pipeline, batches: list, train: bool = True) -> Seen:
    """Runs the microbatches, and looks on."""
    names, peaks, contexts, runs = [], [0], [], []

    @contextmanager
    def note(name: str, where: list):
        where.append(name)
        yield

    class Watched(pipeline._Execution):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            runs.append(self)

        def forward(self, *arguments):
            result = super().forward(*arguments)
            peaks.append(len(self.live))
            assert result is None or result.requires_grad == train
            return result

    pipe.timer = lambda name: note(name, names)
    with pytest.MonkeyPatch.context() as monkeypatch, record() as events:
        monkeypatch.setattr(pipeline, "_Execution", Watched)
        loss = combine if train else None
        losses = pipe.run(batches, loss, [key_of(batch) for batch in batches], lambda: note("", contexts))
    assert not runs[0].live
    assert not runs[0].posted
    assert not any(each.tokens.requires_grad for each in losses)
    return Seen(losses, max(peaks), len(contexts), names, events)


def check_losses(stage: Stage, got: list[Losses], want: list[Losses]) -> None:
    assert len(got) == (len(want) if stage.has_last else 0)
    for one, other in zip(got, want, strict=False):
        assert torch.equal(one.tokens, other.tokens)
        assert (one.pair is None and other.pair is None) or torch.equal(one.pair, other.pair)


def messages(stage: int, stages: int, chunks: int, count: int, turn: bool = False) -> Counter:
    """(verb, kind) of what a stage hands on and is handed, whatever the schedule. Every pass but the model's first and
    last hands one on, each way; in a V the last stage's chunks follow each other, and what the first makes stays."""
    first, last = stage == 0, stage == stages - 1
    before, after = chunks - first, chunks - last  # chunks that another stage is before, or after
    if turn:
        before, after = chunks - first - last, chunks - last - first
    kinds = {("receive", "forward"): before, ("send", "backward"): before}
    kinds |= {("send", "forward"): after, ("receive", "backward"): after}
    return +Counter({kind: each * count for kind, each in kinds.items()})


def check_messages(stage: Stage, seen: Seen, count: int, width: int) -> None:
    found = Counter((event.verb, event.label.split()[0]) for event in seen.events)
    assert found == messages(stage.stage, stage.stages, stage.chunks, count, stage.turn)
    assert {(event.numel, event.dtype.itemsize) for event in seen.events} <= {
        (ROWS * SEQ * stage.model.config.d_model, width)
    }


def check_run(dense: TransformerLM, oracle: Oracle, mesh: Mesh, name: str, chunks: int, count: int) -> None:
    stage = Stage(copy.deepcopy(dense), mesh.pp.rank(), mesh.pp.size(), chunks, name == "zbv")
    config, where = dense.config, (name, chunks, count)
    pipe = Pipeline(stage, stage, mesh, name)
    batches = microbatches(config, count)
    seen = watched(pipe, batches)
    check_losses(stage, seen.losses, oracle.losses[:count])
    # Of a backward that is split, the graph ends with the gradients of inputs.
    lists = [[each for each in row if each.kind != "weights"] for row in schedule(name, stage.stages, count, chunks)]
    graphs = simulate(lists, turn=stage.turn)
    assert seen.peak == graphs.peak_live[stage.stage], where
    early = 2 * count * chunks if name in SPLIT else count - 1 if chunks == 1 else count * chunks
    assert seen.accumulated == early, where
    check_messages(stage, seen, count, dense.embedding.tokens.weight.itemsize)
    mine = {each: parameter.grad for each, parameter in stage.model.named_parameters()}
    apart = stage.has_first != stage.has_last  # the two uses of a tied embedding
    if config.tied_head and mesh.ends is not None and apart:
        all_reduce(mine[TIED].view(-1), mesh.ends, "tied", "sum").wait()
    for each, gradient in mine.items():
        want = oracle.after[count][each]
        if each == TIED and config.tied_head:
            # Two sums in place of one, of the same terms.
            assert ((gradient - want).norm() / want.norm()).item() <= rounding(config, want.dtype, ROWS * 8 * count)
        else:
            assert torch.equal(gradient, want), (each, where)
    again = watched(pipe, batches, train=False)
    check_losses(stage, again.losses, oracle.losses[:count])
    assert again.peak == 0
    assert all(torch.equal(parameter.grad, mine[each]) for each, parameter in stage.model.named_parameters())


def schedules_case(group) -> None:
    mesh = Mesh(pp=group.size())
    size = group.size()
    some = [("1f1b", 1, 3), ("interleaved", 2, 4), ("zb-h1", 1, 4), ("zbv", 2, 3)]
    every = [("gpipe", 1, 3), *((name, 1, count) for name in ("1f1b", "zb-h1") for count in (1, 5))]
    every += [("zbv", 2, 1), ("zbv", 2, 5)]
    every += [("interleaved", 1, 3), ("interleaved", 2, 4), *([("interleaved", 2, 2)] if size == 2 else [])]
    for kind, dtype, runs in (
        ("llama", torch.float32, every),
        ("gpt", torch.float64, some),
        ("bert", torch.float64, some),
    ):
        torch.set_default_dtype(dtype)
        dense = whole_model(replace(CONFIGS[kind], num_layers=2 * size), dtype)
        oracle = one_process(dense)
        for run in runs:
            check_run(dense, oracle, mesh, *run)


@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_equals_accumulation_in_one_process(stages):
    ranks.run(schedules_case, stages)


def uneven_case(group) -> None:
    """Microbatches of other sizes, the first not the longest; and with all before the last stage frozen, so that the
    first one's output wants no gradient."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(pp=2)
    for sizes, name, chunks, frozen in (
        ((3, 3, 2), "1f1b", 1, False),
        ((2, 3), "gpipe", 1, False),
        ((1, 3, 2, 3), "interleaved", 2, False),
        ((3, 1, 2), "zb-h1", 1, False),
        ((3, 1, 2), "zbv", 2, False),
        ((2, 2, 2), "1f1b", 1, True),
        ((2, 2, 2), "zb-h1", 1, True),
    ):
        config = replace(CONFIGS["llama"], num_layers=4)
        dense, whole = whole_model(config), make_batch(config, sum(sizes))
        for module in (dense.embedding, *dense.blocks[:2]) if frozen else ():
            module.requires_grad_(False)
        rows = torch.arange(sum(sizes)).split(sizes)
        batches = [Batch(*(None if each is None else each[mine] for each in whole)) for mine in rows]
        alone = Stage(copy.deepcopy(dense), 0, 1)
        stage = Stage(copy.deepcopy(dense), mesh.pp.rank(), 2, chunks, name == "zbv")
        losses, keys = [], [key_of(batch) for batch in batches]
        for batch, key in zip(batches, keys, strict=True):
            losses.append(alone(batch, None, 0, key))
            combine(losses[-1]).backward()
        check_losses(stage, Pipeline(stage, stage, mesh, name).run(batches, combine, keys), losses)
        for each, parameter in stage.model.named_parameters():
            want = alone.model.get_parameter(each).grad
            assert parameter.grad is want is None or torch.equal(parameter.grad, want), (name, each)


def test_uneven_microbatches_and_a_frozen_first_stage_equal_accumulation():
    ranks.run(uneven_case, 2)


def both_case(group) -> None:
    """Tensor parallel ranks in each of two stages, the sequence split, blocks run again."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(tp=2, pp=2)
    for kind, recompute, name, chunks, count in (
        ("bert", "none", "1f1b", 1, 3),
        ("gpt", "segments", "interleaved", 2, 4),
    ):
        config = replace(CONFIGS[kind], num_layers=2 * chunks, recompute=recompute)
        dense = whole_model(config)
        oracle = one_process(dense)
        for each, parameter in dense.named_parameters():
            parameter.grad = oracle.after[count][each]
        stage = Stage(copy.deepcopy(dense), mesh.pp.rank(), 2, chunks)
        plan = tensor_parallel(stage.model, mesh.tp, True, 8)
        seen = watched(Pipeline(stage, stage, mesh, name, sequence=2), microbatches(config, count))
        passed = [event.nbytes for event in seen.events if event.verb == "send"]
        assert passed == [8 * ROWS * 4 * config.d_model] * len(passed), "only this rank's tokens travel"
        mine = gradients(stage.model, plan)
        if config.tied_head:
            all_reduce(mine[TIED].view(-1), mesh.ends, "tied", "sum").wait()
        compare_gradients(mine, plan, dense, rounding(config, torch.float64, ROWS * 8 * count))


def test_stages_of_tensor_parallel_ranks():
    ranks.run(both_case, 4)


def timers_case(group) -> list[str]:
    mesh, config = Mesh(pp=3), replace(CONFIGS["gpt"], num_layers=3)
    stage = Stage(whole_model(config, torch.float32), mesh.pp.rank(), 3)
    return watched(Pipeline(stage, stage, mesh), microbatches(config, 3)).timers


def test_timers_have_megatrons_names():
    forward, backward = "forward-compute", "backward-compute"
    turn, back = "forward-send-backward-recv", "backward-send-forward-recv"
    assert ranks.run(timers_case, 3)[1] == [
        *["forward-recv", forward, "forward-send"],
        *["forward-recv", forward, turn, turn, backward, back],
        *[back, forward, turn, turn, backward, "backward-send"],
        *["backward-recv", backward, "backward-send"],
    ]


def refused_case(group) -> None:
    mesh = Mesh(pp=2)
    config = replace(CONFIGS["gpt"], num_layers=4)
    for name, chunks, message in (
        ("interleaved", 2, "microbatches 3 is not a multiple of stages 2, as interleaved needs: use 2 or 4"),
        ("zbv", 2, "schedule zbv does not go with a stage that has turn=False"),
    ):
        stage = Stage(TransformerLM(config), mesh.pp.rank(), 2, chunks)
        with record() as events, pytest.raises(UserError) as error:
            Pipeline(stage, stage, mesh, name).run(microbatches(config, 3), combine)
        assert str(error.value) == message
        assert not events
    stage = Stage(TransformerLM(config), mesh.pp.rank(), 2)
    bare = [batch._replace(targets=None) for batch in microbatches(config, 3)]
    if stage.has_last:
        with pytest.raises(UserError, match="a microbatch has no targets"):
            Pipeline(stage, stage, mesh).run(bare, None)
    given = microbatches(config, 3) if stage.has_last else bare  # other stages need none
    assert len(Pipeline(stage, stage, mesh).run(given, None)) == 3 * stage.has_last


def test_schedules_that_cannot_be_are_refused():
    ranks.run(refused_case, 2)


def lost_case(group, how: str) -> None:
    """The last stage stops in its second forward."""
    agreement.EXPLAIN_SECONDS = 0.1
    mesh = Mesh(pp=2)
    config = CONFIGS["gpt"]
    stage = Stage(TransformerLM(config), mesh.pp.rank(), 2)
    calls = []

    def stop(module, arguments) -> None:
        calls.append(module)
        if len(calls) == 2 and stage.has_last:
            if how == "dies":
                os._exit(7)
            wait_for(group.get_group_store(), ["done/0"], timedelta(seconds=40))

    stage.register_forward_pre_hook(stop)
    Pipeline(stage, stage, mesh).run(microbatches(config, 3), combine)


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_stage_that_is_lost_is_named(how):
    kind, message = ranks.run_failing(lost_case, 2, how=how)[0]
    assert kind == "CommError"
    nbytes = 4 * ROWS * 8 * CONFIGS["gpt"].d_model
    awaited = f"rank 0 waited in receive no. 1 (backward of microbatch 1 in chunk 0, {nbytes:,} bytes)"
    fate = "died" if how == "dies" else "runs but said nothing"
    assert message.startswith(f"{awaited}; rank 1 {fate} "), message
