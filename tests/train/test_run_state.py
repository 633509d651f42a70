"""A run's state goes from one layout into another through a checkpoint: its bits stay the same, and training goes on,
exactly as before in the same layout and within rounding in another."""

import json
import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.checkpoint.disk import RefusedError, step_name
from cs336_systems.checkpoint.folder import export_plain, open_checkpoint, to_text
from cs336_systems.checkpoint.tensors import VALUE, Checkpoint
from cs336_systems.errors import UserError
from cs336_systems.train.run_folder import RunCheckpoints
from cs336_systems.train.run_state import RunState
from tests.support import ranks
from tests.support.garble import inner, places
from tests.support.layout_cases import assemble, load, write_text
from tests.support.state_cases import (
    ALL,
    FIRST,
    amplification_case,
    fresh_case,
    plain_case,
    ranks_of,
    read_case,
    rounding,
    source,
    trainer_of,
    whole,
    write_case,
)

WORLDS = (1, 2, 3, 4)
BY_WORLD = {world: [layout for layout in ALL if ranks_of(layout) == world] for world in WORLDS}


class Proof:
    """Runs what a test needs, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()
        write_text(folder)

    def written(self, layouts: Iterable[str]) -> None:
        """Leave the checkpoints of these layouts in the folder."""
        missing = sorted({*layouts} - self.done)
        for world in {ranks_of(layout) for layout in missing}:
            together = [layout for layout in missing if ranks_of(layout) == world]
            ranks.run(write_case, world, folder=str(self.folder), layouts=together)
        self.done.update(missing)

    def checkpoint(self, layout: str, step: int = FIRST) -> Checkpoint:
        self.written([layout])
        return open_checkpoint(self.folder / layout / step_name(step))


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Proof(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_goes_on_with_the_same_bits_and_its_checkpoint_has_what_its_ranks_have(proof, world):
    proof.written(BY_WORLD[world])
    for layout in BY_WORLD[world]:
        checkpoint = proof.checkpoint(layout)
        records = [load(proof.folder / f"{layout}.{rank}") for rank in range(world)]
        shapes = {name: torch.Size(kinds[VALUE].shape) for name, kinds in checkpoint.tensors.items()}
        gathered = assemble(records, lambda record: record["parameters"], shapes)
        assert gathered.keys() == checkpoint.tensors.keys()
        for name, tensor in gathered.items():
            assert torch.equal(whole(checkpoint, name), tensor), (layout, name)
            kinds = {VALUE, "exp_avg", "exp_avg_sq"} | ({"master"} if layout.startswith(("bf16", "fp16")) else set())
            assert checkpoint.tensors[name].keys() == kinds
            assert checkpoint.scalars[name] == {"step": FIRST}


@pytest.fixture(scope="module")
def allowed(proof):
    """Bound of the rounding for each family."""
    found = ranks.run(amplification_case, 1, folder=str(proof.folder))[0]
    bounds = {family: amplification * rounding(family) for family, amplification in found.items()}
    assert all(bound < 1e-8 for bound in bounds.values())
    return bounds


@pytest.mark.parametrize("world", WORLDS)
def test_other_layouts_read_the_same_bits_and_learn_the_same(proof, allowed, world):
    layouts = BY_WORLD[world]
    proof.written(source(layout) for layout in layouts)
    taken = ranks.run(read_case, world, folder=str(proof.folder), layouts=layouts, allowed=allowed)
    assert len(taken[0]) == sum(layout.split()[0] in allowed for layout in layouts)


@pytest.mark.parametrize("layout", ["gpt dp2 zero3", "gpt pp2 zero1"])
def test_a_parameter_without_a_step_has_no_state(tmp_path, layout):
    write_text(tmp_path)
    ranks.run(fresh_case, 2, folder=str(tmp_path), layout=layout)


@pytest.mark.parametrize("layout", ["gpt tp2", "bf16 dp2 zero2"])
def test_a_file_of_parameters_fits_every_layout(proof, layout):
    giver = "bf16" if layout.startswith("bf16") else "gpt"
    path = proof.folder / f"{giver}.safetensors"
    if not path.exists():
        export_plain(proof.checkpoint(giver), path)
    ranks.run(plain_case, 2, folder=str(proof.folder), file=str(path), layout=layout)


def changed(checkpoint: Checkpoint, name: str, **kinds: object) -> Checkpoint:
    """With other kinds of a parameter, or without it if there are none; a value alone has no scalars either."""
    tensors = {key: each for key, each in checkpoint.tensors.items() if key != name} | ({name: kinds} if kinds else {})
    scalars = {key: each for key, each in checkpoint.scalars.items() if key != name or len(kinds) > 1}
    return replace(checkpoint, tensors=tensors, scalars=scalars)


def counted(checkpoint: Checkpoint, name: str, **scalars: object) -> Checkpoint:
    """With other scalars of a parameter."""
    return replace(checkpoint, scalars=checkpoint.scalars | {name: scalars})


def said_of(state: RunState, checkpoint: Checkpoint, cast: bool) -> str:
    """The reason why a checkpoint is refused; "" if it is not."""
    try:
        state.check(checkpoint, cast)
    except RefusedError as error:
        return str(error)
    return ""


def misfits_case(group, folder: str) -> None:
    """Checkpoints that do not fit are refused with the first misfit."""
    state = RunState(trainer_of("gpt", folder))
    good = open_checkpoint(Path(folder, "gpt", step_name(FIRST)))
    positions, norm, total = "embedding.positions.weight", "final_norm.weight", len(good.tensors)
    value, moment = good.tensors[norm][VALUE], good.tensors[norm]["exp_avg"]
    narrow, number, other = value._replace(dtype="F32"), value._replace(dtype="I64"), good.tensors[positions]["exp_avg"]
    moments = {"value": value, "exp_avg": moment}
    wider = f"{norm} is F32 there, and F64 in the model"
    lacks = f"the optimizer's state of {norm} is {{}} there, and ['exp_avg', 'exp_avg_sq', 'step'] here".format
    for cast, checkpoint, said in (
        (False, changed(changed(good, norm), positions), f"it has no {positions}, and lacks 2 of the model's {total} "),
        (False, changed(good, "head.weight", value=value), "the model has no head.weight, nor 1 of the "),
        (False, changed(good, norm, exp_avg=moment), f"it has no value of {norm}"),
        (False, changed(good, positions, value=value), f"{positions} (value) has shape [16] there, and [8, 16] in the"),
        (False, changed(good, norm, value=value, exp_avg=other), f"{norm} (exp_avg) has shape [8, 16] there, and [16]"),
        (False, changed(good, norm, value=narrow), wider),
        (True, changed(good, norm, value=narrow, exp_avg=moment), wider),
        (True, changed(good, norm, value=number), f"{norm} is I64 there, and F64 in the model"),
        (True, changed(good, norm, value=narrow), ""),
        (False, changed(good, "random/rank 0", torch=moment), ""),
        (False, changed(good, norm, **moments), lacks(["exp_avg", "step"])),
        (
            False,
            changed(good, norm, value=value, exp_avg=moment._replace(dtype="F32"), exp_avg_sq=moment),
            f"{norm} (exp_avg) is F32 there, and F64 in the optimizer",
        ),
        (False, counted(good, norm), lacks(["exp_avg", "exp_avg_sq"])),
        (False, counted(good, norm, step=3), f"{norm} has the step 3 there, after step 2"),
        (False, counted(good, norm, step=1.0), f"{norm} has the step 1.0 there, after step 2"),
    ):
        got = said_of(state, checkpoint, cast)
        assert got.startswith(said) if said else not got, got
    eight = RunState(trainer_of("experts", folder, num_experts=8))
    four = open_checkpoint(Path(folder, "experts", step_name(FIRST)))
    assert said_of(eight, four, False).endswith(
        "router.weight (value) has shape [4, 32] there, and [8, 32] in the model"
    )


def test_what_does_not_fit_is_named(proof):
    proof.written(["gpt", "experts"])
    ranks.run(misfits_case, 1, folder=str(proof.folder))


def damages_case(group, folder: str) -> list[str]:
    """Messages about checkpoints with one entry of the manifest changed or gone, and a new checksum. What is
    taken up all the same must leave the state as it was."""
    trainer = trainer_of("gpt", folder, out=Path(folder), num_layers=1)
    trainer.step(0)
    told: list[str] = []
    checkpoints = RunCheckpoints(trainer, told.append)
    checkpoints.save(1)
    path, draw, said = Path(folder, "checkpoints", step_name(1), "manifest.json"), random.Random(0), []
    good = json.loads(path.read_bytes())["manifest"]
    wanted = [each.tensor.clone() for each in checkpoints.state.pieces()[0]], (0, trainer.scaler.state_dict())
    values = (None, "x", [], {}, -1, 0.5, True, 10**400, [1], {"x": 1})
    # All that can be wrong with what the trainer counts, and with much else by chance.
    counts = len(list(places(good["state"]["trainer"]))) * len(values)
    for number in range(counts + 120):
        body = deepcopy(good)
        part = body["state"]["trainer"] if number < counts else draw.choice((body, body["state"]))
        found = list(places(part))
        *above, key = found[number // len(values)] if number < counts else draw.choice(found)
        owner = inner(part, above)
        owner[key] = values[number % len(values)] if number < counts else draw.choice(values)
        if number >= counts and number % 3 == 0:
            del owner[key]
        path.write_bytes(to_text(body))
        try:
            checkpoints.restore()
        except UserError as error:
            said.append(str(error))
        else:
            assert (trainer.skipped, trainer.scaler.state_dict()) == wanted[1], (number, key)
            assert all(torch.equal(a.tensor, b) for a, b in zip(checkpoints.state.pieces()[0], wanted[0], strict=True))
    for key in ("backend", "layout"):  # which are only said
        body = deepcopy(good)
        del body["state"]["computed"][key]
        path.write_bytes(to_text(body))
        checkpoints.restore()
    assert told[-1].endswith("after step 1, equal but for rounding (layout not recorded -> 1 rank)")
    path.write_bytes(to_text(good))
    checkpoint = open_checkpoint(path.parent)
    bare = {name: {VALUE: kinds[VALUE]} for name, kinds in checkpoint.tensors.items() if VALUE in kinds}
    with pytest.raises(RefusedError, match=r"^it has no optimizer's state, after 1 updates$"):
        checkpoints._check(replace(checkpoint, tensors=bare, scalars={}))
    spoilt = changed(checkpoint, "random/rank 0", torch=bare["final_norm.weight"][VALUE])
    with pytest.raises(RefusedError, match=r"^the random number generators of rank 0 cannot be set: "):
        checkpoints._check(spoilt)
    checkpoints._check(checkpoint)
    return said


def test_whatever_a_signed_manifest_says_is_refused_or_changes_nothing(tmp_path):
    write_text(tmp_path)
    (said,) = ranks.run(damages_case, 1, folder=str(tmp_path))
    assert len(said) > 40, "many changes are refused"
    assert all("\n" not in each for each in said)
