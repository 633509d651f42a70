"""Parts of the proof of checkpoints: layouts by name, runs that are written, uninterrupted and resumed, and
runs that go on from what others wrote."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cs336_systems.checkpoint.disk import RefusedError, step_name
from cs336_systems.checkpoint.folder import open_checkpoint, open_plain, save
from cs336_systems.checkpoint.tensors import VALUE, Box, Checkpoint
from cs336_systems.train.batches import make_batches
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_state import RunState
from tests.support import expert_cases, layout_cases
from tests.support.layout_cases import WIGGLE, Watched, amplification, relative, wide
from tests.support.layout_table import COMMON, MODELS

FIRST = 2  # steps until a checkpoint
ROUTED = {"num_experts": 4, "expert_every": 1, "aux_weight": 0.5, "batch_size": expert_cases.BATCH}
EXPERTS = {**ROUTED, **expert_cases.MIXTURES["shared"]}
FAMILIES = {  # of runs that learn the same, and may go on from each other's checkpoints; twelve rows suit three ranks
    "gpt": {**MODELS["gpt"], "num_layers": 2, "batch_size": 12},
    "llama": {**MODELS["llama"], "num_layers": 2, "batch_size": 4},
    "llama4": {**MODELS["llama"], "num_layers": 4, "batch_size": 4},  # two chunks a stage
    "bert": {**MODELS["bert"], "num_layers": 1, "batch_size": 12, "dropout": 0.1},
    "experts": {**MODELS["llama"], "num_layers": 1, **EXPERTS},
    "experts2": {**MODELS["llama"], "num_layers": 2, **EXPERTS},  # a layer a stage
    "random": {**MODELS["gpt"], "num_layers": 1, **ROUTED, **expert_cases.MIXTURES["random"]},
    "bf16": {**MODELS["gpt"], "num_layers": 1, "batch_size": 12, "precision": "bf16"},
    "fp16": {**MODELS["llama"], "num_layers": 1, **EXPERTS, "batch_size": 4, "precision": "fp16", "loss_scale": 64.0},
}
LAYOUTS = {  # each goes on from the one after it, the last from the first
    "gpt": (
        *("gpt", "gpt dp2 zero2", "gpt tp2 pp2", "gpt dp3 zero2", "gpt pp2", "gpt dp2 zero3", "gpt pp2 dp2 zero1"),
        *("gpt tp2", "gpt pp2 gpipe", "gpt dp2 zero1", "gpt tp2 dp2 zero2", "gpt dp2"),
    ),
    "llama": ("llama", "llama pp2 zb", "llama cp2 zero2", "llama tp2 sequence padded600"),  # rank 1 has no words
    "llama4": ("llama4 pp2 chunks2", "llama4 pp2 zbv"),
    "bert": ("bert dp3 zero3", "bert tp2 dp2 sequence zero3", "bert dp2 segments", "bert"),
    "experts": ("experts ep2 zero2", "experts", "experts ep2 dp2 zero1", "experts ep2 zero3", "experts tp2 ep2"),
    "experts2": ("experts2 pp2 ep2", "experts2 ep2"),
    "random": ("random ep2", "random dp2 zero1"),
    "bf16": ("bf16 dp2 zero2", "bf16", "bf16 tp2 zero3"),
    "fp16": ("fp16 ep2 zero1", "fp16"),
}
# Options whose value is a word.
CHOICES = {"gpipe": "schedule", "zb": "schedule", "zbv": "schedule", "segments": "recompute"}
WORDS = {"zb": "zb-h1"}
ALL = tuple(layout for layouts in LAYOUTS.values() for layout in layouts)


def settings(layout: str) -> dict[str, int]:
    """The options in a layout's name."""
    pairs = (re.fullmatch(r"([a-z]+)(\d*)", word).groups() for word in layout.split()[1:])
    return {name: int(number or 1) for name, number in pairs}


def ranks_of(layout: str) -> int:
    return math.prod(number for name, number in settings(layout).items() if name in ("tp", "pp", "ep", "cp", "dp"))


def source(layout: str) -> str:
    """The layout from whose checkpoint another goes on."""
    family = LAYOUTS[layout.split()[0]]
    return family[(family.index(layout) + 1) % len(family)]


