"""The 2026 edition's grid: FSDP along one axis and tensor parallelism along the other."""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import floor

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, quantity
from cs336_systems.cost.course.inequalities import (
    ASSUMED,
    EGRESS,
    HIDDEN,
    REAL,
    SPEED,
    WIDTH,
    check_layer,
    layer_symbols,
    verdict,
)
from cs336_systems.cost.course.rings import ring_seconds


def grid_times(B: int, D: int, F: int, X: float, Y: float, C: float, W: float) -> dict[str, float]:
    """Seconds of a forward pass on X (FSDP) by Y (TP) devices: compute, FSDP's gather, TP's all-reduce."""
    return {
        "compute": 6 * B * D * F / (X * Y * C),
        "fsdp": 6 * D * F / Y * (X - 1) / (X * W),
        "tp": 4 * B / X * D * (Y - 1) / (Y * W),
    }


_FSDP_TENSOR_PARALLEL = Question(
    "fsdp-tensor-parallel",
    "A grid of FSDP and tensor parallelism: how many devices?",
    (2026,),
    ("fsdp_tp_calcs",),
    "X devices shard weights and batch (FSDP), times Y that split the layer (TP). How large may X Y be in forward "
    "if the collectives of the two axes run at once, and if they cannot?",
    assumed=(
        *ASSUMED,
        "Each axis has W of its own. X and Y need not be whole numbers for the bounds.",
    ),
    departures=(
        *REAL,
        "X and Y are whole numbers, mostly powers of two, and Y stays inside a node.",
        "If a h or b h is less than 1, one axis alone is best without overlap: N <= 1 + max(a, b).",
    ),
)


def fsdp_tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, X: int = 8, Y: int = 4, C: float = SPEED, W: float = EGRESS
) -> Answer:
    """Forward on an X by Y grid, and the most devices with the two axes overlapped and not."""
    check_layer("fsdp-tensor-parallel", C, W, tokens=("X", X, "B", B), columns=("Y", Y, "F", F))
    a, b = B * W / C, 3 * F * W / (2 * C)
    overlapped, half = (1 + a) * (1 + b), (a * b + a + b) / (2 * a * b)
    # Where an axis would be shorter than one device, the other is alone.
    both = min(a, b) * half >= 1
    apart = a * b * half**2 if both else 1 + max(a, b)
    compute = grid_times(B, D, F, X, Y, C, W)["compute"]
    gather, reduce = ring_seconds(X, 6 * D * F / Y, W) / 2, ring_seconds(Y, 2 * B * D / X, W)
    return Answer(
        _FSDP_TENSOR_PARALLEL,
        (
            *layer_symbols(B, D, F, C, W),
            Symbol("X", "devices along the FSDP axis", X),
            Symbol("Y", "devices along the TP axis", Y),
        ),
        (
            Step("Each device takes B/X tokens and F/Y columns", "6 B D F/(X Y)", "forward_flops",
                 6 * B * D * F / (X * Y), "FLOP"),
            Step("which take", "6 B D F/(X Y C)", "compute", compute, "s"),
            Step("FSDP gathers this TP rank's part of the matrices, 6 D F/Y bytes", "6 D F/Y · (X - 1)/(X W)", "fsdp",
                 gather, "s"),
            Step("TP all-reduces this FSDP rank's tokens, 2 B D/X bytes", "4 B D/X · (Y - 1)/(Y W)", "tp", reduce,
                 "s"),
            Step("At once they take the longer", "max(…)", "together", max(gather, reduce), "s"),
            Step("FSDP over compute is (X - 1)/a with", "a = B W/C", "a", a),
            Step("TP over compute is (Y - 1)/b with", "b = 3 F W/(2 C)", "b", b),
            Step("Overlapped: X <= 1 + a and Y <= 1 + b, each by itself", "N <= (1 + a)(1 + b)", "largest_overlapped",
                 overlapped),
            Step("Not overlapped: (X - 1)/a + (Y - 1)/b <= 1, that is X/a + Y/b <= 2 h. For a given sum of X/a and "
                 "Y/b their product is largest if both are h", "h = (a b + a + b)/(2 a b)", "half", half),
            Step("so X is", "a h", "best_x", a * half),
            Step("and Y is", "b h", "best_y", b * half),
            Step("and N", "N <= (a b + a + b)²/(4 a b)", "largest_apart", apart) if both else
            Step("An axis of less than one device is no axis: the other is alone, and N", "N <= 1 + max(a, b)",
                 "largest_apart", apart),
            Step("Without overlap a grid reaches, of what it reaches with it", "", "apart_over_overlapped",
                 apart / overlapped, "%"),
        ),
        f"{_judged(X, Y, a, b)}. With the best X and Y, up to {quantity(floor(overlapped), 'devices')} overlapped, and "
        f"{floor(apart)} if not: for large a and b a quarter.",
    )  # fmt: skip


def _judged(X: int, Y: int, a: float, b: float) -> str:
    """Whether a grid hides its communication, whose times over compute are (X - 1)/a and (Y - 1)/b."""
    gather, reduce = (X - 1) / a, (Y - 1) / b
    longer, both = max(gather, reduce), gather + reduce
    return (
        f"On {X} by {Y} devices communication takes {quantity(longer, '%')} of compute's time if the axes overlap, "
        f"{verdict(longer <= 1)}, and {quantity(both, '%')} if not, {verdict(both <= 1)}"
    )
