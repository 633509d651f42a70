"""A run's folder: its lock, its checkpoints, and the settings that must be equal for a run to go on there."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from cs336_systems.checkpoint import RANDOM, VALUE, Checkpoint, Saver, clean, list_checkpoints, locked
from cs336_systems.checkpoint.disk import make_folder
from cs336_systems.checkpoint.load import open_newest, open_plain
from cs336_systems.comm import Group, agree
from cs336_systems.comm.flight_recorder import born
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag
from cs336_systems.host.machine import device_name
from cs336_systems.train.options import OptimizerOptions
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_state import RunState, random_pieces, random_problem, restore_random
from cs336_systems.train.trainer import Trainer

# How a model is computed may change, what it is may not.
IMPLEMENTATION = ("attention", "kernels", "recompute", "recompute_every")
BERT_DATA = ("mask_prob", "short_seq_prob", "split")


@contextmanager
def run_folder(recipe: Recipe, group: Group, restarted: bool = False) -> Iterator[bool]:
    """Lock the run's folder, if it has one; yields True if the run is to resume from a checkpoint. Every rank enters.

    Ranks that were `restarted` resume without --resume if the same launcher began the run. Raises UserError, on every
    rank, for a folder that is in use or cannot be written, and for one with checkpoints unless the run is to resume.
    """
    with ExitStack() as stack:
        problem, resume = "", recipe.run.resume
        if recipe.run.out is not None and group.rank() == 0:
            try:
                lock, parent = stack.enter_context(locked(recipe.run.out)), os.getppid()
                launcher = f"started by {parent} of {born(parent)}"  # a number alone may come again
                resume |= restarted and lock.before.endswith(launcher)
                make_folder(recipe.run.checkpoints)  # what stands in the way is better known now than at the first save
                clean(recipe.run.checkpoints)
                if (found := list_checkpoints(recipe.run.checkpoints)) and not resume:
                    advice = "go on from it with --resume, or name another folder with --out DIR"
                    raise UserError(f"{recipe.run.out} holds a run with a checkpoint {found[-1].name}: {advice}")
                lock.sign(f"process {os.getpid()}, {launcher}")
            except UserError as error:
                problem = str(error)
            except OSError as error:  # whatever it is, the others wait for a word
                where = error.filename or recipe.run.out
                problem = f"cannot use {where}: {error.strerror}; name another folder with --out DIR"
        problem, _, decided = agree("run folder", f"{problem}\n{resume}", group)[0].rpartition("\n")
        if problem:
            raise UserError(problem)
        yield decided == "True"


def identity(trainer: Trainer) -> dict[str, Any]:
    """Settings and facts that decide what is learned, in any layout, by the name that a message gives them."""
    recipe, shape = trainer.recipe, asdict(trainer.config)
    facts: dict[str, Any] = {f"the model's {name}": shape[name] for name in shape if name not in IMPLEMENTATION}
    facts |= {"--seed": recipe.run.seed, "--batch-size": trainer.batch, "--context": trainer.seq}
    facts |= {"--precision": recipe.model.precision, "the text's SHA-256": trainer.batches.sha256}
    return facts | ({flag(name): getattr(recipe.data, name) for name in BERT_DATA} if recipe.model.is_bert else {})


def computed(trainer: Trainer) -> dict[str, Any]:
    """Settings that change only the rounding: layout and implementation, by the name that a message gives them."""
    parallel, config, device = trainer.recipe.parallel, asdict(trainer.config), trainer.device
    found: dict[str, Any] = {"layout": str(trainer.mesh) or "1 rank", "--zero": parallel.zero}
    found |= {"--micro-batch-size": trainer.micro_batch, "--chunks": parallel.chunks}
    found |= {"--schedule": parallel.schedule_name, "--sequence-parallel": parallel.sequence_parallel}
    found |= {"--pad-vocabulary": parallel.pad_vocabulary} | {name: config[name] for name in IMPLEMENTATION}
    found["backend"] = trainer.recipe.launch.backend or ("nccl" if device.type == "cuda" else "gloo")
    return found | {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}


def state_problem(checkpoint: Checkpoint) -> str:
    """The reason why a checkpoint's JSON state is not one that `RunCheckpoints.save` writes; "" if it is."""
    state, step = checkpoint.state, checkpoint.step
    for name in ("identity", "trainer", "recipe", "computed"):
        if not isinstance(state.get(name), dict):
            return f"it does not say what run it is of: its state has no {name}"
    skipped, scaler = (state["trainer"].get(name) for name in ("skipped", "scaler"))
    amounts = isinstance(scaler, dict) and all(
        type(each) in (int, float) and 0 <= each < 1e300 for each in scaler.values()
    )
    if type(skipped) is not int or not 0 <= skipped <= step or not amounts:
        return f"its state has a trainer of {str(state['trainer'])[:80]} after {step} steps"
    if not scaler.get("scale", 1):
        return "it has a loss scale of 0"
    parameters = [kinds for name, kinds in checkpoint.tensors.items() if not name.startswith(RANDOM)]
    if skipped < step and all(kinds.keys() == {VALUE} for kinds in parameters):
        return f"it has no optimizer's state, after {step - skipped} updates"
    return ""


