"""Two lessons on mixed precision: `python -m benchmarks.mixed_precision accumulation`, and `dtypes`.

The first explains the sum of a thousand additions of 0.01 in each number format, the second lists the dtype of every
part of a model under autocast. Both are facts, not timings: a record has no samples.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib.options import DeviceOptions, command
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.machine import environment
from cs336_systems.host.table import Table
from cs336_systems.model.precision import autocast, set_matmul_precision
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig

Format = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

PARAMETERS, LOSS, PRODUCTS = "parameters", "loss", "matrix products"
STATISTICS, LOG_SOFTMAX = "LayerNorm's mean and 1/std", "log-softmax of the loss"
# What runs inside a layer or a loss, by operator, with the number of the output that tells.
OPERATORS = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), (PRODUCTS, 0)),
    "aten::native_layer_norm": (STATISTICS, 1),
    "aten::mean.dim": ("RMSNorm's mean of squares", 0),
    **dict.fromkeys(("aten::_softmax", "aten::_softmax_backward_data"), ("softmax of attention", 0)),
    **dict.fromkeys(("aten::_log_softmax", "aten::_log_softmax_backward_data"), (LOG_SOFTMAX, 0)),
}
MODEL = ModelConfig(64, 16, 32, 64, 1, 2, positions="rotary", feed_forward="swiglu", tied_head=False)
TOY, TRANSFORMER = "toy model of the course", "transformer of this project"


class ToyModel(nn.Module):
    """The course's (CS336 assignment 2, mixed precision): (batch in_features) -> (batch out_features)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


@dataclass
class Part:
    """The dtype that a part has in forward, and that of its gradient (of an operator: of its results in backward)."""

    forward: str = ""
    backward: str = ""

    def note(self, direction: Literal["forward", "backward"], dtype: torch.dtype) -> None:
        """One more dtype that was seen; several are listed."""
        seen, name = getattr(self, direction), NAMES.get(dtype, str(dtype).removeprefix("torch."))
        if name not in seen.split(", "):
            setattr(self, direction, f"{seen}, {name}" if seen else name)


Parts = dict[str, Part]


class Watch(TorchDispatchMode):
    """Notes the dtypes of some operators' results; autocast has cast their inputs by then."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Parts = {}
        self.direction: Literal["forward", "backward"] = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if known := OPERATORS.get(func.name()):
            row, index = known
            told = result[index] if isinstance(result, tuple) else result
            self.parts.setdefault(row, Part()).note(self.direction, told.dtype)
        return result


def _note_output(parts: Parts, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
    part = parts.setdefault(name, Part())
    part.note("forward", output.dtype)
    output.register_hook(lambda gradient: part.note("backward", gradient.dtype))


def probe(model: nn.Module, loss_of: Callable[[], Tensor], device: torch.device, precision: Format) -> Parts:
    """Run forward and loss under autocast, then backward, and note the dtype of everything on the way: the parameters,
    every module's output in the order they ran, the loss, and what ran inside."""
    set_matmul_precision(device, "fp32")
    parts: Parts = {PARAMETERS: Part()}
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(_note_output, parts, f"{name} ({type(module).__name__})"))
    with Watch() as watch:
        with autocast(device, precision):
            loss = loss_of()
        _note_output(parts, LOSS, model, (), loss)
        watch.direction = "backward"
        loss.backward()
    for parameter in model.parameters():
        parts[PARAMETERS].note("forward", parameter.dtype)
        assert parameter.grad is not None
        parts[PARAMETERS].note("backward", parameter.grad.dtype)
    return parts | watch.parts


def probe_toy(device: torch.device, precision: Format) -> Parts:
    """The course's model with a cross entropy on its logits."""
    model = ToyModel(16, 5).to(device)
    x, classes = torch.randn(8, 16, device=device), torch.randint(5, (8,), device=device)
    return probe(model, lambda: F.cross_entropy(model(x), classes), device, precision)