def recipe_of(layout: str, folder: str, **changes: object) -> Recipe:
    given = settings(layout)
    chosen = COMMON | FAMILIES[layout.split()[0]] | {"data": (f"{folder}/text",), "steps": FIRST + 1}
    chosen |= {"sequence_parallel": bool(given.pop("sequence", 0))}
    chosen |= {option: WORDS.get(word, word) for word, option in CHOICES.items() if given.pop(word, 0)}
    chosen |= {"pad_vocabulary": given.pop("padded", chosen["pad_vocabulary"])} | given
    if "num_experts" in chosen:
        chosen["micro_batch_size"] = expert_cases.GROUP  # rows that are routed together
    elif "pp" in given:
        chosen["micro_batch_size"] = chosen["batch_size"] // 2
    return Recipe.of(**chosen | changes)


def trainer_of(layout: str, folder: str, **changes: object) -> Watched:
    """In float64, but for half precision."""
    wide()
    if layout.startswith(("bf16", "fp16")):
        torch.set_default_dtype(torch.float32)
    return Watched(recipe_of(layout, folder, **changes))


def rounding(family: str) -> float:
    cases = expert_cases if "num_experts" in FAMILIES[family] else layout_cases
    return cases.rounding(FAMILIES[family]["num_layers"])


def amplification_case(group, folder: str) -> dict[str, float]:
    """How much more what is learned changes than the weights it begins with, of every family in float64."""
    wide()
    found = {}
    for family in ("gpt", "llama", "llama4", "bert", "experts", "experts2", "random"):
        recipe = recipe_of(family, folder)
        feed = make_batches(recipe, recipe.data.batch_size, group)

        def learn(wiggle: float, family=family, recipe=recipe, feed=feed) -> dict:
            if "num_experts" in FAMILIES[family]:
                return expert_cases.one_process(recipe, feed, 1, wiggle, recipe.run.steps)
            return layout_cases.one_process(recipe, feed, wiggle)

        found[family] = amplification(learn(0.0), learn(WIGGLE))
    return found


def step_of(trainer: Watched, number: int) -> torch.Tensor:
    """A step's losses and the norm of its gradient."""
    step = trainer.step(number)
    return torch.tensor([*trainer.mean_losses([step]), float(step.norm)], dtype=torch.float64)


def write(trainer: Watched, folder: Path, step: int, group) -> Path:
    return save(folder, step, *RunState(trainer).pieces(), {"step": step}, group)


def write_case(group, folder: str, layouts: list[str]) -> None:
    """Two steps, a checkpoint, and a third step, undisturbed; then the third once more, from the checkpoint: it has the
    same bits, and nothing of the first one is left. `read_case` has runs that have taken no step before."""
    for layout in layouts:
        trainer = trainer_of(layout, folder)
        for number in range(FIRST):
            trainer.step(number)
        checkpoint = open_checkpoint(write(trainer, Path(folder, layout), FIRST, group), group)
        kept = {"place": trainer.mesh.place, "parameters": trainer.weights()}
        figures = step_of(trainer, FIRST)
        after = open_checkpoint(write(trainer, Path(folder, layout), FIRST + 1, group), group)
        torch.save(kept | {"figures": figures}, Path(folder, f"{layout}.{group.rank()}"))

        state = RunState(trainer)
        state.restore(checkpoint)
        assert torch.equal(step_of(trainer, FIRST), figures), layout
        assert set(distances(state, after).values()) <= {0.0}, layout


def require_same(one: Checkpoint, other: Checkpoint, rank: int = 0, ranks: int = 1) -> None:
    """Raises AssertionError unless every kind of every tensor is equal to the bit; this rank looks at some of them."""
    assert one.scalars == other.scalars
    assert one.tensors.keys() == other.tensors.keys()
    for name in sorted(one.tensors)[rank::ranks]:
        assert one.tensors[name].keys() == other.tensors[name].keys()
        for kind, entry in one.tensors[name].items():
            mine, theirs = whole(one, name, kind), whole(other, name, kind)
            assert entry.dtype == other.tensors[name][kind].dtype, (name, kind)
            assert torch.equal(mine, theirs), (name, kind)


def whole(source: Checkpoint, name: str, kind: str = VALUE) -> torch.Tensor:
    return source.read(name, kind, Box.whole(source.tensors[name][kind].shape))


