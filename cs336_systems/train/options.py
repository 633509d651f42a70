"""Options of a training run in groups, which `Recipe` joins: every field is an option of the command line, by its name.
None is the default where the value follows from other options or from the model's preset."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems import presets
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.data.corpus import DEFAULT_SPLIT
from cs336_systems.errors import UserError
from cs336_systems.host.console import PATIENCE, flag, setting
from cs336_systems.optim.adamw import learning_rate
from cs336_systems.schedule.lists import ScheduleName

COUNT = click.IntRange(1)
NATURAL = click.IntRange(0)
POSITIVE = click.FloatRange(min=0, min_open=True)
NOT_NEGATIVE = click.FloatRange(min=0)
SHARE = click.FloatRange(0, 1)
MEMORY = click.FloatRange(0, 1, max_open=True)
YEARS = f"{presets.COURSE_YEARS[0]} to {presets.COURSE_YEARS[-1]}"
MIXTURE = {"moe": "dispatch", "second_expert": "second_policy", "normalize_gates": "normalize"}  # the rest are alike


def of_preset(help: str, type: Any = None, **option: Any) -> Any:
    """An option whose default, None, is the preset's value."""
    return setting(None, f"{help}  [default: the preset's]", type, **option)


@dataclass(frozen=True)
class ModelOptions:
    """The model: a preset and what is changed in it, its precision, and what backward recomputes."""

    size: str | None = setting(None, "Model preset.  [default: tiny]", also=("--preset",))
    year: int = setting(presets.DEFAULT_YEAR, f"Edition of the course that the size is from, {YEARS}.")
    objective: Literal["lm", "bert"] | None = of_preset("Next token, or masked tokens and sentence order.")
    num_layers: int | None = of_preset("Blocks.", COUNT)
    d_model: int | None = of_preset("Width of the stream.", COUNT)
    num_heads: int | None = of_preset("Heads of attention.", COUNT)
    d_ff: int | None = setting(None, "Width of the feed-forward.  [default: preset's, or 4 x --d-model]", COUNT)
    max_context: int | None = setting(None, "Positions of the model.  [default: --context]", COUNT)
    vocab_size: int | None = setting(None, "Tokens.  [default: the preset's, or the tokenizer's]", COUNT)
    dropout: float | None = of_preset("Probability of dropping an activation.")
    num_kv_heads: int | None = of_preset("Heads of keys and values; fewer than --num-heads: grouped queries.", COUNT)
    positions: presets.Positions | None = of_preset("Positions of tokens.")
    rotary_base: float | None = of_preset("Base of the rotary positions' wavelengths.", POSITIVE)
    feed_forward: presets.FeedForwardKind | None = of_preset("Activation of the feed-forward.")
    tied_head: bool | None = of_preset("Logits reuse the embedding.", click.BOOL, is_flag=False)
    bias: bool | None = of_preset("Linear layers and LayerNorm have biases.", click.BOOL, is_flag=False)
    norm: presets.Norm | None = of_preset("Normalisation.")
    attention: presets.Attention | None = of_preset("Implementation of attention.")
    kernels: presets.Kernels | None = of_preset("Fused kernels for norm, gate and loss.")
    precision: presets.Precision = setting("fp32", "Of products, and in bf16 and fp16 of weights.")
    recompute: presets.Recompute = setting("none", "What backward recomputes instead of keeping it.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", COUNT)

    @property
    def preset(self) -> presets.Preset:
        """The named preset; without a name BERT-345M for a BERT whose shape is given by hand, and tiny otherwise."""
        by_hand = self.objective == "bert" and self.d_model is not None
        return presets.preset(self.size or ("bert-345m" if by_hand else "tiny"), self.year)

    @property
    def name(self) -> str:
        """The model's name in messages and logs."""
        shape = f"{self.num_layers} layers x {self.d_model}" if self.d_model and self.num_layers else ""
        return self.size or shape or ("tiny" if self.num_layers is self.d_model is None else "a changed tiny")

    @property
    def is_bert(self) -> bool:
        """True if the model predicts masked tokens, False if it predicts the next one."""
        return self.objective == "bert" if self.objective else not self.preset.model.causal

    @property
    def half(self) -> bool:
        """True if the weights are in half precision."""
        return self.precision in ("bf16", "fp16")


