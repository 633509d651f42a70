"""Options of a training run in groups, which `Recipe` joins: every field is an option of the command line, by its name.
None is the default where the value follows from other options or from the model's preset."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems import presets
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.data.corpus import DEFAULT_SPLIT, split_points
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
MIXTURE = {"moe": "dispatch", "second_expert": "second_policy", "normalize_gates": "normalize"}  # others: equal names


def of_preset(help: str, type: Any = None, **option: Any) -> Any:
    """Define an option whose default, None, is the preset's value."""
    return setting(None, f"{help}  [default: the preset's]", type, **option)


@dataclass(frozen=True)
class ModelOptions:
    """Model: a preset and changes to it, the precision, and the activations that backward recomputes."""

    size: str | None = setting(None, "Model preset.  [default: tiny]", also=("--preset",))
    year: int = setting(presets.DEFAULT_YEAR, f"Edition of the course that the size is from, {YEARS}.")
    objective: Literal["lm", "bert"] | None = of_preset("Predict the next token, or masked tokens and sentence order.")
    num_layers: int | None = of_preset("Number of blocks.", click.IntRange(1, 10_000))
    d_model: int | None = of_preset("Width of the residual stream.", COUNT)
    num_heads: int | None = of_preset("Attention heads.", COUNT)
    d_ff: int | None = setting(None, "Hidden width of the MLP.  [default: the preset's, or 4 x --d-model]", COUNT)
    max_context: int | None = setting(None, "Longest sequence of the model.  [default: --context]", COUNT)
    vocab_size: int | None = setting(None, "Vocabulary size.  [default: preset's, or tokenizer's]", COUNT)
    dropout: float | None = of_preset("Probability of dropping an activation.")
    num_kv_heads: int | None = of_preset("Heads of keys and values; fewer than --num-heads for grouped queries.", COUNT)
    positions: presets.Positions | None = of_preset("Kind of position encoding.")
    rotary_base: float | None = of_preset("Base of the wavelengths of rotary positions.", POSITIVE)
    feed_forward: presets.FeedForwardKind | None = of_preset("Activation of the MLP.")
    tied_head: bool | None = of_preset("Use the embedding as output weights, too.", click.BOOL, is_flag=False)
    bias: bool | None = of_preset("Give linear layers and LayerNorm biases.", click.BOOL, is_flag=False)
    norm: presets.Norm | None = of_preset("Normalisation.")
    attention: presets.Attention | None = of_preset("Implementation of attention.")
    kernels: presets.Kernels | None = of_preset("Fused kernels for norm, gate and loss.")
    precision: presets.Precision = setting("fp32", "Precision of matrix products, with bf16 and fp16 of weights, too.")
    recompute: presets.Recompute = setting("none", "Activations that backward recomputes instead of keeping them.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", COUNT)

    @property
    def preset(self) -> presets.Preset:
        """Named preset. Without a name: BERT-345M for a BERT whose shape is given in options, else tiny."""
        by_hand = self.objective == "bert" and self.d_model is not None
        return presets.preset(self.size or ("bert-345m" if by_hand else "tiny"), self.year)

    @property
    def name(self) -> str:
        """Name of the model in messages and logs."""
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
    """Expert layers, by this project's names and fairseq's."""

    num_experts: int | None = of_preset("Experts per expert layer; 0: none.", NATURAL, also=("--moe-expert-count",))
    expert_every: int | None = of_preset("Every k-th layer has experts.", COUNT, also=("--moe-freq",))
    expert_d_ff: int | None = setting(None, "Experts' width.  [default: --d-ff]", COUNT, also=("--moe-expert-ffn-dim",))
    top_k: int | None = of_preset("Experts that a token is sent to.", click.IntRange(1, 2))
    second_expert: presets.SecondPolicy | None = of_preset(
        "Training, a token's second expert: the second best, a sampled one, or kept with probability 2 x its weight.",
        also=("--moe-second-expert-policy",),
    )
    normalize_gates: presets.Normalize | None = of_preset("Normalise a token's two weights before or after drops.")
    gating_fp32: bool | None = of_preset("Router in float32.", also=("--moe-gating-use-fp32",), off="--no-gating-fp32")
    capacity_factor: float | None = of_preset(
        "Training: an expert's capacity is this x ceil(tokens / experts); 0: no limit.", NOT_NEGATIVE
    )
    eval_fraction: float | None = of_preset(
        "Evaluation: capacity / tokens; 0: as in training.", SHARE, also=("--moe-eval-capacity-token-fraction",)
    )
    mask_padding: bool = setting(False, "Send padding to no expert.", also=("--use-moe-pad-mask",))
    prioritized: bool = setting(False, "Place the surest tokens first.", also=("--moe-batch-prioritized-routing",))
    aux_weight: float | None = of_preset("Weight of the balancing loss.", NOT_NEGATIVE, also=("--moe-gate-loss-wt",))
    aux_scope: presets.AuxScope | None = of_preset("Balance each rank's microbatch, or all ranks' together.")
    shared_expert: bool = setting(False, "Add an expert of the dense width for every token.")
    moe: presets.Dispatch | None = of_preset("Dispatch tokens by a sort, or by one-hot tensors.")
    expert_gradient: presets.ExpertGradient | None = of_preset("Experts' gradients: exact, or times sqrt(ranks).")

    def with_experts(self, config: presets.ModelConfig) -> presets.ModelConfig:
        """Change a model's experts. Raises UserError for invalid settings, and for these options without experts."""
        own = fields(ExpertOptions)
        given = {each.name: value for each in own if (value := getattr(self, each.name)) != each.default}
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
    """Text, tokenizer, and the number of tokens in a step."""

    data: tuple[str, ...] = setting((), "Text files, or `random`.  [default: Python's standard library]")
    split: str = setting(DEFAULT_SPLIT, "BERT: weights of training, validation and test documents.")
    tokenizer: Literal["bytes", "wordpiece"] = setting("bytes", "BERT: tokenizer; WordPiece learns from the text.")
    vocab_file: Path | None = setting(None, "BERT: WordPiece vocabulary, one piece per line.")
    lower_case: bool = setting(False, "BERT: WordPiece ignores upper case.")
    mask_prob: float = setting(0.15, "BERT: share of tokens to predict.", SHARE)
    short_seq_prob: float = setting(0.1, "BERT: share of samples that are shorter.", SHARE)
    batch_size: int | None = setting(None, "Sequences per step.  [default: preset's, or a microbatch each]", COUNT)
    micro_batch_size: int | None = setting(None, "Sequences at once.  [default: a rank's, with --pp fewer]", COUNT)
    context: int | None = of_preset("Tokens in a sequence.", COUNT)
    pack: bool = setting(False, "Documents end at blank lines; attention and targets stay within one.")

    def __post_init__(self) -> None:
        """Raises UserError for an invalid split, also where none is used, and for `random` beside files."""
        split_points(self.split, 0)
        if "random" in self.data and len(self.data) > 1:
            raise UserError("--data random goes with no other data: drop it, or write ./random for a file of that name")

    @property
    def is_random(self) -> bool:
        """True if the data are random tokens, not text."""
        return "random" in self.data


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, its learning rate, and the loss scale of fp16."""

    lr: float = setting(2e-3, "Peak learning rate.", NOT_NEGATIVE)
    min_lr: float | None = setting(None, "Learning rate from --decay-steps on.  [default: --lr / 10]", NOT_NEGATIVE)
    warmup_steps: int = setting(20, "Steps of linear warm-up.", NATURAL)
    warmup_fraction: float | None = setting(None, "Share of --decay-steps to warm up; replaces --warmup-steps.", SHARE)
    decay_steps: int = setting(1000, "Step at which the learning rate reaches --min-lr.", COUNT)
    decay: Literal["cosine", "linear"] = setting("cosine", "Shape of the learning rate's decay.")
    weight_decay: float = setting(0.1, "AdamW: weight decay, for matrices only.", NOT_NEGATIVE)
    beta1: float = setting(0.9, "AdamW: decay rate of the mean gradient.", MEMORY)
    beta2: float = setting(0.95, "AdamW: decay rate of the mean squared gradient.", MEMORY)
    adam_eps: float = setting(1e-8, "AdamW's epsilon.", NOT_NEGATIVE)
    clip: float = setting(1.0, "Clip gradients to this global norm; 1e30 never clips.", POSITIVE)
    loss_scale: float | None = setting(None, "fp16: constant loss scale.  [default: dynamic]", POSITIVE)
    initial_loss_scale: float = setting(2.0**32, "fp16: initial loss scale.", POSITIVE)
    loss_scale_window: int = setting(1000, "fp16: steps without overflow before the scale doubles.", COUNT)
    hysteresis: int = setting(2, "fp16: overflows before the scale is halved.", COUNT)
    min_loss_scale: float = setting(1.0, "fp16: smallest loss scale.", POSITIVE)
    on_nonfinite: Literal["stop", "skip"] = setting("stop", "On inf or NaN, stop, or skip the step (fp16 skips).")

    def learning_rate(self, update: int) -> float:
        """Learning rate of an optimizer update, counted from 0. Raises UserError for an invalid schedule."""
        share, least = self.warmup_fraction, self.lr / 10 if self.min_lr is None else self.min_lr
        if not (math.isfinite(self.lr) and least <= self.lr):
            raise UserError(f"--lr {self.lr:g} with --min-lr {least:g}: a finite rate that falls is meant")
        warmup = self.warmup_steps if share is None else round(share * self.decay_steps)
        return learning_rate(update, self.lr, least, warmup, self.decay_steps, self.decay)


@dataclass(frozen=True)
class ParallelOptions:
    """Degrees of parallelism, the pipeline's schedule and the ZeRO stage."""

    tp: int = setting(1, "Tensor-parallel ranks, over which matrices are split.", COUNT)
    pp: int = setting(1, "Pipeline stages, over which the blocks are split.", COUNT)
    ep: int = setting(1, "Expert-parallel ranks, which split experts.", COUNT, also=("--expert-model-parallel-size",))
    cp: int = setting(1, "Context-parallel ranks, which split sequences.", COUNT, also=("--context-parallel-degree",))
    cp_type: presets.ContextType = setting("ring", "How keys reach queries on other ranks.")
    dp: int | None = setting(None, "Data-parallel ranks.  [default: all remaining ranks]", COUNT)
    sequence_parallel: bool = setting(False, "Split activations between layers along the sequence.")
    schedule: ScheduleName | None = setting(None, "Pipeline schedule.  [default: 1f1b; with --chunks interleaved]")
    chunks: int = setting(1, "Groups of blocks per pipeline stage.", COUNT)
    pad_vocabulary: int = setting(128, "With --tp, pad the vocabulary to a multiple of this.", COUNT)
    zero: int = setting(0, "ZeRO stage; 1 shards state, 2 also gradients, 3 all.", click.IntRange(0, 3))

    def __post_init__(self) -> None:
        if self.schedule == "zbv" and self.chunks == 1:
            object.__setattr__(self, "chunks", 2)  # the only number that zbv can have

    @property
    def schedule_name(self) -> str:
        """Name of the given schedule, or of the default for this number of chunks."""
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")