def read_case(group, folder: str, layouts: list[str], allowed: dict[str, float]) -> list[float]:
    """Every layout goes on from another's checkpoint: the share of the tolerance that this took."""
    taken = []
    for layout in layouts:
        trainer, giver = trainer_of(layout, folder), source(layout)
        state = RunState(trainer)
        checkpoint = open_checkpoint(Path(folder, giver, step_name(FIRST)), group)
        state.check(checkpoint)
        state.restore(checkpoint)
        again = write(trainer, Path(folder, f"{layout} from another"), FIRST, group)
        require_same(open_checkpoint(again, group), checkpoint, group.rank(), group.size())
        figures = step_of(trainer, FIRST)
        found = distances(state, open_checkpoint(Path(folder, giver, step_name(FIRST + 1)), group))
        if layout.split()[0] in allowed:  # half precision has no tolerance that would say much
            want = torch.load(Path(folder, f"{giver}.0"), weights_only=False)["figures"]
            found["losses and norm"] = relative(figures, want, want)
            most = allowed[layout.split()[0]]
            assert not {name: each for name, each in found.items() if not each <= most}, (layout, giver, most)
            taken.append(max(found.values()) / most)
    return taken


def distances(state: RunState, after: Checkpoint) -> dict[str, float]:
    """The error of each piece that this rank would write, relative to the whole tensor's size; for a bias of the keys
    see `layout_cases.errors`. That of a square is twice its root's. Scalars must be equal."""
    pieces, scalars = state.pieces()
    assert after.scalars.items() >= scalars.items()
    found = {}
    for each in pieces:
        want = after.read(each.name, each.kind, each.box).reshape(-1)[each.first : each.first + each.tensor.numel()]
        scale = whole(after, each.name.replace("key.bias", "key.weight"), each.kind)
        found[each.key] = relative(each.tensor, want, scale) / (2 if each.kind == "exp_avg_sq" else 1)
    return found


def fresh_case(group, folder: str, layout: str) -> None:
    """A run that has taken no step has no optimizer's state, nor has one that goes on from there. The same with a
    single parameter that has had no gradient yet."""
    trainer = trainer_of(layout, folder)
    before = write(trainer, Path(folder, "fresh"), 0, group)
    checkpoint = open_checkpoint(before, group)
    assert all(kinds.keys() == {VALUE} for kinds in checkpoint.tensors.values())
    assert not checkpoint.scalars
    trainer.step(0)
    state = RunState(trainer)
    alone = "embedding.positions.weight"
    for slot in state.slots():
        if slot.name == alone:
            slot.state.pop(slot.key, None)
    partly = open_checkpoint(write(trainer, Path(folder, "partly"), 1, group), group)
    assert [name for name, kinds in partly.tensors.items() if kinds.keys() == {VALUE}] == [alone]
    assert partly.scalars.keys() == partly.tensors.keys() - {alone}
    trainer.step(1)
    for source, name in ((partly, "partly again"), (checkpoint, "fresh again")):
        state.restore(source)
        require_same(open_checkpoint(write(trainer, Path(folder, name), 0, group), group), source)
    steppers = [(each, group["params"]) for each in trainer.part.optimizers for group in each.param_groups]
    assert not any(each.state.get(p) for each, parameters in steppers for p in parameters)


def plain_case(group, folder: str, file: str, layout: str) -> None:
    """A run that has taken a step begins anew from a file of parameters, and from one in fp32 that is rounded."""
    mine = Path(folder, f"{layout}.{group.rank()}.safetensors")
    plain, trainer = open_plain(Path(file)), trainer_of(layout, folder)
    save_file({name: whole(plain, name).float() * 1.001 for name in plain.tensors}, mine)
    state = RunState(trainer)
    trainer.step(0)
    for number, source in enumerate((plain, open_plain(mine))):
        if source is not plain:
            with pytest.raises(RefusedError, match=" is F32 there, and "):
                state.check(source)
        state.check(source, cast=source is not plain)
        state.restore(source)
        got = open_checkpoint(write(trainer, Path(folder, f"{layout} from a file"), number, group), group)
        assert not got.scalars
        assert got.tensors.keys() == source.tensors.keys()
        for name, kinds in got.tensors.items():
            assert kinds.keys() == {VALUE}
            assert torch.equal(whole(got, name), whole(source, name).to(whole(plain, name).dtype))
        assert torch.isfinite(trainer.step(0).norm)
