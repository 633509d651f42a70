"""Loop of a training run: steps with log lines, evaluations and checkpoints at intervals, and the end on SIGTERM."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, Self

import torch

from cs336_systems.checkpoint.disk import SaveError
from cs336_systems.comm import Group, agree, stop_step
from cs336_systems.comm.agreement import ranks_text
from cs336_systems.comm.launch import SAME_SIGNAL
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import PeakMemory
from cs336_systems.train.run_folder import RunCheckpoints
from cs336_systems.train.run_log import iteration_line, write_line
from cs336_systems.train.timers import timer_line
from cs336_systems.train.trainer import Step, Trainer

STEPS_AHEAD = 2  # steps by which a host may be ahead of its GPU


class StopSignal:
    """Catches SIGTERM inside the block if `active`, as a scheduler sends it before it takes the machine away. All ranks
    then stop after the same step. Another SIGTERM, a second later or more, ends the process.

    A rank that gets the signal writes the last step into the store, where all ranks look after every step. No rank may
    have passed this step. After step k every rank has taken part in the gradient norm of step k, so none can end step
    k + 1 before this rank begins it: all stop after k + 1. On a GPU the host runs ahead of the norm by at most
    `STEPS_AHEAD` steps, which are added. For a signal before the first step the ranks agree when all are ready."""

    def __init__(self, group: Group, ahead: int = 0, active: bool = True) -> None:
        self.group, self.ahead, self.active = group, ahead, active
        self.told, self.since = False, 0.0

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > SAME_SIGNAL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        self.before = None
        if self.active and threading.current_thread() is threading.main_thread():  # only it may set handlers
            self.before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def after(self, step: int) -> bool:
        """True, on every rank, if the run must stop after this step (the first is 1). Every rank must call this."""
        if self.group.size() == 1 or not self.active:
            return self.told
        found = stop_step(self.group, step + 1 + self.ahead if self.told else None)
        return found is not None and step >= found


@dataclass(eq=False)
class Loop:
    """Steps of a recipe after the first `done`, with their log lines, evaluations and checkpoints."""

    trainer: Trainer
    log: IO[str]
    say: Callable[[str], object]  # prints a line on rank 0
    memory: PeakMemory
    least_seconds: float  # of a step's FLOPs on all ranks at their peak, for the utilisation (MFU)
    checkpoints: RunCheckpoints | None = None
    done: int = 0

    def __post_init__(self) -> None:
        self.recipe, self.world = self.trainer.recipe, self.trainer.mesh.world
        self.unchecked: deque[tuple[int, Step]] = deque()
        self.saving: int | None = None  # the step of a save under way
        self.save_seconds = 0.0  # seconds that training has stopped for it
        self.since: list[Step] = []  # steps since the last log line
        self.note = ""

    def run(self, stop: StopSignal) -> bool:
        """Take the steps; returns False if SIGTERM ended them early, after a save if a step was taken. Raises UserError
        for an infinite or NaN loss or gradient, and for a last checkpoint that cannot be written."""
        run, steps = self.recipe.run, range(self.done + 1, self.recipe.run.steps + 1)
        expected, quiet = len(steps) * self.least_seconds, self.world.rank() > 0
        with console.progress("training", run.steps, expected, quiet, self.done) as advance:
            # Start together: a rank that is late now must not seem slow in the first step.
            if any(agree("ready for the first step, or told to stop", stop.told, self.world)):
                steps = steps[:0]
            self.trainer.timers.reset()
            self.start = time.perf_counter()
            for number in steps:
                step = self.trainer.step(number - 1)
                self.since.append(step)
                self.unchecked.append((number, step))
                self._require_finite(stop.ahead)  # on a GPU checks earlier steps, so that the host need not wait
                last = stop.after(number) or number == run.steps
                save = self.checkpoints is not None and (last or number % (run.save_every or math.inf) == 0)
                if save or last or number % run.log_every == 0:  # a resumed run begins with a new log line
                    self._require_finite()  # names rank and step, which a mean over steps could not
                    self._report(number)
                if number % (run.eval_interval or math.inf) == 0:
                    self._evaluate(number)
                if save:
                    self._save(number, last)
                self.done = number
                advance(self.note)
                if last:
                    break
        return self.done >= run.steps

    def _save(self, number: int, last: bool) -> None:
        """Save, or begin to with --background-save, unless the last steps were skipped: the weights may be damaged."""
        if self.trainer.overflows > 1:
            why = f"the last {self.trainer.overflows} gradients were inf or NaN; earlier checkpoints are as they were"
            write_line({"step": number, "save_failed": why}, self.log)
            self.say(f"step {number} is not saved: {why}")
            return
        began = time.perf_counter()
        self.finish_save()
        self.saving, self.save_seconds = number, 0.0
        self.finish_save(last, begin=True)
        self.start += time.perf_counter() - began

    def finish_save(self, last: bool = False, begin: bool = False) -> None:
        """Wait for a save under way, or `begin` one, and log its outcome. Raises SaveError only for the `last` one."""
        if self.checkpoints is None or self.saving is None:
            return
        began, number = time.perf_counter(), self.saving
        wait = last or not begin or not self.recipe.run.background_save
        try:
            if begin:
                self.checkpoints.save(number)
            if wait:
                self.checkpoints.saver.finish()
        except SaveError as error:
            self.saving = None
            write_line({"step": number, "save_failed": str(error)}, self.log)
            if last:
                raise
            self.say(f"step {number}: {error}")
            return
        self.save_seconds += time.perf_counter() - began
        if wait:
            self.saving = None
            write_line({"step": number, "saved": True, "save_seconds": self.save_seconds}, self.log)

    def _require_finite(self, ahead: int = 0) -> None:
        """Check gradient norms of all steps but the last `ahead`. Raises UserError, with the source, on every rank."""
        while len(self.unchecked) > ahead:
            number, step = self.unchecked.popleft()
            norm = step.norm.item()
            if math.isfinite(norm) or step.skipped:
                continue
            mine = not torch.isfinite(step.losses).all()
            bad = [rank for rank, is_bad in enumerate(agree("whose loss is finite", mine, self.world)) if is_bad]
            which = f"the loss of {ranks_text(bad)}" if bad else "the gradient, unlike the loss,"
            advice = f"lower --lr (now {self.recipe.optimizer.lr:g}), or leave such steps out with --on-nonfinite skip"
            raise UserError(f"{which} is not finite in step {number} (gradient norm {norm}); {advice}")

    def _report(self, number: int) -> None:
        trainer, steps, batch = self.trainer, len(self.since), self.trainer.batch
        taken = [step for step in self.since if not step.skipped]  # the loss of a skipped step may be NaN
        lm, pair = trainer.mean_losses(taken)
        norm, seconds = self.since[-1].norm.item(), (time.perf_counter() - self.start) / steps
        if taken and not math.isfinite(lm + pair):  # although its gradient was
            lr = self.recipe.optimizer.lr
            raise UserError(f"the loss is {lm + pair} after step {number}; lower --lr (now {lr:g})")
        is_bert, fp16 = self.recipe.model.is_bert, self.recipe.model.precision == "fp16"
        mfu, tokens = self.least_seconds / seconds, batch * trainer.seq / seconds
        line: dict[str, Any] = {"step": number, "loss": lm + pair if taken else None, "lr": self.since[-1].rate}
        line |= {"grad_norm": norm if math.isfinite(norm) else None, "tokens_per_s": tokens, "mfu": mfu}
        line["peak_memory"] = self.memory.read()  # of rank 0
        line |= {"lm_loss": lm, "sop_loss": pair} if is_bert and taken else {}
        line |= (routing := trainer.routing())
        line |= {"loss_scale": trainer.scaler.scale} if fp16 else {}
        line |= {"skipped": steps - len(taken)} if fp16 or self.recipe.optimizer.on_nonfinite == "skip" else {}
        if (kind := trainer.timers_shown) != "none":
            times = trainer.timers.by_rank()
            trainer.timers.reset()
            line["step_ms"] = 1e3 * seconds
            # Of each rank, in order; None where it does not use the timer.
            line["timers_ms"] = {k: [each and each / steps for each in values] for k, values in times.items()}
            self.say(iteration_line(line, self.recipe.run.steps, batch))
            self.say(timer_line(times, steps, kind == "minmax"))
        write_line(line, self.log)
        self.note = f"lm {lm:.3f} + sop {pair:.3f}" if is_bert else f"loss {lm:.3f}"
        self.note += f"  balance {routing['balance']:.2f}" if routing else ""
        self.note += f", {routing['dropped']:.0%} dropped" if routing.get("dropped") else ""
        self.note += f"  {console.format_count(tokens)} tokens/s  MFU {mfu:.0%}"
        self.since, self.start = [], time.perf_counter()

    def _evaluate(self, number: int) -> None:
        began = time.perf_counter()
        if losses := self.trainer.validate():
            write_line({"step": number} | losses, self.log)
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items())
            self.say(f"step {number}: {shown}")
        self.start += time.perf_counter() - began
