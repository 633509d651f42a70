"""Loss scaling: fp16 gradients below 6e-8 would be lost, so the loss is made larger and the gradients smaller again.

The right factor is found by trial (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2): too
large a factor overflows fp16's 65504, which shows as inf or NaN; that step is skipped and the factor halved. After a
long time without overflow it is doubled.
"""

import math
from typing import Protocol

from cs336_systems.errors import UserError


class LossScaler(Protocol):
    """The factor of the loss, told after each backward whether any gradient on any rank was inf or NaN."""

    @property
    def scale(self) -> float:
        """The factor by which the next loss is multiplied, and its gradients divided."""

    @property
    def overflows(self) -> int:
        """Overflows in a row, up to now."""

    @property
    def at_floor(self) -> bool:
        """Whether the factor can fall no further, so that more overflows in a row mean that training has diverged."""

    def update(self, overflow: bool) -> None:
        """Take notice of a step."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""


class ConstantScale:
    """A factor that never changes: 1 for bf16 and fp32, whose exponents reach as far as gradients do.

    Raises UserError for a factor that is not positive and finite.
    """

    at_floor = True

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < math.inf:
            raise UserError(f"a loss scale must be positive and finite, not {scale}")
        self.scale, self.overflows = scale, 0

    def update(self, overflow: bool) -> None:
        """Count overflows in a row, for a caller that wants to stop."""
        self.overflows = self.overflows + 1 if overflow else 0

    def state_dict(self) -> dict[str, float]:
        """The count; the factor is a setting."""
        return {"overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the count. Raises UserError for a state of another kind."""
        _require(state, self.state_dict())
        self.overflows = int(state["overflows"])


class DynamicLossScaler:
    """Megatron-LM v2.5's dynamic loss scale (its DynamicGradScaler, with its defaults).

    window        steps in a row without overflow after which the scale grows
    hysteresis    the first hysteresis - 1 overflows are tolerated, and every further one lowers the scale

    Only growth renews the tolerance. With hysteresis 2 it takes 17 overflows from 2^32 to 2^16: one that is tolerated
    and 16 halvings. Raises UserError for settings out of range.
    """

    def __init__(
        self,
        initial: float = 2.0**32,
        window: int = 1000,
        hysteresis: int = 2,
        floor: float = 1.0,
        growth: float = 2.0,
        backoff: float = 0.5,
    ) -> None:
        if not 0 < floor <= initial < math.inf:
            raise UserError(f"a loss scale of {initial} with floor {floor}: want 0 < floor <= scale, and a finite one")
        if window < 1 or hysteresis < 1:
            raise UserError(f"loss scale window {window} and hysteresis {hysteresis} must both be 1 at least")
        if not (1 < growth < math.inf and 0 < backoff < 1):
            raise UserError(f"a loss scale grows by more than 1, not {growth}, and falls by less than 1, not {backoff}")
        self.window, self.hysteresis, self.floor, self.growth, self.backoff = window, hysteresis, floor, growth, backoff
        self.scale = initial
        self.clean = 0  # steps without overflow since the last overflow or growth
        self.tolerance = hysteresis  # the overflow that brings it to 0, and every one after, lowers the scale
        self.overflows = 0  # in a row

    @property
    def at_floor(self) -> bool:
        """Whether the scale can fall no further."""
        return self.scale <= self.floor

    def update(self, overflow: bool) -> None:
        """Lower or raise the scale after a step, which the caller skips if it has overflowed."""
        if overflow:
            self.overflows += 1
            self.clean = 0
            self.tolerance = max(self.tolerance - 1, 0)
            if self.tolerance == 0:
                self.scale = max(self.scale * self.backoff, self.floor)
            return
        self.overflows = 0
        self.clean += 1
        if self.clean == self.window:
            self.clean, self.tolerance = 0, self.hysteresis
            self.scale *= self.growth

    def state_dict(self) -> dict[str, float]:
        """The scale and the three counters; what the constructor was given are settings."""
        return {
            "scale": self.scale,
            "clean": self.clean,
            "tolerance": self.tolerance,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint. Raises UserError for a state of another kind or a scale that is no scale."""
        _require(state, self.state_dict())
        if not 0 < state["scale"] < math.inf:
            raise UserError(f"the checkpoint has a loss scale of {state['scale']}")
        # The settings may have been changed since.
        self.scale = max(float(state["scale"]), self.floor)
        self.clean = min(int(state["clean"]), self.window - 1)
        self.tolerance = min(int(state["tolerance"]), self.hysteresis)
        self.overflows = int(state["overflows"])


def _require(state: dict[str, float], like: dict[str, float]) -> None:
    if state.keys() != like.keys():
        raise UserError(f"the checkpoint's loss scaler has {sorted(state)}, this one {sorted(like)}: same precision?")
