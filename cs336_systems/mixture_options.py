"""The settings of expert layers as options of a command line, by our names and fairseq's."""

from dataclasses import dataclass, fields, replace

import click

from cs336_systems.console import setting
from cs336_systems.errors import UserError
from cs336_systems.mixture import AuxScope, Dispatch, ExpertGradient, Normalize, SecondPolicy
from cs336_systems.presets import ModelConfig

COUNT = click.IntRange(1)
NATURAL = click.IntRange(0)
NOT_NEGATIVE = click.FloatRange(min=0)
THE_PRESETS = "  [default: the preset's]"
NAMES = {"moe": "dispatch", "second_expert": "second_policy", "normalize_gates": "normalize"}  # the rest are alike


@dataclass(frozen=True)
class MixtureOptions:
    """What a command line says of expert layers; None is what the preset has."""

    num_experts: int | None = setting(
        None, "Experts of a layer that has them; 0: none." + THE_PRESETS, type=NATURAL, also=("--moe-expert-count",)
    )
    expert_every: int | None = setting(
        None, "Every k-th layer has experts." + THE_PRESETS, type=COUNT, also=("--moe-freq",)
    )
    expert_d_ff: int | None = setting(
        None, "Width of an expert.  [default: that of the feed-forward]", type=COUNT, also=("--moe-expert-ffn-dim",)
    )
    top_k: int | None = setting(None, "Experts that a token is sent to." + THE_PRESETS, type=click.IntRange(1, 2))
    second_expert: SecondPolicy | None = setting(
        None,
        "Training: a token's second expert is the second best, or sampled; or the second best, kept at random with "
        "twice its weight as probability." + THE_PRESETS,
        also=("--moe-second-expert-policy",),
    )
    normalize_gates: Normalize | None = setting(
        None, "A token's two weights add up to one before or after choices are dropped." + THE_PRESETS
    )
    gating_fp32: bool | None = setting(
        None,
        "The router computes in float32 at least." + THE_PRESETS,
        also=("--moe-gating-use-fp32",),
        off="--no-gating-fp32",
    )
    capacity_factor: float | None = setting(
        None,
        "Training: an expert takes at most this x ceil(tokens / experts) choices; 0: all." + THE_PRESETS,
        type=NOT_NEGATIVE,
    )
    eval_fraction: float | None = setting(
        None,
        "Evaluation: an expert takes at most this share of the tokens; 0: as in training." + THE_PRESETS,
        type=click.FloatRange(0, 1),
        also=("--moe-eval-capacity-token-fraction",),
    )
    mask_padding: bool = setting(False, "Padding is sent to no expert.", also=("--use-moe-pad-mask",))
    prioritized: bool = setting(
        False, "The surest tokens, not the first, find a place.", also=("--moe-batch-prioritized-routing",)
    )
    aux_weight: float | None = setting(
        None, "Weight of a layer's balancing loss." + THE_PRESETS, type=NOT_NEGATIVE, also=("--moe-gate-loss-wt",)
    )
    aux_scope: AuxScope | None = setting(
        None, "Balance a rank's microbatch, or those of all ranks together." + THE_PRESETS
    )
    shared_expert: bool = setting(False, "One more expert, of the dense width, for every token.")
    moe: Dispatch | None = setting(
        None, "How tokens find their experts: by one sort, or by one-hot tensors, the baseline." + THE_PRESETS
    )
    expert_gradient: ExpertGradient | None = setting(
        None, "Experts' gradients: as in one process, or larger by the root of the ranks." + THE_PRESETS
    )

    def with_experts(self, config: ModelConfig) -> ModelConfig:
        """The configuration with what the options say. Raises UserError for experts that cannot be, and for settings
        of experts that the model has not."""
        given = {
            each.name: value for each in fields(MixtureOptions) if (value := getattr(self, each.name)) != each.default
        }
        shape = {name: given.pop(name) for name in ("num_experts", "expert_every") if name in given}
        if not shape.get("num_experts", config.num_experts):
            for name in ("expert_every", *given):
                if name in given or name in shape:
                    option = name.replace("_", "-")
                    raise UserError(f"--{option} is about experts, and the model has none: set --num-experts")
        mixture = replace(config.mixture, **{NAMES.get(name, name): value for name, value in given.items()})
        for name in ("second_expert", "normalize_gates"):
            if mixture.top_k == 1 and name in given:
                option = name.replace("_", "-")
                raise UserError(f"--{option} is about a token's second expert, and --top-k 1 has none")
        config = replace(config, **shape, mixture=mixture)
        if config.num_experts and not config.expert_layers:
            raise UserError(
                f"one layer in {config.expert_every} would have experts, and there are {config.num_layers}: lower "
                "--expert-every"
            )
        return config
