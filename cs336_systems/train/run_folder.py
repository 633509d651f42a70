"""A run's folder: its lock, its checkpoints, and the settings that must be equal to resume a run there."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cs336_systems.checkpoint import disk
from cs336_systems.checkpoint.disk import RefusedError, require
from cs336_systems.checkpoint.folder import Saver, open_newest, open_plain
from cs336_systems.checkpoint.tensors import VALUE, Checkpoint
from cs336_systems.comm import Group, backend_of
from cs336_systems.comm.flight_recorder import process
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag, os_errors
from cs336_systems.host.machine import device_name
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_state import RunState, random_pieces, restore_random
from cs336_systems.train.trainer import Trainer

# Settings of the model's configuration that a resumed run may change: they change rounding only.
IMPLEMENTATION = ("attention", "kernels", "recompute", "recompute_every")
ROUTED = "rows routed together"
BERT_DATA = ("mask_prob", "short_seq_prob", "split")
BOUNDARIES = "the SHA-256 of the text's sentences"


@contextmanager
def run_folder(recipe: Recipe, group: Group, restarted: bool = False) -> Iterator[bool]:
    """Lock the run's folder, if it has one; yields True if the run must resume from a checkpoint. Every rank enters.
    Ranks that were `restarted` resume without --resume if the same launcher began the run. Raises UserError, on every
    rank, for a folder that is in use or cannot be written, and for one with checkpoints unless the run resumes."""
    out, checkpoints = recipe.run.out, recipe.run.checkpoints

    def enter() -> bool:
        if out is None:
            return recipe.run.resume
        lock, parent = held.enter_context(disk.locked(out)), os.getppid()
        launcher = f"started by {parent} of {process(parent)[1]}"  # process numbers are reused
        resume = recipe.run.resume or (restarted and lock.read().strip().endswith(launcher))
        with os_errors(f"use {checkpoints}", other := "name another folder with --out DIR"):
            disk.make_folder(checkpoints)  # now, so that a problem shows before the first save
            disk.clean(checkpoints)
            if (found := disk.list_checkpoints(checkpoints)) and not resume:
                problem = f"{out} holds a run with a checkpoint {found[-1].name}: go on from it with --resume"
                raise UserError(f"{problem}, or {other}")
            lock.seek(0)
            lock.truncate()
            print(f"process {os.getpid()}, {launcher}", file=lock, flush=True)
        return resume

    with ExitStack() as held:
        yield disk.on_rank_0("run folder", enter, checkpoints, group)


def identity(trainer: Trainer) -> dict[str, Any]:
    """Settings and facts that determine the trained weights, in any layout, by their names in messages."""
    recipe, shape = trainer.recipe, asdict(trainer.config)
    facts: dict[str, Any] = {f"the model's {name}": shape[name] for name in shape if name not in IMPLEMENTATION}
    facts |= {"--seed": recipe.run.seed, "--batch-size": trainer.batch, "--context": trainer.seq}
    facts |= {"--precision": recipe.model.precision, "the text's SHA-256": trainer.batches.sha256}
    facts["--pack"] = recipe.data.pack
    of_bert = {flag(name): getattr(recipe.data, name) for name in BERT_DATA} | {BOUNDARIES: trainer.batches.boundaries}
    return facts | (of_bert if recipe.model.is_bert else {})


def computed(trainer: Trainer) -> dict[str, Any]:
    """Settings that change only the rounding (layout and implementation), by their names in messages."""
    parallel, device = trainer.recipe.parallel, trainer.device
    found: dict[str, Any] = {"layout": str(trainer.mesh) or "1 rank", "--zero": parallel.zero}
    found |= {"--micro-batch-size": trainer.micro_batch, "--chunks": parallel.chunks}
    found |= {"--schedule": parallel.schedule_name, "--sequence-parallel": parallel.sequence_parallel}
    found |= {"--pad-vocabulary": parallel.pad_vocabulary, ROUTED: routed_together(trainer)}
    found |= {name: getattr(trainer.config, name) for name in IMPLEMENTATION}
    found["backend"] = backend_of(trainer.mesh.world)
    return found | {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}


def routed_together(trainer: Trainer) -> str:
    """Describe the rows over which expert layers balance or share a capacity; empty if training does not depend on it.
    With context parallelism each rank routes its own part of a sequence."""
    mixture, rows, ranks = trainer.config.mixture, trainer.micro_batch, trainer.data_rank[1]
    split = f" / {trainer.mesh.cp.size()}" if trainer.mesh.cp.size() > 1 else ""
    if not trainer.config.num_experts or not (mixture.aux_weight or mixture.capacity_factor):
        return ""
    if mixture.aux_scope == "local" or not mixture.aux_weight:
        return f"{rows}{split}"
    balanced = "all" if rows * ranks == trainer.batch else f"{rows} of each of {ranks} ranks"
    return f"{balanced}, {rows}{split} to a capacity" if mixture.capacity_factor else balanced


def check_state(checkpoint: Checkpoint) -> None:
    """Raises RefusedError unless a checkpoint's JSON state has the form that `RunCheckpoints.save` writes."""
    state, step = checkpoint.state, checkpoint.step
    for name in ("identity", "trainer", "recipe", "computed"):
        require(isinstance(state.get(name), dict), f"it does not say what run it is of: its state has no {name}")
    skipped, scaler = (state["trainer"].get(name) for name in ("skipped", "scaler"))
    amounts = isinstance(scaler, dict) and all(type(n) in (int, float) and 0 <= n < 1e300 for n in scaler.values())
    counted = type(skipped) is int and 0 <= skipped <= step and amounts
    require(counted, f"its state has a trainer of {str(state['trainer'])[:80]} after step {step}")
    require(scaler.get("scale", 1), "it has a loss scale of 0")
    parameters = checkpoint.parameters.values()
    stepped = any(kinds.keys() != {VALUE} for kinds in parameters) or not parameters
    require(stepped or skipped == step, f"it has no optimizer's state, after {step - skipped} updates")


