"""Options that benchmarks share: the model to run, and its number of tokens."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.lib.options import COUNT, RecordOptions
from benchmarks.lib.workload import Case
from cs336_systems.host.console import setting
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, Kernels, Norm, Precision, Recompute, preset


@dataclass(frozen=True)
class ModelOptions(RecordOptions):
    """A preset and what is changed of it."""

    size: str = setting("small", "Model preset.")
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the sizes are from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    precision: Precision = setting("fp32", "Precision of matrix products; bf16 and fp16 are mixed precision.")
    norm: Norm | None = setting(None, "Normalisation.  [default: the preset's]")
    attention: Attention | None = setting(None, "Implementation of attention.  [default: the preset's]")
    kernels: Kernels | None = setting(None, "Fused kernels for norm, gate and loss.  [default: the preset's]")
    compile: bool = setting(False, "Compile the model with torch.compile.")
    recompute: Recompute = setting("none", "Activations that backward recomputes instead of keeping them.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", type=COUNT)
    batch_size: int | None = setting(None, "Sequences in a pass.  [default: the edition's]", type=COUNT)
    context: int | None = setting(None, "Tokens in a sequence.  [default: the edition's]", type=COUNT)
    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")

    def case(self, size: str, device: torch.device) -> Case:
        """One size with these options. Raises UserError for a size or a choice that does not exist."""
        chosen = preset(size, self.year)
        config = chosen.model.override(
            norm=self.norm,
            attention=self.attention,
            kernels=self.kernels,
            context_length=self.context,
            recompute=self.recompute,
            recompute_every=self.recompute_every,
        )
        return Case(config, self.batch_size or chosen.batch_size, self.precision, self.compile, device)


def model_config(case: Case) -> dict[str, Any]:
    """Settings of the model and its tokens for a record."""
    config = case.config
    return {
        "precision": case.precision,
        "norm": config.norm,
        "attention": config.attention,
        # Named where it is unusual only: records from before there was a choice keep their configuration.
        **({"kernels": config.kernels} if config.kernels != "torch" else {}),
        "compile": case.compiled,
        "recompute": config.recompute,
        "recompute_every": config.recompute_every,
        "batch_size": case.batch,
        "context": config.context_length,
    }