def probe_transformer(device: torch.device, precision: Format) -> Parts:
    """One block of this project's model, as the course builds it from 2025 on, with its loss."""
    model = TransformerLM(MODEL, device)
    tokens = torch.randint(MODEL.vocab_size, (2, MODEL.context_length), device=device)
    return probe(model, partial(lm_loss, model, tokens, tokens), device, precision)


PROBES: dict[str, Callable[[torch.device, Format], Parts]] = {TOY: probe_toy, TRANSFORMER: probe_transformer}


def documented_for_cuda(precision: Format) -> dict[str, str]:
    """Dtypes of the toy model's forward on CUDA according to torch's lists of operators (torch.amp, "CUDA Ops that can
    autocast to float16" and "to float32"). Not measured. Nothing ever changes a parameter."""
    return {
        PARAMETERS: "fp32", "fc1 (Linear)": precision, "relu (ReLU)": precision,  # in neither list: as its input
        "ln (LayerNorm)": "fp32", "fc2 (Linear)": precision, LOSS: "fp32", PRODUCTS: precision, LOG_SOFTMAX: "fp32",
    }  # fmt: skip


COUNT, TERM = 1000, 0.01
ACCUMULATION, DTYPES_LESSON = "accumulation", "dtypes"
SUM_COLUMNS = ("sum += term", "result", "error", "of which the term", "of which additions")
SUM_CAPTION = (
    f"{COUNT} additions of {TERM}. the term: {COUNT} times what the format changes {TERM} by. additions: what rounding "
    "each partial sum to the sum's format changes. Rows of bf16 are not part of the course's exercise"
)
PART_CAPTION = (
    "forward: the output of each part (the parameters themselves); backward: its gradient (of parameters: .grad, cast "
    "to their own dtype before it is stored or added up). Below the loss, what ran inside, by operator. The logits are "
    "what fc2 or head gives"
)
CUDA_CAPTION = ". CUDA, documented: what torch's lists of autocast's operators say of forward there, not measured"


@dataclass(frozen=True)
class Sum:
    """`COUNT` terms added to a sum in place, each of them cast to the sum's format before that or not."""

    total: Format
    term: Format
    cast: bool = False

    def __str__(self) -> str:
        return f"{self.total} += {self.term}" + f" cast to {self.total}" * self.cast


SUMS = (
    Sum("fp32", "fp32"), Sum("fp16", "fp16"), Sum("fp32", "fp16"), Sum("fp32", "fp16", cast=True),
    Sum("bf16", "bf16"), Sum("fp32", "bf16"), Sum("fp32", "bf16", cast=True),
)  # fmt: skip


def accumulate(case: Sum, device: torch.device) -> float:
    """The sum, by COUNT additions in place on the device."""
    total = torch.tensor(0.0, dtype=DTYPES[case.total], device=device)
    term = torch.tensor(TERM, dtype=DTYPES[case.term], device=device)
    for _ in range(COUNT):
        total += term.to(DTYPES[case.total]) if case.cast else term
    return total.item()


def account(case: Sum, result: float) -> dict[str, float]:
    """The error of a result, split without remainder; and the format's spacing there with what an addition there adds.

    All of it is exact in Python's floats: a float32 times a thousand needs 34 bits of their 53.
    """
    term = torch.tensor(TERM, dtype=DTYPES[case.term]).item()
    spacing = torch.finfo(DTYPES[case.total]).eps * 2.0 ** (math.frexp(result)[1] - 1)
    return {
        "sum": result,
        "error": result - COUNT * TERM,
        "error_of_term": COUNT * term - COUNT * TERM,
        "error_of_additions": result - COUNT * term,
        "term": term,
        "spacing": spacing,
        "added": round(term / spacing) * spacing,  # the sum is a multiple of the spacing, so this is what rounding does
    }