class RunCheckpoints:
    """Saves a trainer's run to its folder, and restores the newest checkpoint there. `say` prints a line for people.
    Every rank must construct it and call its methods."""

    def __init__(self, trainer: Trainer, say: Callable[[str], object]) -> None:
        run = trainer.recipe.run
        self.trainer, self.say, self.world = trainer, say, trainer.mesh.world
        self.folder, self.state = run.checkpoints, RunState(trainer)
        self.saver = Saver(self.folder, self.world, run.keep, run.background_save)

    def save(self, step: int) -> None:
        """Save the state after so many steps, or begin to, with --background-save: `saver.finish` waits for it. Raises
        SaveError, of an earlier save as well."""
        trainer, (pieces, scalars) = self.trainer, self.state.pieces()
        random, more = random_pieces(self.world.rank(), trainer.device)
        state: dict[str, Any] = {"identity": identity(trainer), "computed": computed(trainer)}
        state["trainer"] = trainer.state()
        state |= {"recipe": trainer.recipe.to_json(), "mesh": trainer.mesh.sizes, "world_size": self.world.size()}
        self.saver.start(step, pieces + random, scalars | more, state)

    def restore(self) -> int:
        """Go on from the newest checkpoint that is whole: the number of steps done, 0 without any checkpoint. Raises
        UserError for a run with another model, text, seed or batch, and if every checkpoint is refused."""
        checkpoint = open_newest(self.folder, self.world, self._problem, self.say)
        if checkpoint is None:
            return 0
        self.state.restore(checkpoint)
        saved = checkpoint.state["trainer"]
        if saved["scaler"].keys() != (mine := self.trainer.state()["scaler"]).keys():
            # --loss-scale has made a constant of what was found by trial, or undone it.
            saved = saved | {"scaler": mine}
        self.trainer.scaler.load_state_dict(saved["scaler"])
        self.trainer.skipped = int(saved["skipped"])  # not how many in a row: what follows may be done otherwise
        restore_random(checkpoint, self.world.rank(), self.trainer.device)
        self._introduce(checkpoint)
        return checkpoint.step

    def _problem(self, checkpoint: Checkpoint) -> str:
        """The reason why a checkpoint cannot be used; "" if it can. Raises UserError, on every rank, for one of another
        run: an older checkpoint there would be, too."""
        if problem := state_problem(checkpoint):
            return problem
        differing = _differing(checkpoint.state["identity"], identity(self.trainer), "{} was {} there and is {}")
        if problem := next(filter(None, agree("which run this is", "".join(differing[:1]), self.world)), ""):
            advice = "resume with what it began with, or name another folder with --out DIR"
            raise UserError(f"{self.folder.parent} holds another run: {problem} now; {advice}")
        random = random_problem(checkpoint, self.world.rank(), self.trainer.device)
        return self.state.problem(checkpoint) or random

    def _introduce(self, checkpoint: Checkpoint) -> None:
        """Say where the run goes on, whether exactly, and which settings have changed."""
        saved = checkpoint.state
        other = _differing(saved["computed"], computed(self.trainer), "{} {} -> {}")
        exactly = f"equal but for rounding ({', '.join(other)})" if other else "bit for bit"
        names, now = [each.name for each in fields(OptimizerOptions)], self.trainer.recipe.to_json()
        then, now = ({flag(name): of.get(name) for name in names} for of in (saved["recipe"], now))
        if changed := _differing(then, now, "{} {} -> {}"):  # what was learned so far is the same, what will be is not
            exactly = f"the state {exactly}; from here on with {', '.join(changed)}"
        self.say(f"resumed {checkpoint.folder} after {checkpoint.step} steps, {exactly}")


def _differing(saved: dict[str, Any], mine: dict[str, Any], text: str) -> list[str]:
    """The text with the name and both values of each setting that is another one now."""
    now = json.loads(json.dumps(mine, allow_nan=False))  # as from a file: a tuple becomes a list
    return [text.format(name, saved.get(name), now[name]) for name in now if saved.get(name) != now[name]]


def load_weights(trainer: Trainer, path: Path) -> None:
    """Begin with the parameters of a plain safetensors file. Every rank must call this. Raises UserError, on each, for
    those of another model, of which one stage alone may know."""
    state = RunState(trainer)
    try:
        source = open_plain(path)
        problem = state.problem(source, cast=True)
        said = f"{path} does not fit the model: {problem}" if problem else ""
    except UserError as error:
        said = str(error)
    if problem := next(filter(None, agree("weights", said, trainer.mesh.world)), ""):
        raise UserError(problem)
    state.restore(source)
