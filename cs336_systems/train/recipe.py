"""Recipe: all options of a training run in groups, values that follow from several of them, and checks of combinations.

recipe = Recipe.of(size="tiny", tp=2, lr=1e-3)      from options by name, as the command line and a log have them
recipe.parallel.tp, recipe.optimizer.lr             the same in groups
"""

from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, Self

from cs336_systems.comm import mesh_sizes
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag
from cs336_systems.layout import Layout
from cs336_systems.optim.loss_scaler import DynamicLossScaler, LossScaler
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule.lists import SPLIT
from cs336_systems.train import options

# Settings that turn a decoder's shape into BERT's (arXiv:1810.04805), with the pre-norm of Megatron-LM.
ENCODER: dict[str, Any] = {"causal": False, "positions": "learned", "token_types": 2, "bias": True}
ENCODER |= {"norm": "layernorm", "feed_forward": "gelu", "tied_head": True, "bert_heads": True, "kernels": "torch"}
OF_BERT = ("split", "tokenizer", "vocab_file", "lower_case", "mask_prob", "short_seq_prob")
# Options that are fields of the model's configuration.
SHAPE = {each.name for each in fields(options.ModelOptions)} & {each.name for each in fields(ModelConfig)}


@dataclass(frozen=True)
class Recipe:
    """A training run: groups of options, each with its defaults."""

    model: options.ModelOptions = field(default_factory=options.ModelOptions)
    experts: options.ExpertOptions = field(default_factory=options.ExpertOptions)
    data: options.DataOptions = field(default_factory=options.DataOptions)
    optimizer: options.OptimizerOptions = field(default_factory=options.OptimizerOptions)
    parallel: options.ParallelOptions = field(default_factory=options.ParallelOptions)
    launch: options.LaunchOptions = field(default_factory=options.LaunchOptions)
    run: options.RunOptions = field(default_factory=options.RunOptions)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make the recipe with these options, by the names of the command line."""
        return cls().change(**options)

    def change(self, **options: Any) -> Self:
        """Change the values of some options. Raises TypeError for other names, UserError for inf and NaN."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in OPTIONS:
                raise TypeError(f"{name!r} is no option of a recipe")
            if isinstance(value, float) and not isfinite(value):
                raise UserError(f"{flag(name)} {value} is not a finite number")
            groups.setdefault(OPTIONS[name], {})[name] = value
        return replace(self, **{group: replace(getattr(self, group), **new) for group, new in groups.items()})

    def options(self) -> dict[str, Any]:
        """Values of all options by name, without groups, as the command line has them."""
        return {name: getattr(getattr(self, group), name) for name, group in OPTIONS.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert the options to JSON, for logs and checkpoints."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.options().items()}

    def model_config(self, tokens: int | None = None) -> ModelConfig:
        """Make the model's configuration: the preset with this recipe's changes. `tokens` is the tokenizer's number of
        tokens, for a model without a vocabulary of its own. Raises UserError for settings that do not go together."""
        model, base = self.model, self.model.preset.model
        if not model.is_bert and not base.causal:
            raise UserError(f"{model.name} is an encoder, which cannot predict the next token; use --objective bert")
        if model.is_bert and model.attention == "flash":
            raise UserError("BERT's text is padded, and attention flash knows no padding mask; use --attention sdpa")
        if self.experts.mask_padding and not model.is_bert:
            raise UserError("--mask-padding is about BERT's padding; blocks of text have none")
        if model.is_bert and self.data.pack:
            raise UserError("--pack is about a decoder's rows; a row of BERT's is one pair of stretches of text")
        if model.is_bert and (base.causal or model.size is None):
            base = replace(base, **ENCODER if base.causal else {}, vocab_size=tokens or base.vocab_size)
        shape = {name: getattr(model, name) for name in SHAPE}
        shape["context_length"] = model.max_context or self.data.context
        if model.d_model and not model.d_ff:
            shape["d_ff"] = 4 * model.d_model
        config = base.override(**shape)
        if model.rotary_base and config.positions != "rotary":
            raise UserError(f"--rotary-base is about rotary positions, and these are {config.positions}")
        return self.experts.with_experts(config)

    def seq(self, config: ModelConfig) -> int:
        """Number of tokens in a sequence. Raises UserError for more than the model has positions."""
        if (context := self.data.context) and context > config.context_length:
            raise UserError(f"--context {context} exceeds the model's {config.context_length} positions")
        return context or config.context_length

    def loss_scaler(self) -> LossScaler:
        """Make the loss scaler, which keeps fp16's gradients in range; else of scale 1. Raises UserError if invalid."""
        own = self.optimizer
        if self.model.precision != "fp16":
            return LossScaler()
        if own.loss_scale:
            return LossScaler(own.loss_scale)
        return DynamicLossScaler(own.initial_loss_scale, own.loss_scale_window, own.hysteresis, own.min_loss_scale)

    def layout(self, ranks: int) -> Layout:
        """Make the recipe's layout over `ranks` ranks. Raises UserError if the degrees do not divide them."""
        parallel, micro_batch = self.parallel, self.data.micro_batch_size
        sizes = mesh_sizes(ranks, parallel.tp, parallel.pp, parallel.ep, parallel.cp, parallel.dp)
        data = sizes["dp"] * sizes["ep"]
        batch = self.data.batch_size or (micro_batch * data if micro_batch else self.model.preset.batch_size)
        if micro_batch is None:
            most = batch // data if parallel.pp == 1 else max(1, batch // data // (4 * parallel.pp))
            # The interleaved schedule needs a multiple of this number of microbatches.
            in_turn = parallel.pp if parallel.chunks > 1 and parallel.schedule_name == "interleaved" else 1
            micro_batch = next((size for size in range(most, 0, -1) if batch % (size * in_turn * data) == 0), 1)
        return Layout(
            **sizes, chunks=parallel.chunks, schedule=parallel.schedule_name, sequence=parallel.sequence_parallel,
            zero=parallel.zero, micro_batch=micro_batch, global_batch=batch, cp_type=parallel.cp_type,
            vocabulary_multiple=parallel.pad_vocabulary if parallel.tp > 1 else 1,
        )  # fmt: skip

    def check(self, config: ModelConfig, ranks: int) -> None:
        """Check the recipe before anything is built. Raises UserError, with the numbers, for options that need a
        folder, an invalid learning rate, and a layout that does not divide."""
        for name in ("save_every", "resume", "background_save"):
            if self.run.out is None and getattr(self.run, name):
                raise UserError(f"{flag(name)} needs a folder for the checkpoints: name one with --out DIR")
        for name in () if self.model.is_bert else OF_BERT:
            if getattr(self.data, name) != getattr(options.DataOptions, name):
                raise UserError(f"{flag(name)} is about BERT's text: leave it out, or say --objective bert")
        self.optimizer.learning_rate(0)
        parallel, seq = self.parallel, self.seq(config)
        if parallel.zero == 3 and parallel.chunks > 1 and parallel.schedule_name not in SPLIT:
            raise UserError("ZeRO stage 3 gathers a stage's layers in one order; use --zero 0, 1 or 2 with --chunks")
        if parallel.schedule_name in SPLIT and (parallel.zero == 3 or self.model.recompute in ("segments", "nested")):
            cause = "ZeRO stage 3" if parallel.zero == 3 else f"--recompute {self.model.recompute}"
            reason = "the gradients of weights are computed later, from inputs that are kept"
            raise UserError(f"--schedule {parallel.schedule} does not go with {cause}: {reason}")
        if parallel.sequence_parallel and parallel.tp == 1:
            raise UserError("--sequence-parallel splits the sequence over tensor-parallel ranks; use --tp 2 or more")
        self.layout(ranks).check(config, seq)


GROUPS: dict[str, type] = {group.name: type(getattr(Recipe(), group.name)) for group in fields(Recipe)}
OPTIONS = {each.name: group for group, kind in GROUPS.items() for each in fields(kind)}