def why(case: Sum, facts: dict[str, float], uncast: float | None) -> str:
    """One sentence on a sum, of its numbers; `uncast` is the result of the same without the cast."""
    held = f"{case.term} holds {TERM} as {facts['term']:.8g}"
    there = f"{case.total} is spaced {facts['spacing']:.5g} at {facts['sum']:.5g}"
    if case.cast and facts["sum"] == uncast:
        return f"equal to the last bit to the sum without the cast: += itself casts the term to {case.total}"
    if facts["error_of_additions"] == 0:
        return f"{held}, and {case.total} holds every multiple of it exactly up to {COUNT}: no addition rounds"
    if facts["added"] == 0:
        return f"stuck: {there}, the term is less than half of that, and an addition adds nothing"
    return f"{held}; {there}, so an addition there adds {facts['added']:.8g}"


def run_accumulation(device: torch.device, stamp: dict[str, Any]) -> list[Record]:
    """Add, print the table with a sentence on each sum, and return the record."""
    rows, sums = [], dict[str, dict[str, Any]]()
    for case in SUMS:
        facts = account(case, accumulate(case, device))
        uncast = sums.get(str(Sum(case.total, case.term)), {}).get("sum")
        sums[str(case)] = facts | {"why": why(case, facts, uncast)}
        errors = [facts[name] for name in ("error", "error_of_term", "error_of_additions")]
        rows.append([str(case), f"{facts['sum']:.4f}", *(f"{error:+.2e}" if error else "0" for error in errors)])
    out = console.console()
    out.print(Table("accumulation", SUM_COLUMNS, rows, SUM_CAPTION).table())
    for name, found in sums.items():
        out.print(f"{name}: {found['why']}.", markup=False, soft_wrap=True)
    config = {"lesson": ACCUMULATION, "terms": COUNT, "term": TERM}
    return [Record("mixed_precision", config, stamp, metrics={"sums": sums})]


def show_parts(title: str, tables: dict[Format, Parts], documented: dict[Format, dict[str, str]]) -> None:
    """One table of a model: for each precision forward and backward, and where known what is documented for CUDA."""
    heads, rows = ["part"], []
    for precision in tables:
        heads += [f"{precision}: forward", "backward"] + ["CUDA, documented"] * (precision in documented)
    for name in next(iter(tables.values())):
        cells = [name]
        for precision, parts in tables.items():
            cells += [parts[name].forward, parts[name].backward]
            cells += [documented[precision].get(name, "")] if precision in documented else []
        rows.append(cells)
    note = PART_CAPTION + CUDA_CAPTION * bool(documented)
    console.console().print(Table(title, heads, rows, note, names=True).table())


def run_dtypes(device: torch.device, stamp: dict[str, Any]) -> list[Record]:
    """Probe both models, print a table of each, and return a record of each model and precision."""
    records, formats = list[Record](), get_args(Format)
    for model, run_probe in PROBES.items():
        measured = {precision: run_probe(device, precision) for precision in formats}
        known = [precision for precision in formats if model == TOY and precision != "fp32"]
        documented = {precision: documented_for_cuda(precision) for precision in known}
        show_parts(f"{model}, under autocast on {stamp['device']}, torch {stamp['torch']}", measured, documented)
        for precision, parts in measured.items():
            metrics: dict[str, Any] = {"parts": {name: vars(part) for name, part in parts.items()}}
            if precision in documented:
                metrics["documented_for_cuda"] = documented[precision]
            config = {"lesson": DTYPES_LESSON, "model": model, "precision": precision}
            records.append(Record("mixed_precision", config, stamp, metrics=metrics))
    return records


@command(DeviceOptions)
@click.argument("lesson", type=click.Choice([ACCUMULATION, DTYPES_LESSON, "both"]), default="both")
def main(settings: DeviceOptions, lesson: str) -> None:
    """Print the results of the course's sums in each number format, and the dtype of every part under autocast."""
    device = settings.on
    recorder = settings.recorder("mixed_precision", device)
    stamp = environment(device, settings.commit)
    if lesson != DTYPES_LESSON:
        recorder.keep(*run_accumulation(device, stamp))
    if lesson != ACCUMULATION:
        recorder.keep(*run_dtypes(device, stamp))
    recorder.tell()


if __name__ == "__main__":
    sys.exit(console.run_command(main))
