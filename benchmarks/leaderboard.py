"""Times of the course's two leaderboard tasks, measured by their rules: `python -m benchmarks.leaderboard`.

2025: attention forward and backward, 16 heads x 16,384 x 64, bf16, causal, on one H100. 2026: a training step of an 8B
model at a context of 32,768, batch 2, on two B200; here on one GPU, with as many of its layers as that holds.
"""

import gc
import importlib
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
import torch

from benchmarks.attention import LEADERBOARD, flops, gate, inputs, load_ours
from benchmarks.harness import measure, require_close, summarise, suspicions
from benchmarks.lib.contest import OURS, UnavailableError, format_ms, ran_out
from benchmarks.lib.gate import make_it_matter, tolerance
from benchmarks.lib.kernel import BOTH, Function
from benchmarks.lib.options import COUNT, DeviceOptions, command
from benchmarks.lib.plan import instead_of_kernels, measure_once
from benchmarks.lib.workload import Case, compile_model
from benchmarks.records import Record
from cs336_systems.cost import Hardware, count_parameters, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting
from cs336_systems.host.machine import PeakMemory, environment, usable_memory
from cs336_systems.host.text import printable
from cs336_systems.model.precision import set_matmul_precision
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig
from kernels.adamw import FusedAdamW

TASK = LEADERBOARD[0]
ATTENTION, STEP = "attention-2025", "step-2026"
# The best of cs336's boards in 2026-11: H. Brunborg, on an H100, and K. P. Keval, on two B200.
PUBLISHED = {ATTENTION: (5.364, "an H100"), STEP: (3837.0, "two B200")}
FULL = ModelConfig(
    vocab_size=151_936, context_length=32_768, d_model=4096, d_ff=11_008, num_layers=34, num_heads=32,
    positions="rotary", feed_forward="swiglu", tied_head=False, attention="flash", kernels="triton",
    recompute="segments",
)  # fmt: skip
# The same model for a machine without a GPU, where the step is shown to work and its time means little.
LAPTOP = replace(FULL, vocab_size=4096, context_length=256, d_model=256, d_ff=688, num_layers=2, num_heads=4)
TINY = replace(LAPTOP, vocab_size=256, context_length=32, d_model=32, d_ff=64, num_layers=1, num_heads=2)
BATCH = 2
GATE_CONTEXT = 128


@dataclass(frozen=True)
class LeaderboardSettings(DeviceOptions):
    """Options of the command line, one field each."""

    task: Literal["attention-2025", "step-2026", "both"] = setting("both", "Edition of the leaderboard.")
    layers: int | None = setting(None, "Layers of the 8B model.  [default: as many as fit, 34 at most]", type=COUNT)
    seconds: float = setting(10.0, "Seconds of repetitions of the attention task.", type=click.FloatRange(0.1))
    steps: int = setting(3, "Timed training steps, after two untimed ones.", type=COUNT)


@dataclass(frozen=True)
class LeaderboardStep:
    """A training step of a batch."""

    config: ModelConfig
    batch: int

    @property
    def block(self) -> ModelConfig:
        """One block of the model, on a short sequence, for the gate."""
        return replace(self.config, num_layers=1, context_length=min(GATE_CONTEXT, self.config.context_length))

    @property
    def bytes_needed(self) -> int:
        """Peak bytes of a step: bf16 weights and gradients, float32 moments, each block's input, the insides of
        the block that is run again (its rotations in float32), and the gradients of the head."""
        config = self.config
        tokens = self.batch * config.context_length
        insides = 2 * tokens * (18 * config.d_model + 6 * config.d_ff)
        head = config.vocab_size * (6 * config.d_model + 2 * min(tokens, 4096))
        kept = 2 * tokens * config.d_model * config.num_layers
        return 12 * sum(count_parameters(config).values()) + kept + insides + head

    def predict(self, hardware: Hardware) -> dict[str, Any]:
        """Matrix products at the measured peak (forward three times, and once more what is recomputed), and AdamW's
        22 bytes a parameter at the measured bandwidth; element-wise work is left out. `flops` leave out recompute."""
        config, context = self.config, self.config.context_length
        forward = least_forward_flops(config, self.batch, context)
        whole = sum(forward_flops(config, self.batch, context).values())
        again = recompute_flops(config, self.batch, context) * forward / whole
        update = 22 * sum(count_parameters(config).values()) / hardware.bandwidth
        seconds = (3 * forward + again) / hardware.matmul_flops + update
        return {"median_ms": 1e3 * seconds, "flops": 3 * forward, "peak_memory_bytes": self.bytes_needed}


