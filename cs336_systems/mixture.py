"""The settings of expert layers: how a router chooses, how much an expert takes, how it is computed.

The words are GShard's (Lepikhin et al., arXiv:2006.16668, section 2.2) and fairseq's (branch moe), whose options they
stand for. No torch here, so that the analytic model (cost/) can read them without loading it.
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Literal, get_args

from cs336_systems.errors import UserError

SecondPolicy = Literal["all", "sampling", "random"]
Normalize = Literal["after", "before"]
AuxScope = Literal["local", "global"]
Dispatch = Literal["sort", "einsum"]
ExpertGradient = Literal["exact", "sqrt"]


@dataclass(frozen=True)
class Mixture:
    """How expert layers route tokens; checked on construction.

    Raises UserError for a choice that does not exist and a number out of range.
    """

    top_k: int = 2  # experts that a token is sent to; 1 is Switch Transformer's (arXiv:2101.03961)
    expert_d_ff: int = 0  # hidden width of an expert; 0: the model's d_ff
    gating_fp32: bool = True  # logits and probabilities in float32 at least, whatever the stream's precision
    second_policy: SecondPolicy = "all"  # in training: noise before the second choice; drop an improbable one
    normalize: Normalize = "after"  # top_k 2: the two weights add up to one before or after tokens are dropped
    capacity_factor: float = 0.0  # in training an expert takes factor x ceil(tokens / experts); 0: all (dropless)
    eval_fraction: float = 0.0  # in evaluation ceil(fraction x tokens); 0: as in training
    mask_padding: bool = False  # padded tokens are sent to no expert
    prioritized: bool = False  # the surest tokens take the slots, not the first ones (arXiv:2106.05974, section 4)
    aux_weight: float = 0.01  # of the balancing loss, a layer
    aux_scope: AuxScope = "local"  # balance within a rank's microbatch, or over those of all ranks
    shared_expert: bool = False  # an expert of the dense width that every token passes through as well
    dispatch: Dispatch = "sort"  # einsum: the one-hot formulation, with an expert at a time
    expert_gradient: ExpertGradient = "exact"  # sqrt: larger by the root of the ranks, fairseq's heuristic

    def __post_init__(self) -> None:
        if self.top_k not in (1, 2):
            raise UserError(f"a token is sent to 1 or 2 experts, not {self.top_k}")
        for name, choices in (
            ("second_policy", SecondPolicy),
            ("normalize", Normalize),
            ("aux_scope", AuxScope),
            ("dispatch", Dispatch),
            ("expert_gradient", ExpertGradient),
        ):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise UserError(f"{name} {getattr(self, name)!r} does not exist; choose from {known}")
        for name in ("expert_d_ff", "capacity_factor", "aux_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a finite number of at least 0, not {getattr(self, name)}")
        if not 0 <= self.eval_fraction <= 1:
            raise UserError(f"eval_fraction must lie in [0, 1], not {self.eval_fraction}")

    def capacity(self, tokens: int, experts: int, training: bool) -> int | None:
        """Slots of an expert for a group of tokens, rounded up in evaluation and down in training, one at least and no
        more than tokens; None: as many as are needed. The group is what one rank routes at once, but the experts are
        all that there are, as in fairseq.
        """
        # Rounded to what was meant first: in floats 0.05 x 2060 is more than 103, and 1.15 x 100 less than 115.
        if not training and self.eval_fraction:
            return min(tokens, max(1, ceil(round(self.eval_fraction * tokens, 6))))
        if not self.capacity_factor:
            return None
        asked = min(tokens, self.capacity_factor * ceil(tokens / experts))
        return min(tokens, max(1, floor(round(asked, 6))))

    @property
    def is_random(self) -> bool:
        """Whether training routes with random numbers."""
        return self.top_k == 2 and self.second_policy != "all"