@dataclass(frozen=True)
class LaunchOptions:
    """Ranks to start, their device, and their communication."""

    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 1]", COUNT)
    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")
    backend: Backend | None = setting(None, "Communication backend.  [default: nccl on cuda, shm or gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    dry_run: bool = setting(False, "Print what each rank would hold and send, and stop.")


@dataclass(frozen=True)
class RunOptions:
    """Length of a run, its seed, evaluation, sample, log, and the folder of its checkpoints."""

    steps: int = setting(300, "Optimizer steps in all, including those before --resume.", click.IntRange(1, 10**9))
    seed: int = setting(0, "Random seed of weights, batches and sample.", click.IntRange(0, 2**32 - 1))
    eval_interval: int | None = setting(None, "Steps between two evaluations.  [default: one, at the end]", COUNT)
    eval_iters: int = setting(8, "Batches per evaluation.", COUNT)
    prompt: str = setting("def ", "Text that the sample continues.")
    sample_bytes: int = setting(100, "Length of the sample in bytes.", NATURAL)
    log_file: Path | None = setting(None, "Log file, JSON lines.  [default: train.jsonl in --out or runs]")
    log_every: int = setting(10, "Steps between two log lines.", COUNT)
    timers: Literal["none", "max", "minmax", "waits"] | None = setting(
        None, "Times of a step's parts: maximum or range over ranks, or waits apart.  [default: max with --tp or --pp]"
    )
    out: Path | None = setting(None, "Folder for checkpoints, log and lock.  [default: nothing is saved]")
    save_every: int | None = setting(None, "Steps between two checkpoints; the last step has one anyway.", COUNT)
    keep: int = setting(2, "Checkpoints to keep; older ones are deleted.", click.IntRange(2))
    background_save: bool = setting(False, "Save a copy of the state while training continues.")
    resume: bool = setting(False, "Continue from the newest complete checkpoint in --out, if any.")
    weights: Path | None = setting(None, "Start from the parameters in a safetensors file.")

    @property
    def log_path(self) -> Path:
        return self.log_file or (self.out or Path("runs")) / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return (self.out or Path()) / "checkpoints"
