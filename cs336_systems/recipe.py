"""The recipe: everything that a training run is made of, each an option of the command line, and checked together."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems.comm import mesh_sizes
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.console import setting
from cs336_systems.cost.layout import Layout
from cs336_systems.documents import DEFAULT_SPLIT
from cs336_systems.errors import UserError
from cs336_systems.loss_scaler import ConstantScale, DynamicLossScaler, LossScaler
from cs336_systems.mixture_options import MixtureOptions
from cs336_systems.optim import learning_rate
from cs336_systems.presets import (
    COURSE_YEARS,
    DEFAULT_YEAR,
    Attention,
    Kernels,
    ModelConfig,
    Norm,
    Preset,
    Recompute,
    preset,
)
from cs336_systems.run_options import RunOptions

COUNT = click.IntRange(1)
NATURAL = click.IntRange(0)
POSITIVE = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE = click.FloatRange(min=0)
SHARE = click.FloatRange(0, 1)
MEMORY = click.FloatRange(0, 1, max_open=True)

# What makes a decoder's shape BERT's (arXiv:1810.04805), with the pre-norm of Megatron-LM.
ENCODER: dict[str, Any] = {
    "causal": False,
    "positions": "learned",
    "token_types": 2,
    "bias": True,
    "norm": "layernorm",
    "feed_forward": "gelu",
    "tied_head": True,
    "bert_heads": True,
    "kernels": "torch",
}


@dataclass(frozen=True)
class Recipe(MixtureOptions, RunOptions):
    """What a training run is made of; every field is an option of the command line."""

    size: str | None = setting(None, "Model preset.  [default: tiny]", also=("--preset",))
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the size is from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    objective: Literal["lm", "bert"] | None = setting(
        None, "Next token, or masked tokens and sentence order.  [default: the preset's]"
    )
    num_layers: int | None = setting(None, "Blocks.  [default: the preset's]", type=COUNT)
    d_model: int | None = setting(None, "Width of the stream.  [default: the preset's]", type=COUNT)
    num_heads: int | None = setting(None, "Heads of attention.  [default: the preset's]", type=COUNT)
    d_ff: int | None = setting(
        None, "Width of the feed-forward.  [default: the preset's, or 4 x --d-model]", type=COUNT
    )
    max_context: int | None = setting(None, "Positions of the model.  [default: --context]", type=COUNT)
    vocab_size: int | None = setting(None, "Tokens.  [default: the preset's, or the tokenizer's]", type=COUNT)
    data: tuple[str, ...] = setting((), "Text files, or `random`.  [default: Python's standard library]")
    split: str = setting(DEFAULT_SPLIT, "BERT: weights of training, validation and test documents.")
    tokenizer: Literal["bytes", "wordpiece"] = setting("bytes", "BERT: tokens; wordpiece is learned from the text.")
    vocab_file: Path | None = setting(None, "BERT: a WordPiece vocabulary, one piece a line.")
    lower_case: bool = setting(False, "BERT: WordPiece makes no difference between upper and lower case.")
    mask_prob: float = setting(0.15, "BERT: share of tokens to predict.", type=SHARE)
    short_seq_prob: float = setting(0.1, "BERT: share of samples that are shorter.", type=SHARE)
    batch_size: int | None = setting(
        None, "Sequences in a step.  [default: the preset's, or a microbatch a replica]", type=COUNT
    )
    micro_batch_size: int | None = setting(
        None,
        "Sequences that pass through the model at once.  [default: all of a rank's, or a quarter a stage]",
        type=COUNT,
    )
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=COUNT)
    lr: float = setting(2e-3, "Peak learning rate.", type=NOT_NEGATIVE)
    min_lr: float | None = setting(
        None, "Learning rate from --decay-steps on.  [default: a tenth of --lr]", type=NOT_NEGATIVE
    )
    warmup_steps: int = setting(20, "Steps of linear warm-up.", type=NATURAL)
    warmup_fraction: float | None = setting(None, "Warm-up as a share of --decay-steps, in its place.", type=SHARE)
    decay_steps: int = setting(1000, "Step at which the learning rate reaches --min-lr.", type=COUNT)
    decay: Literal["cosine", "linear"] = setting("cosine", "Shape of the learning rate's decay.")
    weight_decay: float = setting(0.1, "AdamW's decay of matrices.", type=NOT_NEGATIVE)
    beta1: float = setting(0.9, "AdamW's memory of the gradient.", type=MEMORY)
    beta2: float = setting(0.95, "AdamW's memory of its square.", type=MEMORY)
    adam_eps: float = setting(1e-8, "AdamW's epsilon.", type=NOT_NEGATIVE)
    clip: float = setting(1.0, "Largest global norm of the gradient.", type=POSITIVE)
    dropout: float | None = setting(None, "Probability of dropping an activation.  [default: the preset's]")
    norm: Norm | None = setting(None, "Normalisation.  [default: the preset's]")
    attention: Attention | None = setting(None, "Implementation of attention.  [default: the preset's]")
    kernels: Kernels | None = setting(None, "Fused kernels for norm, gate and loss.  [default: the preset's]")
    recompute: Recompute = setting("none", "What backward recomputes instead of keeping it.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", type=COUNT)
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32", "Precision of matrix products; in bf16 and fp16 of the weights, too, of which fp32 masters are kept."
    )
    loss_scale: float | None = setting(None, "fp16: a constant scale.  [default: found by trial]", type=POSITIVE)
    initial_loss_scale: float = setting(2.0**32, "fp16: the first scale.", type=POSITIVE)
    loss_scale_window: int = setting(1000, "fp16: steps without overflow until the scale doubles.", type=COUNT)
    hysteresis: int = setting(2, "fp16: overflows until the scale is halved.", type=COUNT)
    min_loss_scale: float = setting(1.0, "fp16: the lowest scale.", type=POSITIVE)
    seed: int = setting(0, "Seed of weights, batches and sample.", type=click.IntRange(0, 2**32 - 1))
    tp: int = setting(1, "Tensor-parallel ranks: each matrix is split over so many.", type=COUNT)
    pp: int = setting(1, "Pipeline stages: the blocks are split over so many ranks.", type=COUNT)
    ep: int = setting(
        1,
        "Expert-parallel ranks: the experts are split over so many, which see different tokens.",
        type=COUNT,
        also=("--expert-model-parallel-size",),
    )
    dp: int | None = setting(None, "Data-parallel ranks.  [default: the rest]", type=COUNT)
    sequence_parallel: bool = setting(False, "Split the stream between layers along the sequence, over the tp ranks.")
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = setting(
        None, "Order of the microbatches in a pipeline.  [default: 1f1b, or interleaved with --chunks]"
    )
    chunks: int = setting(1, "Groups of blocks that a pipeline stage has.", type=COUNT)
    pad_vocabulary: int = setting(128, "With --tp the vocabulary is padded to a multiple of it.", type=COUNT)
    zero: int = setting(0, "ZeRO stage: what the data-parallel ranks shard.", type=click.IntRange(0, 3))
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", type=COUNT)
    device: Literal["cpu", "cuda"] | None = setting(None, "Where to run.  [default: cuda if there is one]")
    backend: Backend | None = setting(None, "Who moves tensors between ranks.  [default: nccl on cuda, gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", type=POSITIVE)
    eval_interval: int | None = setting(None, "Steps between two evaluations.  [default: one, at the end]", type=COUNT)
    eval_iters: int = setting(8, "Batches of an evaluation.", type=COUNT)
    timers: Literal["none", "max", "minmax", "waits"] | None = setting(
        None,
        "Times of a step's parts: the slowest rank's, a range, or waiting apart.  [default: max with --tp or --pp]",
    )
    dry_run: bool = setting(False, "Say what each rank would hold and send, and stop.")
    prompt: str = setting("def ", "Start of the sample.")
    sample_bytes: int = setting(300, "Length of the sample.", type=NATURAL)

    @property
    def preset(self) -> Preset:
        """The named preset; without a name, a shape given by hand is compared to BERT-345M, all else to tiny."""
        by_hand = self.objective == "bert" and self.d_model is not None
        return preset(self.size or ("bert-345m" if by_hand else "tiny"), self.year)

    @property
    def name(self) -> str:
        """What to call the model."""
        shape = f"{self.num_layers} layers x {self.d_model}" if self.d_model and self.num_layers else ""
        return self.size or shape or ("tiny" if self.num_layers is self.d_model is None else "a changed tiny")

    @property
    def is_bert(self) -> bool:
        """Whether masked tokens are predicted."""
        return self.objective == "bert" if self.objective else not self.preset.model.causal

    @property
    def half(self) -> bool:
        """Whether the weights are in half precision."""
        return self.precision in ("bf16", "fp16")

    @property
    def schedule_name(self) -> str:
        """The schedule asked for, or the one that suits the chunks."""
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    def model_config(self, tokens: int | None = None) -> ModelConfig:
        """The preset with this recipe's changes; `tokens` is the tokenizer's vocabulary, for a model that has none of
        its own. Raises UserError for a model that cannot be."""
        base = self.preset.model
        if self.is_bert and base.causal:
            base = replace(base, **ENCODER, vocab_size=tokens or base.vocab_size)
        elif not self.is_bert and not base.causal:
            raise UserError(f"{self.name} is an encoder, which cannot predict the next token; use --objective bert")
        elif self.is_bert and self.size is None:
            base = replace(base, vocab_size=tokens or base.vocab_size)
        if self.is_bert and self.attention == "flash":
            raise UserError("BERT's text is padded, and attention flash knows no padding mask; use --attention sdpa")
        shape = base.override(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            d_ff=self.d_ff or (4 * self.d_model if self.d_model else None),
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            context_length=self.max_context or self.context,
            dropout=self.dropout,
            norm=self.norm,
            attention=self.attention,
            kernels=self.kernels,
            recompute=self.recompute,
            recompute_every=self.recompute_every,
        )
        if self.mask_padding and not self.is_bert:
            raise UserError("--mask-padding is about BERT's padding; blocks of text have none")
        return self.with_experts(shape)

    def seq(self, config: ModelConfig) -> int:
        """Tokens in a sequence. Raises UserError for more than the model has positions."""
        if self.context and self.context > config.context_length:
            raise UserError(f"--context {self.context} exceeds the model's {config.context_length} positions")
        return self.context or config.context_length

    def learning_rate(self, update: int) -> float:
        """The rate of an optimizer update, counted from 0. Raises UserError for a schedule that cannot be."""
        share, least = self.warmup_fraction, self.lr / 10 if self.min_lr is None else self.min_lr
        if not (math.isfinite(self.lr) and least <= self.lr):
            raise UserError(f"--lr {self.lr:g} with --min-lr {least:g}: a finite rate that falls is meant")
        warmup = self.warmup_steps if share is None else round(share * self.decay_steps)
        return learning_rate(update, self.lr, least, warmup, self.decay_steps, self.decay)

    def loss_scaler(self) -> LossScaler:
        """What keeps fp16's gradients in range; other precisions need nothing. Raises UserError for a scale that
        cannot be."""
        if self.precision != "fp16":
            return ConstantScale()
        if self.loss_scale:
            return ConstantScale(self.loss_scale)
        return DynamicLossScaler(self.initial_loss_scale, self.loss_scale_window, self.hysteresis, self.min_loss_scale)

    def batches(self, ranks: int) -> tuple[int, int]:
        """(sequences in a step, in a microbatch) on so many ranks. Raises UserError where they do not divide."""
        sizes = mesh_sizes(ranks, self.tp, self.pp, self.ep, self.dp)
        data = sizes["dp"] * sizes["ep"]
        given = self.micro_batch_size
        batch = self.batch_size or (given * data if given else self.preset.batch_size)
        rows, rest = divmod(batch, data)
        if rest:
            raise UserError(
                f"--batch-size {batch} does not divide over {data} {'data-parallel ' * (data < ranks)}ranks"
            )
        if given and rows % given:
            raise UserError(
                f"--batch-size {batch} gives each of {data} data-parallel ranks {rows} sequences, which is no multiple "
                f"of --micro-batch-size {given}"
            )
        most = rows if self.pp == 1 else max(1, rows // (4 * self.pp))
        in_turn = self.pp if self.chunks > 1 else 1  # interleaved, as many microbatches as stages pass in turn
        fitting = [size for size in range(most, 0, -1) if rows % (size * in_turn) == 0]
        return batch, given or (fitting[0] if fitting else 1)

    def layout(self, ranks: int) -> Layout:
        """How the recipe is laid out over so many ranks. Raises UserError where they do not divide."""
        batch, micro = self.batches(ranks)
        return Layout(
            self.tp,
            self.pp,
            mesh_sizes(ranks, self.tp, self.pp, self.ep, self.dp)["dp"],
            self.chunks,
            self.schedule_name,
            self.sequence_parallel,
            self.zero,
            micro,
            batch,
            self.pad_vocabulary if self.tp > 1 else 1,
            self.ep,
        )

    def check_layout(self, config: ModelConfig, ranks: int) -> None:
        """Raises UserError, with the numbers, for a layout that does not divide, before anything is built."""
        seq = self.seq(config)
        if self.pp == 1 and self.chunks > 1:
            raise UserError(f"--chunks {self.chunks} divide a pipeline stage; with --pp 1 there is none")
        if self.zero == 3 and self.chunks > 1:
            raise UserError("ZeRO stage 3 gathers a stage's layers in one order; use --zero 0, 1 or 2 with --chunks")
        if self.sequence_parallel and self.tp == 1:
            raise UserError(
                "--sequence-parallel splits the sequence over the tensor-parallel ranks; use --tp 2 or more"
            )
        self.layout(ranks).check(config, seq)
