"""Dtypes of all parts of a model under autocast: observed by running it, and for CUDA as torch documents them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
