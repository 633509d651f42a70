"""A state that four ranks wrote, on one, two and eight: what they go on to learn is what the four did."""

from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cs336_systems.errors import UserError
from cs336_systems.expert_state import load_state, whole_state
from tests import ranks
from tests.expert_cases import Layout, Watched, amplification_case, dicts, rounding, run_steps
from tests.layout_cases import errors, load, relative, wide, write_text

WRITER = Layout("shared", ep=4, model="llama", zero=2)
READERS = (
    Layout("shared", model="llama"),
    Layout("shared", ep=2, model="llama", zero=1),
    Layout("shared", tp=2, model="llama", sequence_parallel=True),
    Layout("shared", dp=2, model="llama", zero=2),
    Layout("shared", pp=2, model="llama", zero=1),
    Layout("shared", ep=4, dp=2, model="llama", zero=2),
    Layout("shared", ep=8, model="llama"),
)
SETTINGS = {"num_experts": 8, "micro_batch_size": 1}  # a row at a time is routed together, whatever the ranks
FIRST, LAST = 2, 3  # steps before and after the move


def continue_(trainer: Watched, path: Path) -> None:
    steps = run_steps(trainer, FIRST, LAST)
    torch.save({"steps": steps, "state": whole_state(trainer)}, path)


def writer_case(group, folder: str, layout: dict) -> None:
    """Two steps, a state in a file, and one step more."""
    wide()
    trainer = Watched(Layout(**layout).recipe(folder, **SETTINGS))
    assert all(state.keys() == {"value"} for state in whole_state(trainer).values())
    run_steps(trainer, 0, FIRST)
    state = whole_state(trainer)
    torch.save(state, Path(folder, f"state.{group.rank()}"))
    continue_(trainer, Path(folder, f"written.{group.rank()}"))
    require_same(state, load(Path(folder, f"state.{group.rank()}")))  # a state is a copy


def reader_case(group, folder: str, layouts: list[dict]) -> None:
    wide()
    for layout in (Layout(**each) for each in layouts):
        trainer = Watched(layout.recipe(folder, **SETTINGS))
        trainer.step(0)  # of which nothing may be left
        state = load(Path(folder, "state.0"))
        load_state(trainer, state)
        require_same(whole_state(trainer), state)
        continue_(trainer, Path(folder, f"{layout}.{group.rank()}"))
        require_same(state, load(Path(folder, "state.0")))  # what was loaded is a copy


def require_same(got: dict, want: dict) -> None:
    """Bit by bit, as far as a stage has it."""
    for name, state in got.items():
        assert state.keys() == want[name].keys() >= {"value", "exp_avg", "exp_avg_sq", "step"}
        for key, value in state.items():
            same = torch.equal(value, want[name][key]) if isinstance(value, torch.Tensor) else value == want[name][key]
            assert same, (name, key)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a text and of what the writer did, and what rounding may do to it."""
    folder = tmp_path_factory.mktemp("states")
    write_text(folder)
    ranks.run(writer_case, WRITER.ranks, folder=str(folder), layout=asdict(WRITER))
    (found,) = ranks.run(amplification_case, 1, folder=str(folder), layouts=dicts(READERS[:1]), steps=LAST)
    return folder, found[0] * rounding(WRITER.layers)


def test_a_state_is_whole_on_every_rank(written):
    folder, _ = written
    states = [load(folder / f"state.{rank}") for rank in range(WRITER.ranks)]
    for state in states[1:]:
        require_same(state, states[0])
    experts = {name: each for name, each in states[0].items() if ".experts." in name}
    assert {len(each[key]) for each in experts.values() for key in ("value", "exp_avg", "exp_avg_sq")} == {8}
    assert {each["step"] for each in states[0].values()} == {FIRST}


@pytest.mark.parametrize("layout", READERS, ids=str)
def test_what_goes_on_elsewhere_learns_the_same(written, layout):
    folder, allowed = written
    if not (folder / f"{layout}.0").exists():
        together = [each for each in READERS if each.ranks == layout.ranks]
        ranks.run(reader_case, layout.ranks, folder=str(folder), layouts=dicts(together))
    want = load(folder / "written.0")
    merged: dict = {}
    for rank in range(layout.ranks):
        got = load(folder / f"{layout}.{rank}")
        for mine, theirs in zip(got["steps"], want["steps"], strict=True):
            assert relative(mine["losses"], theirs["losses"], theirs["losses"]) <= allowed
            assert relative(mine["norm"], theirs["norm"], theirs["norm"]) <= allowed
        merged |= got["state"]
    assert merged.keys() == want["state"].keys()
    assert {each["step"] for each in merged.values()} == {LAST}
    for key in ("value", "exp_avg", "exp_avg_sq"):
        one, other = ({name: each[key] for name, each in state.items()} for state in (merged, want["state"]))
        assert max(errors(one, other).values()) <= (2 if key == "exp_avg_sq" else 1) * allowed, key


def masters_case(group, folder: str) -> None:
    """Half precision moves with its masters, to where each rank has other parts of them."""
    torch.set_default_dtype(torch.float32)
    recipes = [
        Layout("shared", model="llama", **place).recipe(folder, precision="bf16")
        for place in ({"ep": 2}, {"dp": 2, "zero": 2}, {"ep": 2, "zero": 1})
    ]
    writer = Watched(recipes[0])
    writer.step(0)
    state = whole_state(writer)
    assert {state[name]["master"].dtype for name in state} == {torch.float32}
    before = deepcopy(state)
    writer.step(1)
    require_same(state, before)
    for recipe in recipes[1:]:
        reader = Watched(recipe)
        load_state(reader, state)
        require_same(whole_state(reader), state)
        reader.step(1)
        assert whole_state(reader)["embedding.tokens.weight"]["step"] == 2


def refusals_case(group, folder: str) -> list[str]:
    """What each refusal says."""
    wide()
    layout = Layout("shared", ep=2, model="llama")
    trainer = Watched(layout.recipe(folder))
    state = whole_state(trainer)
    said = []
    more = Watched(layout.recipe(folder, num_experts=8))
    sharded = Watched(layout.recipe(folder, zero=3))
    missing = {name: each for name, each in state.items() if name != "final_norm.weight"}
    before = more.weights()
    for act in (
        lambda: load_state(more, state),
        lambda: load_state(trainer, missing),
        lambda: load_state(sharded, state),
        lambda: whole_state(sharded),
    ):
        with pytest.raises(UserError) as refused:
            act()
        said.append(str(refused.value))
    assert all(torch.equal(each[0], before[name][0]) for name, each in more.weights().items()), "nothing was changed"
    return said


def test_masters_of_half_precision_move_too(written):
    ranks.run(masters_case, 2, folder=str(written[0]))


def test_what_cannot_be_moved_is_refused(written):
    for said in ranks.run(refusals_case, 2, folder=str(written[0])):
        assert said == [
            "blocks.0.feed_forward.router.weight has shape (4, 32) in the state, and (8, 32) in the model",
            "the state has no final_norm.weight: it belongs to another model",
            *["ZeRO stage 3 has no parameter whole on any rank: move a state with --zero 0, 1 or 2"] * 2,
        ]