@dataclass(frozen=True)
class ExpertOptions:
    """Expert layers, by our names and fairseq's."""

    num_experts: int | None = of_preset("Experts of a layer; 0: none.", NATURAL, also=("--moe-expert-count",))
    expert_every: int | None = of_preset("Every k-th layer has experts.", COUNT, also=("--moe-freq",))
    expert_d_ff: int | None = setting(None, "Experts' width.  [default: --d-ff]", COUNT, also=("--moe-expert-ffn-dim",))
    top_k: int | None = of_preset("Experts that a token is sent to.", click.IntRange(1, 2))
    second_expert: presets.SecondPolicy | None = of_preset(
        "Training: a token's second expert is the second best, sampled, or kept with twice its weight as probability.",
        also=("--moe-second-expert-policy",),
    )
    normalize_gates: presets.Normalize | None = of_preset("A token's two weights add up to 1 before or after drops.")
    gating_fp32: bool | None = of_preset("Router in float32.", also=("--moe-gating-use-fp32",), off="--no-gating-fp32")
    capacity_factor: float | None = of_preset(
        "Training: slots of an expert = this x ceil(tokens / experts); 0: all.", NOT_NEGATIVE
    )
    eval_fraction: float | None = of_preset(
        "Evaluation: an expert's largest share; 0: as in training.", SHARE, also=("--moe-eval-capacity-token-fraction",)
    )
    mask_padding: bool = setting(False, "Padding is sent to no expert.", also=("--use-moe-pad-mask",))
    prioritized: bool = setting(False, "The surest tokens come first.", also=("--moe-batch-prioritized-routing",))
    aux_weight: float | None = of_preset("Weight of the balancing loss.", NOT_NEGATIVE, also=("--moe-gate-loss-wt",))
    aux_scope: presets.AuxScope | None = of_preset("Balance a rank's microbatch, or those of all ranks together.")
    shared_expert: bool = setting(False, "One more expert, of the dense width, for every token.")
    moe: presets.Dispatch | None = of_preset("Dispatch of tokens: by one sort, or by one-hot tensors.")
    expert_gradient: presets.ExpertGradient | None = of_preset("Experts' gradients: as alone, or times root of ranks.")

    def with_experts(self, config: presets.ModelConfig) -> presets.ModelConfig:
        """Change a model's experts. Raises UserError for experts that cannot be, and for options without experts."""
        values = ((each, getattr(self, each.name)) for each in fields(ExpertOptions))
        given = {each.name: value for each, value in values if value != each.default}
        about = [name for name in given if name != "num_experts"]
        if about and not given.get("num_experts", config.num_experts):
            raise UserError(f"{flag(about[0])} is about experts, and the model has none: set --num-experts")
        shape = {name: given.pop(name) for name in ("num_experts", "expert_every") if name in given}
        mixture = replace(config.mixture, **{MIXTURE.get(name, name): value for name, value in given.items()})
        for name in ("second_expert", "normalize_gates"):
            if mixture.top_k == 1 and name in given:
                raise UserError(f"{flag(name)} is about a token's second expert, and --top-k 1 has none")
        config = replace(config, **shape, mixture=mixture)
        if config.num_experts and not config.expert_layers:
            layers = f"one layer in {config.expert_every} would have experts, and there are {config.num_layers}"
            raise UserError(f"{layers}: lower --expert-every")
        return config