class RunCheckpoints:
    """Saves a trainer's run to its folder, and restores the newest checkpoint there. `say` prints a line for people.
    Every rank must construct it and call its methods."""

    def __init__(self, trainer: Trainer, say: Callable[[str], object]) -> None:
        run = trainer.recipe.run
        self.trainer, self.say, self.world = trainer, say, trainer.mesh.world
        self.folder, self.state = run.checkpoints, RunState(trainer)
        self.saver = Saver(self.folder, self.world, run.keep, run.background_save)

    def save(self, step: int) -> None:
        """Save the state after a step, or begin to; `saver.finish` waits. Raises SaveError, also of an earlier save."""
        trainer, (pieces, scalars) = self.trainer, self.state.pieces()
        random, more = random_pieces(self.world.rank(), trainer.device)
        counts = {"skipped": trainer.skipped, "scaler": trainer.scaler.state_dict()}
        state: dict[str, Any] = {"identity": identity(trainer), "computed": computed(trainer), "trainer": counts}
        state |= {"recipe": trainer.recipe.to_json(), "mesh": trainer.mesh.sizes, "world_size": self.world.size()}
        self.saver.start(step, pieces + random, scalars | more, state)

    def restore(self) -> int:
        """Restore the newest checkpoint that is whole; returns the number of steps done, 0 without any checkpoint.
        Raises UserError for a run with another model, text, seed or batch, and if every checkpoint is refused."""
        checkpoint = open_newest(self.folder, self.world, self._check, self.say)
        if checkpoint is None:
            self.say(f"no checkpoint in {self.folder}: this run begins anew")
            return 0
        self.state.restore(checkpoint)
        saved, scaler = checkpoint.state["trainer"], self.trainer.scaler
        # Earlier versions counted overflows. Other keys differ if --loss-scale was added or removed since.
        if saved["scaler"].keys() - {"overflows"} == scaler.state_dict().keys():
            scaler.load_state_dict(saved["scaler"])
        self.trainer.skipped = saved["skipped"]  # but not overflows in a row: settings may have changed
        self._introduce(checkpoint)
        return checkpoint.step

    def _check(self, checkpoint: Checkpoint) -> None:
        """Check a checkpoint, and restore its generators. Raises RefusedError for one that cannot be used, UserError
        for one of another run, since older checkpoints there are of that run, too."""
        check_state(checkpoint)
        mine = identity(self.trainer)
        # Earlier versions had no packing, and did not save where sentences begin.
        saved = {"--pack": False, BOUNDARIES: mine.get(BOUNDARIES)} | checkpoint.state["identity"]
        if differing := _differing(saved, mine, "{} was {} there and is {} now"):
            problem = f"{self.folder.parent} holds another run: {differing[0]}; resume with what it began with"
            raise UserError(f"{problem}, or name another folder with --out DIR")
        self.state.check(checkpoint)
        restore_random(checkpoint, self.world.rank(), self.trainer.device)

    def _introduce(self, checkpoint: Checkpoint) -> None:
        """Report the step at which the run resumes, whether bit for bit, and which settings have changed."""
        then, now = checkpoint.state["computed"], computed(self.trainer)
        routed = now.pop(ROUTED)
        if "1 rank" in (then.get("layout"), now["layout"]):  # one rank sends nothing, so its backend does not matter
            now["backend"] = then.get("backend")
        other = _differing(then, now, "{} {} -> {}")
        exactly = f"equal but for rounding ({', '.join(other)})" if other else "bit for bit"
        before, options = checkpoint.state["recipe"], asdict(self.trainer.recipe.optimizer)
        changed = [flag(each) for each in _differing(before, options, "{} {} -> {}")]
        if then.get(ROUTED, routed) != routed:  # earlier versions did not save it
            keep = "--micro-batch-size and, with --aux-scope global, number of data-parallel ranks"
            changed.append(f"{ROUTED} {then[ROUTED]} -> {routed} (kept by the same {keep})")
        if changed:  # the saved state is the same, but the next steps differ
            exactly = f"the state {exactly}; from here on with {', '.join(changed)}"
        self.say(f"resumed {checkpoint.folder} after step {checkpoint.step}, {exactly}")


def _differing(saved: dict[str, Any], mine: dict[str, Any], text: str) -> list[str]:
    """Fill the text with the name and both values of each setting that has changed, of a group of them too."""
    now, found = json.loads(json.dumps(mine, allow_nan=False)), list[str]()  # as from a file: a tuple becomes a list
    for name, value in now.items():
        if isinstance(value, dict) and isinstance(then := saved.get(name), dict):
            found += _differing(then, value, text)
        elif saved.get(name) != value:
            found.append(text.format(name, saved.get(name, "not recorded"), value))
    return found


def load_weights(trainer: Trainer, path: Path) -> None:
    """Load the parameters of a plain safetensors file. Every rank must call this. Raises UserError, on every rank, if
    they are of another model, even if only one stage notices it."""
    state, opened = RunState(trainer), list[Checkpoint]()

    def check() -> None:
        opened.append(open_plain(path))
        try:
            state.check(opened[0], cast=True)
        except RefusedError as error:
            raise UserError(f"{path} does not fit the model: {error}") from None

    disk.together("weights", check, path, trainer.mesh.world)
    state.restore(opened[0])
