"""The loss scaler against traces written out by hand from Megatron-LM v2.5's rules."""

import math

import pytest

from cs336_systems.errors import UserError
from cs336_systems.optim.loss_scaler import DynamicLossScaler, LossScaler

OVERFLOW, CLEAN = True, False


def trace(scaler: LossScaler, steps: list[bool]) -> list[float]:
    """The scale after each step."""
    scales = []
    for overflow in steps:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


TRACES = {
    "17 overflows from 2^32 to 2^16": ({}, [OVERFLOW] * 17, [2.0**k for k in (32, *range(31, 15, -1))]),
    "growth after the window exactly, and after another": (
        {"initial": 8.0}, [CLEAN] * 2000, [8.0] * 999 + [16.0] * 1000 + [32.0],
    ),
    "an overflow that is tolerated restarts the count": (
        {"initial": 8.0, "window": 3}, [CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN], [8.0] * 5 + [16.0],
    ),
    "clean steps renew no tolerance": (
        {"initial": 1024.0, "window": 3},
        [OVERFLOW, CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, OVERFLOW],
        [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0],
    ),
    "growth renews the tolerance": (
        {"initial": 512.0, "window": 3, "hysteresis": 2},
        [OVERFLOW, OVERFLOW, CLEAN, CLEAN, CLEAN, OVERFLOW, OVERFLOW],
        [512.0, 256.0, 256.0, 256.0, 512.0, 512.0, 256.0],
    ),
    **{
        f"hysteresis {n} tolerates {n - 1} overflows": (
            {"initial": 1024.0, "hysteresis": n}, [OVERFLOW] * 5, [1024.0 / 2 ** max(0, i - n + 2) for i in range(5)],
        )
        for n in (1, 2, 4, 6)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_the_scale_after_each_step(name):
    options, steps, scales = TRACES[name]
    assert trace(DynamicLossScaler(**options), steps) == scales


def test_the_scale_stays_at_its_floor():
    scaler = DynamicLossScaler(initial=12.0, hysteresis=1, floor=2.0)
    assert trace(scaler, [OVERFLOW, OVERFLOW]) == [6.0, 3.0]
    assert not scaler.at_floor
    assert trace(scaler, [OVERFLOW] * 3) == [2.0] * 3  # not 1.5
    constant = LossScaler(128.0)
    assert trace(constant, [OVERFLOW] * 3 + [CLEAN]) == [128.0] * 4
    assert scaler.at_floor
    assert constant.at_floor
    constant.load_state_dict(constant.state_dict() | {"overflows": 3})  # which earlier versions counted
    assert constant.scale == 128.0


def test_a_checkpoint_made_with_other_settings_is_fitted_to_them():
    saved = DynamicLossScaler(initial=4.0, window=1000, hysteresis=5)
    trace(saved, [CLEAN] * 500)
    scaler = DynamicLossScaler(initial=64.0, window=10, hysteresis=1, floor=8.0)
    scaler.load_state_dict(saved.state_dict())
    assert scaler.scale == 8.0
    assert trace(scaler, [CLEAN, OVERFLOW]) == [16.0, 8.0]


def test_settings_out_of_range_are_refused():
    for options, words in (
        ({"initial": 0.5}, "loss scale of 0.5 with floor 1.0"),
        ({"initial": math.inf}, "loss scale of inf"),
        ({"initial": math.nan}, "loss scale of nan"),
        ({"floor": 0.0}, "floor 0.0"),
        ({"window": 0}, "window 0 and hysteresis 2"),
        ({"hysteresis": 0}, "window 1000 and hysteresis 0"),
    ):
        with pytest.raises(UserError, match=words):
            DynamicLossScaler(**options)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="positive and finite"):
            LossScaler(bad)
        with pytest.raises(UserError, match="the checkpoint has a loss scale of"):
            DynamicLossScaler().load_state_dict(DynamicLossScaler().state_dict() | {"scale": bad})
    for scaler, other in ((LossScaler(), DynamicLossScaler()), (DynamicLossScaler(), LossScaler())):
        with pytest.raises(UserError, match="same precision"):
            scaler.load_state_dict(other.state_dict())