def largest_step(full: ModelConfig, layers: int | None, usable: int) -> LeaderboardStep:
    """The deepest model that fits, at batch 2 if it can be. Raises UserError if what was asked for does not fit."""
    for depth in (layers,) if layers else range(full.num_layers, 0, -1):
        for size in (BATCH, 1):
            step = LeaderboardStep(replace(full, num_layers=depth), size)
            if step.bytes_needed <= usable:
                return step
    need = format_bytes(step.bytes_needed)
    raise UserError(f"--layers {layers or 1} at batch 1 needs {need}, {format_bytes(usable)} are usable; ask for less")


def gate_step(step: LeaderboardStep, device: torch.device) -> float:
    """One block of the model in bf16 against the same weights in float64: the largest error of the loss and of every
    gradient. Raises WrongResultError."""
    config, allowed = step.block, tolerance(step.block, "bf16")
    batch = torch.randint(config.vocab_size, (2, 2, config.context_length), device=device)
    candidate = TransformerLM(config, device)
    make_it_matter(candidate)
    candidate.bfloat16()
    reference = TransformerLM(replace(config, attention="naive", kernels="torch", recompute="none"), device).double()
    reference.load_state_dict(candidate.state_dict())
    losses = [lm_loss(model, *batch) for model in (candidate, reference)]
    for loss in losses:
        loss.backward()
    worst = require_close("the loss of a block", losses[0].detach(), losses[1].detach(), allowed)
    for (name, parameter), exact in zip(candidate.named_parameters(), reference.parameters(), strict=True):
        if exact.grad is not None:
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            worst = max(worst, require_close(f"the gradient of {name}", got, exact.grad, allowed))
    return worst


