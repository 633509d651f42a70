"""Mixed precision: the arithmetic of a run's matrix products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cs336_systems.errors import UserError
from cs336_systems.presets import Precision


def set_matmul_precision(device: torch.device, precision: Precision) -> None:
    """Allow or forbid TF32 in float32's matrix products, a switch of the whole process: set it before each timed run.
    Raises UserError for TF32 without a GPU."""
    if precision == "tf32" and device.type != "cuda":
        raise UserError("tf32 is a format of NVIDIA GPUs; on a CPU use --precision fp32 or bf16")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Context for forward and loss: torch's autocast for bf16 and fp16, none for fp32 and tf32."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, half) if half else nullcontext()
