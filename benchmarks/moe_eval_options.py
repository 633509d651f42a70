"""Options of `moe_eval`, and the model, the layout and the text that follow from them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import torch

from benchmarks.moe_blocks import Blocks, load_blocks
from benchmarks.moe_words import How
from benchmarks.records import results_folder
from cs336_systems.comm import mesh_sizes
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.errors import UserError
from cs336_systems.host.console import PATIENCE, setting
from cs336_systems.layout import check_divides, check_experts
from cs336_systems.presets import Attention, Dispatch, ModelConfig, preset
from cs336_systems.train.options import COUNT, NATURAL, ExpertOptions

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What makes a smoke run short, in place of what was said.
SMOKE: dict[str, Any] = {
    "d_model": 16,
    "num_heads": 2,
    "vocab_size": 256,
    "context": 32,
    "batches": 1,
    "num_experts": 8,
}


@dataclass(frozen=True)
class MoEEvalSettings(ExpertOptions):
    """Options of the command line, one field each."""

    size: str = setting("fairseq-moe-twin", "Model preset.")
    d_model: int | None = setting(None, "Width; the feed-forward's is four times it.", type=COUNT)
    num_heads: int | None = setting(None, "Attention heads.", type=COUNT)
    num_layers: int | None = setting(None, "Layers.", type=COUNT)
    vocab_size: int | None = setting(None, "Tokens; text is bytes, 256 at least.", type=COUNT)
    attention: Attention | None = setting(None, "Implementation of attention.  [default: the preset's]")
    context: int | None = setting(None, "Tokens in a block.  [default: the preset's]", type=COUNT)
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = setting("fp32", "Of weights and activations.")
    data: tuple[str, ...] = setting((), "Text files, or `random`.  [default: Python's standard library]")
    batch_size: int = setting(1, "Blocks of a batch, on each rank.", type=COUNT)
    batches: int = setting(5, "Batches of each rank, if there is as much text.", type=COUNT)
    all_blocks: bool = setting(False, "Evaluate the whole text instead.")
    warmup: int = setting(1, "Batches before the first that counts.", type=NATURAL)
    moe: Literal["sort", "einsum", "both"] | None = setting(  # type: ignore[assignment]
        None, "One sort, the one-hot formulation, or both in turn.  [default: sort; with --profile both]"
    )
    words: How = setting("fast", "The log-probability of every word: a copy a batch, or a read a number.")
    words_file: Path | None = setting(None, "File for them, a line a word.")
    profile: bool = setting(False, "Leave traces, tables and one trace of all ranks in --out.")
    out: Path | None = setting(None, "Folder of the profile.  [default: runs/moe_eval/<size>]")
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", type=COUNT)
    tp: int = setting(1, "Tensor-parallel ranks, which evaluate the same blocks.", type=COUNT)
    ep: int | None = setting(
        None, "Expert-parallel ranks.  [default: the rest, or as many as there are experts]", type=COUNT
    )
    seed: int = setting(0, "Seed of the weights.", type=click.IntRange(0, 2**32 - 1))
    device: Literal["cpu", "cuda"] | None = setting(None, "Where to run.  [default: cuda if there is one]")
    backend: Backend | None = setting(None, "Who moves tensors.  [default: nccl on cuda, shm or gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    results: Path | None = setting(None, "Folder of the record.  [default: runs/results/<machine>]")
    machine: str | None = setting(None, "Name of this machine in the records.  [default: its device's]")
    commit: str | None = setting(None, "Commit to record, for a copy without its .git.")
    smoke: bool = setting(False, "Only show that it works: a tiny model, one batch, no record.")

    def config(self) -> ModelConfig:
        """The model. Raises UserError for one that cannot be."""
        shape = preset(self.size).model.override(
            vocab_size=self.vocab_size,
            context_length=self.context,
            d_model=self.d_model,
            d_ff=4 * self.d_model if self.d_model else None,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            attention=self.attention,
            dropout=0.0,
        )
        if not shape.causal:
            raise UserError(f"{self.size} is no language model: it sees the words that it would be asked for")
        options = replace(self, moe="sort" if self.variants()[0] == "sort" else "einsum")
        return options.with_experts(shape) if shape.num_experts or self.num_experts else shape

    def variants(self) -> tuple[Dispatch, ...]:
        """The formulations, in the order in which they take turns."""
        chosen = self.moe or ("both" if self.profiled else "sort")
        return ("einsum", "sort") if chosen == "both" else (chosen,)

    @property
    def profiled(self) -> bool:
        """True if traces are written."""
        return self.profile or self.out is not None

    def folder(self) -> Path:
        """Where the profile goes."""
        return self.out or Path("runs/moe_eval") / self.size

    def sizes(self, config: ModelConfig, ranks: int) -> dict[str, int]:
        """The mesh. Raises UserError, with the numbers, for a layout that cannot be."""
        check_divides(config, self.tp)
        ep = self.ep
        if ep is None:
            ep = min(max(1, ranks // self.tp), config.num_experts or 1)
        check_experts(config, ep)
        sizes = mesh_sizes(ranks, self.tp, 1, ep)
        return {axis: sizes[axis] for axis in ("pp", "dp", "ep", "tp")}  # a sequence is not split here

    def blocks(self, config: ModelConfig) -> Blocks:
        """The text. Raises UserError where it is too short."""
        return load_blocks(self.data, config.vocab_size, config.context_length)

    def count(self, blocks: Blocks, data: int) -> int:
        """Batches of each of `data` ranks."""
        there = blocks.batches(data, self.batch_size)
        return there if self.all_blocks else min(self.batches, there)

    def results_folder(self, device: torch.device) -> Path:
        """Where the record goes."""
        return results_folder(self.results, self.machine, device)