def time_step(step: LeaderboardStep, steps: int, device: torch.device) -> tuple[list[float], int | None]:
    """Milliseconds of training steps (zero_grad, forward, loss, backward, AdamW), and peak memory in bytes.

    Raises UserError for a loss that is no number.
    """
    memory = PeakMemory(device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in float32 the weights alone would fill a quarter of the GPU
    try:
        model = TransformerLM(step.config, device)
    finally:
        torch.set_default_dtype(default)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(step.config.vocab_size, (2, step.batch, step.config.context_length), device=device)
    loss = torch.zeros(())

    def train() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = lm_loss(model, *batch)
        loss.backward()
        optimizer.step()

    with console.progress("step-2026", steps + 2) as advance:
        done = measure({"step": train}, device, 2, steps, memory, advance=advance)
    if not torch.isfinite(loss):
        raise UserError(f"the loss is {loss.item()}, so no speed is reported")
    return done.samples_ms["step"], done.peak.get("step")


def time_attention(flash: Function, seconds: float, device: torch.device) -> list[float]:
    """The rules' own loop: milliseconds of a forward and a backward, each on a cold cache."""
    shape = TASK.batch, TASK.seq, TASK.dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward_backward() -> None:
        flash(q, k, v).sum().backward()

    do_bench = importlib.import_module("triton.testing").do_bench
    return list(do_bench(forward_backward, rep=1e3 * seconds, warmup=1e2 * seconds, return_mode="all"))


def run_attention(settings: LeaderboardSettings, device: torch.device, hardware: Hardware) -> dict[str, Any]:
    """Gate and time the task of 2025: the fields of its record."""
    work = flops(TASK, BOTH)
    config = {"task": ATTENTION, "heads": TASK.batch, "seq": TASK.seq, "dim": TASK.dim, "dtype": TASK.dtype}
    predicted = {"median_ms": 1e3 * work / hardware.matmul_flops, "flops": work}
    fields: dict[str, Any] = {"config": config | {"causal": TASK.causal}, "predicted": predicted}
    if device.type == "cpu":
        print(f"{ATTENTION}: not run on a CPU, where Triton has an interpreter only")
        return fields | {"status": "unsupported", "flags": ["needs a GPU"]}
    flash: Function = compile_model(load_ours(TASK, device), device)
    error = gate(OURS, flash, TASK, inputs(TASK, device))
    print(f"{ATTENTION}: gate: equals float64 within {error:.1e}")
    samples = time_attention(flash, 0.1 if settings.smoke else settings.seconds, device)
    return fields | {"samples_ms": samples, "metrics": {"gate_error": error}}


def run_step(settings: LeaderboardSettings, device: torch.device, hardware: Hardware) -> dict[str, Any]:
    """Gate and time the task of 2026, scaled to what fits: the fields of its record."""
    full = TINY if settings.smoke else FULL if device.type == "cuda" else LAPTOP
    step = largest_step(full, settings.layers, usable_memory(device))
    model, boards = step.config, ""
    if (model, step.batch) != (FULL, BATCH):
        boards = f" (the board's: {FULL.num_layers} of {FULL.d_model}, {BATCH} x {FULL.context_length})"
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    shape = f"{layers} of width {model.d_model}, batch {step.batch} x {model.context_length}{boards}"
    print(f"{STEP}: {shape}; needs {format_bytes(step.bytes_needed)}")
    config = {"task": STEP, "layers": model.num_layers, "d_model": model.d_model, "batch_size": step.batch}
    config |= {"context": model.context_length, "dtype": "bf16"}
    fields: dict[str, Any] = {"config": config, "predicted": step.predict(hardware)}
    try:
        error = gate_step(step, device)
        print(f"{STEP}: gate: one block equals float64 within {error:.1e}")
        gc.collect()
        torch.cuda.empty_cache()
        samples, peak = time_step(step, 1 if settings.smoke else settings.steps, device)
    except RuntimeError as failure:
        if not ran_out(failure):
            raise
        print(f"{STEP}: out of memory although it was counted to fit; --layers {max(1, model.num_layers - 2)} may fit")
        return fields | {"status": "out-of-memory", "flags": ["out of memory"]}
    flags = instead_of_kernels(Case(model, step.batch, "bf16", False, device))
    return fields | {"samples_ms": samples, "metrics": {"gate_error": error, "peak_memory_bytes": peak}, "flags": flags}


def finish(fields: dict[str, Any], hardware: Hardware, stamp: dict[str, Any]) -> Record:
    """The record, and one line that says what it shows."""
    task, predicted = fields["config"]["task"], fields["predicted"]
    if samples := fields.get("samples_ms"):
        metrics = summarise(samples) | fields["metrics"]
        metrics["flops_per_s"] = 1e3 * predicted["flops"] / metrics["median_ms"]
        metrics["mfu"] = metrics["flops_per_s"] / hardware.matmul_flops
        flags = suspicions(metrics, predicted["flops"], 0.0, hardware) + fields.get("flags", [])
        fields = fields | {"metrics": metrics, "flags": flags}
        best = "; best published, the whole task on {1}: {0:,.4g} ms".format(*PUBLISHED[task])
        print(
            f"{task}: {format_ms(metrics['median_ms'])} (predicted {format_ms(predicted['median_ms'])}), "
            f"{format_count(metrics['flops_per_s'])}FLOP/s, MFU {metrics['mfu']:.0%}"
            + best
            * (fields["config"].get("d_model", FULL.d_model) == FULL.d_model)  # else it is another model's
        )
        for flag in flags:
            print(printable(f"{task}: {flag}"))
    return Record("leaderboard", environment=stamp, **fields)


@command(LeaderboardSettings)
def main(settings: LeaderboardSettings) -> None:
    """Time the course's leaderboard tasks: attention (2025), a training step of an 8B model (2026)."""
    device = settings.on
    set_matmul_precision(device, "fp32")
    recorder = settings.recorder("leaderboard", device)
    hardware = measure_once(device, "bf16", 0.02 if settings.smoke else 0.5)
    stamp, faults = environment(device, settings.commit), []
    for name, run in ((ATTENTION, run_attention), (STEP, run_step)):
        if settings.task in (name, "both"):
            torch.manual_seed(0)
            try:
                recorder.keep(finish(run(settings, device, hardware), hardware, stamp))
            except (UserError, UnavailableError) as fault:  # the other task still wants to be measured
                faults.append(f"{name}: {fault}")
    if recorder.records:
        recorder.tell()
    if faults:
        raise UserError("; ".join(faults))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