@dataclass(frozen=True)
class DataOptions:
    """The text, its tokens, and how many of them make a step."""

    data: tuple[str, ...] = setting((), "Text, or `random`.  [default: Python's standard library]")
    split: str = setting(DEFAULT_SPLIT, "BERT: weights of training, validation and test documents.")
    tokenizer: Literal["bytes", "wordpiece"] = setting("bytes", "BERT: tokens; wordpiece is learned from the text.")
    vocab_file: Path | None = setting(None, "BERT: a WordPiece vocabulary, one piece a line.")
    lower_case: bool = setting(False, "BERT: WordPiece makes no difference between upper and lower case.")
    mask_prob: float = setting(0.15, "BERT: share of tokens to predict.", SHARE)
    short_seq_prob: float = setting(0.1, "BERT: share of samples that are shorter.", SHARE)
    batch_size: int | None = setting(None, "Sequences in a step.  [default: preset's, or a microbatch each]", COUNT)
    micro_batch_size: int | None = setting(None, "Sequences at once.  [default: a rank's, or a quarter a stage]", COUNT)
    context: int | None = of_preset("Tokens in a sequence.", COUNT)
    pack: bool = setting(False, "A row's documents, which blank lines separate, do not see each other.")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, its learning rate, and the loss scale of fp16."""

    lr: float = setting(2e-3, "Peak learning rate.", NOT_NEGATIVE)
    min_lr: float | None = setting(None, "Rate from --decay-steps on.  [default: a tenth of --lr]", NOT_NEGATIVE)
    warmup_steps: int = setting(20, "Steps of linear warm-up.", NATURAL)
    warmup_fraction: float | None = setting(None, "Warm-up as a share of --decay-steps, in its place.", SHARE)
    decay_steps: int = setting(1000, "Step at which the learning rate reaches --min-lr.", COUNT)
    decay: Literal["cosine", "linear"] = setting("cosine", "Shape of the learning rate's decay.")
    weight_decay: float = setting(0.1, "AdamW's decay of matrices.", NOT_NEGATIVE)
    beta1: float = setting(0.9, "AdamW's memory of the gradient.", MEMORY)
    beta2: float = setting(0.95, "AdamW's memory of its square.", MEMORY)
    adam_eps: float = setting(1e-8, "AdamW's epsilon.", NOT_NEGATIVE)
    clip: float = setting(1.0, "Largest global norm of the gradient; 1e30 clips none.", POSITIVE)
    loss_scale: float | None = setting(None, "fp16: a constant scale.  [default: found by trial]", POSITIVE)
    initial_loss_scale: float = setting(2.0**32, "fp16: the first scale.", POSITIVE)
    loss_scale_window: int = setting(1000, "fp16: steps without overflow until the scale doubles.", COUNT)
    hysteresis: int = setting(2, "fp16: overflows until the scale is halved.", COUNT)
    min_loss_scale: float = setting(1.0, "fp16: the lowest scale.", POSITIVE)
    on_nonfinite: Literal["stop", "skip"] = setting("stop", "On inf or NaN end the run or skip the step, as fp16 does.")

    def learning_rate(self, update: int) -> float:
        """Learning rate of an optimizer update, counted from 0. Raises UserError for a schedule that cannot be."""
        share, least = self.warmup_fraction, self.lr / 10 if self.min_lr is None else self.min_lr
        if not (math.isfinite(self.lr) and least <= self.lr):
            raise UserError(f"--lr {self.lr:g} with --min-lr {least:g}: a finite rate that falls is meant")
        warmup = self.warmup_steps if share is None else round(share * self.decay_steps)
        return learning_rate(update, self.lr, least, warmup, self.decay_steps, self.decay)


@dataclass(frozen=True)
class ParallelOptions:
    """Degrees of parallelism, the pipeline's schedule and the ZeRO stage."""

    tp: int = setting(1, "Tensor-parallel ranks: each matrix is split over so many.", COUNT)
    pp: int = setting(1, "Pipeline stages: the blocks are split over so many ranks.", COUNT)
    ep: int = setting(1, "Expert-parallel ranks: experts are split.", COUNT, also=("--expert-model-parallel-size",))
    cp: int = setting(1, "Context-parallel ranks: every sequence is split.", COUNT, also=("--context-parallel-degree",))
    cp_type: presets.ContextType = setting("ring", "How a sequence's keys reach its queries on other ranks.")
    dp: int | None = setting(None, "Data-parallel ranks.  [default: the rest]", COUNT)
    sequence_parallel: bool = setting(False, "Split the stream between layers along the sequence.")
    schedule: ScheduleName | None = setting(None, "Order of microbatches.  [default: 1f1b; with --chunks interleaved]")
    chunks: int = setting(1, "Groups of blocks that a pipeline stage has.", COUNT)
    pad_vocabulary: int = setting(128, "With --tp the vocabulary is padded to a multiple of it.", COUNT)
    zero: int = setting(0, "ZeRO stage: what the data-parallel ranks shard.", click.IntRange(0, 3))

    def __post_init__(self) -> None:
        if self.schedule == "zbv" and self.chunks == 1:
            object.__setattr__(self, "chunks", 2)  # all that it can have

    @property
    def schedule_name(self) -> str:
        """The schedule asked for, or the one that suits the chunks."""
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")


@dataclass(frozen=True)
class LaunchOptions:
    """Ranks to start, the device, and how ranks communicate."""

    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", COUNT)
    device: Literal["cpu", "cuda"] | None = setting(None, "Where to run.  [default: cuda if there is one]")
    backend: Backend | None = setting(None, "Who moves tensors.  [default: nccl on cuda, shm or gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    dry_run: bool = setting(False, "Say what each rank would hold and send, and stop.")


@dataclass(frozen=True)
class RunOptions:
    """The length of a run, its seed, evaluation, sample, log, and the folder of its checkpoints."""

    steps: int = setting(300, "Optimizer steps in all, those before a resumption included.", COUNT)
    seed: int = setting(0, "Seed of weights, batches and sample.", click.IntRange(0, 2**32 - 1))
    eval_interval: int | None = setting(None, "Steps between two evaluations.  [default: one, at the end]", COUNT)
    eval_iters: int = setting(8, "Batches of an evaluation.", COUNT)
    prompt: str = setting("def ", "Start of the sample.")
    sample_bytes: int = setting(300, "Length of the sample.", NATURAL)
    log_file: Path | None = setting(None, "The log, JSON lines.  [default: train.jsonl in --out or runs]")
    log_every: int = setting(10, "Steps between two log lines.", COUNT)
    timers: Literal["none", "max", "minmax", "waits"] | None = setting(
        None, "Times of a step's parts: slowest rank's, range, or waits apart.  [default: max with --tp or --pp]"
    )
    out: Path | None = setting(None, "Folder of checkpoints, log and lock.  [default: nothing is kept]")
    save_every: int | None = setting(None, "Steps between two checkpoints; the end has one anyway.", COUNT)
    keep: int = setting(2, "Checkpoints that stay; older ones are deleted.", click.IntRange(2))
    background_save: bool = setting(False, "Write a copy of the state while training goes on.")
    resume: bool = setting(False, "Go on from the newest checkpoint in --out that is whole, if there is one.")
    weights: Path | None = setting(None, "Begin with the parameters of a plain safetensors file.")

    @property
    def log_path(self) -> Path:
        return self.log_file or (self.out or Path("runs")) / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return (self.out or Path()) / "checkpoints"
