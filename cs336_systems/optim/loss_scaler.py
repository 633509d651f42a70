"""Loss scaling: fp16 loses gradients below 6e-8, so the loss is multiplied by a factor and the gradients divided by it.

The factor is found by trial (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2). When it is
too large, gradients exceed fp16's 65504 and become inf or NaN: that step is skipped and the factor halved. After many
steps without overflow it is doubled.
"""

import math

from cs336_systems.errors import UserError


class LossScaler:
    """Constant loss scale, by default 1, for bf16 and fp32, whose range of exponents is large enough. `at_floor`: more
    overflows mean that training has diverged. Raises UserError for a scale that is not positive and finite."""

    saved: tuple[str, ...] = ()  # fields in a checkpoint; arguments of the constructor are not saved

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < math.inf:
            raise UserError(f"a loss scale must be positive and finite, not {scale}")
        self.scale = self.floor = scale

    @property
    def at_floor(self) -> bool:
        return self.scale <= self.floor

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a backward. `overflow`: a gradient of some rank was inf or NaN; skip that step then."""

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint. Raises UserError for the state of another kind of scaler, or an invalid scale."""
        if state.keys() - {"overflows"} != set(self.saved):  # earlier versions saved a count of them
            numbers = f"{sorted(state)}, this one {sorted(self.saved)}"
            raise UserError(f"the checkpoint's loss scaler has {numbers}: same precision?")


class DynamicLossScaler(LossScaler):
    """Megatron-LM v2.5's dynamic loss scale (its DynamicGradScaler, with its defaults).

    window        steps in a row without overflow after which the scale grows
    hysteresis    the first hysteresis - 1 overflows are tolerated, and every further one lowers the scale

    Only growth renews the tolerance. Raises UserError for arguments out of range."""

    saved = ("scale", "clean", "tolerance")

    def __init__(self, initial: float = 2.0**32, window: int = 1000, hysteresis: int = 2, floor: float = 1.0) -> None:
        if not 0 < floor <= initial < math.inf:
            raise UserError(f"a loss scale of {initial} with floor {floor}: want 0 < floor <= scale, and a finite one")
        if window < 1 or hysteresis < 1:
            raise UserError(f"loss scale window {window} and hysteresis {hysteresis} must both be 1 at least")
        super().__init__(initial)
        self.window, self.hysteresis, self.floor = window, hysteresis, floor
        self.clean = 0  # steps without overflow since the last overflow or growth
        self.tolerance = hysteresis  # the overflow that brings it to 0, and every one after, lowers the scale

    def update(self, overflow: bool) -> None:
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.tolerance = max(self.tolerance - 1, 0)
            if self.tolerance == 0:
                self.scale = max(self.scale / 2, self.floor)
        elif self.clean == self.window:
            self.clean, self.tolerance = 0, self.hysteresis
            self.scale *= 2

    def load_state_dict(self, state: dict[str, float]) -> None:
        super().load_state_dict(state)
        if not 0 < state["scale"] < math.inf:
            raise UserError(f"the checkpoint has a loss scale of {state['scale']}")
        # The constructor's arguments may differ from those of the saved run.
        self.scale = max(float(state["scale"]), self.floor)
        self.clean = min(int(state["clean"]), self.window - 1)
        self.tolerance = min(int(state["tolerance"]), self.hysteresis)
