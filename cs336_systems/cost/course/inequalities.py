"""The 2026 edition's inequalities: how many devices a strategy can use before communication takes longer than compute.

One gated feed-forward layer with three D by F matrices, numbers of two bytes, a batch of B tokens over all devices.
"""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import floor

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.cost.course.rings import ring_seconds
from cs336_systems.cost.large.systems import system_preset
from cs336_systems.presets import model_preset

_MODEL, SYSTEM = model_preset("xl", 2026), system_preset("H100")
WIDTH, HIDDEN, SPEED, EGRESS = _MODEL.d_model, _MODEL.d_ff, SYSTEM.matmul_flops, SYSTEM.inside.bandwidth
ASSUMED = (
    "Only matrix products cost compute, at full speed; a product of (m, k) and (k, n) is 2 m k n FLOPs.",
    "Collectives are rings without latency, and each hides behind the compute of the same pass.",
    "Communication is no bottleneck while it takes no longer than compute.",
)
REAL = (
    "A product's first weights or last gradients have nothing to hide behind, and latency grows with N.",
    "Products of a small B/N or F/N do not reach C, which moves the boundary outward and the speed down.",
    "Beyond one node W falls by an order of magnitude, and so does the bound.",
)


def layer_symbols(B: int, D: int, F: int, C: float, W: float) -> tuple[Symbol, ...]:
    """The symbols that all of these questions share."""
    return (
        Symbol("B", "tokens over all devices", B),
        Symbol("D", "d_model (default: the xl of 2026)", D),
        Symbol("F", "d_ff", F),
        Symbol("C", "speed of a device (default: H100, dense bf16)", C, "FLOP/s"),
        Symbol("W", "bytes/s out of a device (default: its NVLink, one direction)", W, "B/s"),
    )


def check_layer(name: str, C: float, W: float, **shares: tuple[str, int, str, int]) -> None:
    """Refuse a device slower than its link, and devices that get less than one token or column.

    A share is a letter and a count of devices, and a letter and a count of what they divide.
    """
    require(C >= 2 * W, f"{name}: C = {given(C)} FLOP/s is too slow for W = {given(W)} B/s; C must be at least 2 W")
    for what, (devices, count, whole, size) in shares.items():
        require(
            count <= size,
            f"{name}: {devices} = {given(count)} devices get less than one of {whole} = {given(size)} {what}; "
            f"{devices} must be at most {whole}",
        )


def verdict(holds: bool) -> str:
    """What is concluded of communication that does or does not take at most as long as compute."""
    return "hidden" if holds else "not hidden"


_DATA_PARALLEL = Question(
    "data-parallel",
    "Data parallelism: until when is communication hidden?",
    (2026,),
    ("data_parallel_calcs",),
    "Each of N devices takes B/N tokens. How many FLOPs and how much communication does backward take, and how "
    "large may N be?",
    assumed=ASSUMED,
    departures=REAL,
)


def data_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 8, C: float = SPEED, W: float = EGRESS
) -> Answer:
    """Backward of N-way data parallelism: FLOPs, seconds of the all-reduce, and the largest N."""
    check_layer("data-parallel", C, W, tokens=("N", N, "B", B))
    devices = floor(1 + B * W / C)
    compute, communication = 12 * B * D * F / (N * C), ring_seconds(N, 6 * D * F, W)
    return Answer(
        _DATA_PARALLEL,
        (
            *layer_symbols(B, D, F, C, W),
            Symbol("N", "devices", N),
        ),
        (
            Step("Each product of forward has two in backward, for its input and its weight: six of 2 D F FLOPs a "
                 "token", "12 B D F/N", "backward_flops", 12 * B * D * F / N, "FLOP"),
            Step("which take", "12 B D F/(N C)", "backward_compute", compute, "s"),
            Step("Three gradients of D F numbers in 2 bytes", "S = 6 D F", "gradient_bytes", 6 * D * F, "B"),
            Step("are all-reduced, 2 (N - 1)/N · S/W", "12 D F (N - 1)/(N W)", "backward_communication", communication,
                 "s"),
            Step("Communication over compute", "(N - 1) C/(B W)", "share", communication / compute, "%"),
            Step("so it is hidden while N - 1 <= B W/C, whatever D and F are; N may be up to", "1 + B W/C", "largest",
                 1 + B * W / C),
            Step("and the devices are", "", "devices", devices, "devices"),
        ),
        f"With N = {N} the all-reduce takes {quantity(communication / compute, '%')} of backward's compute time, so it "
        f"is {verdict(devices >= N)}: N - 1 <= B W/C allows up to {quantity(devices, 'devices')}. Forward has no "
        "communication at all.",
    )  # fmt: skip


_FSDP = Question(
    "fsdp",
    "Fully sharded data parallelism: until when is communication hidden?",
    (2026,),
    ("fsdp_calcs",),
    "Weights too are sharded over the N devices, gathered before forward and again before backward, and gradients "
    "are reduce-scattered. The same questions, for both passes.",
    assumed=ASSUMED,
    departures=(
        *REAL,
        "Without a second gather in backward (weights kept) its bytes halve, and memory pays.",
    ),
)


def fsdp(B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 8, C: float = SPEED, W: float = EGRESS) -> Answer:
    """Forward and backward with weights sharded over N: FLOPs, seconds, and the largest N."""
    check_layer("fsdp", C, W, tokens=("N", N, "B", B))
    devices = floor(1 + B * W / C)
    gather = ring_seconds(N, 6 * D * F, W) / 2
    forward = 6 * B * D * F / (N * C)
    return Answer(
        _FSDP,
        (
            *layer_symbols(B, D, F, C, W),
            Symbol("N", "devices", N),
        ),
        (
            Step("Forward: three products of 2 D F FLOPs a token", "6 B D F/N", "forward_flops", 6 * B * D * F / N,
                 "FLOP"),
            Step("which take", "6 B D F/(N C)", "forward_compute", forward, "s"),
            Step("Three matrices of 2 D F bytes are gathered, (N - 1)/N · S/W", "6 D F (N - 1)/(N W)",
                 "forward_communication", gather, "s"),
            Step("Backward: six products", "12 B D F/N", "backward_flops", 12 * B * D * F / N, "FLOP"),
            Step("which take", "12 B D F/(N C)", "backward_compute", 2 * forward, "s"),
            Step("The matrices are gathered again, and gradients as large are reduce-scattered",
                 "12 D F (N - 1)/(N W)", "backward_communication", 2 * gather, "s"),
            Step("Both passes have the same ratio", "(N - 1) C/(B W)", "share", gather / forward, "%"),
            Step("so N may be up to", "1 + B W/C", "largest", 1 + B * W / C),
            Step("and the devices are", "", "devices", devices, "devices"),
            Step("A step sends, beside data parallelism's 12 D F (N - 1)/N bytes", "18 D F (N - 1)/N", "step_bytes",
                 18 * D * F * (N - 1) / N, "B"),
        ),
        f"With N = {N} communication takes {quantity(gather / forward, '%')} of compute's time in both passes, so it "
        f"is {verdict(devices >= N)}: N - 1 <= B W/C, as in data parallelism, allows up to "
        f"{quantity(devices, 'devices')}.",
    )  # fmt: skip


_TENSOR_PARALLEL = Question(
    "tensor-parallel",
    "Tensor parallelism: until when is communication hidden?",
    (2026,),
    ("tp_calcs",),
    "y = (f(x W₁) ∘ (x W₂)) W₃ with the columns of W₁ and W₂ and the rows of W₃ split over N devices. What is "
    "backward, and how do compute and communication compare?",
    assumed=(
        *ASSUMED,
        "Every device has all B tokens of x, and gets all of dy.",
    ),
    departures=(
        *REAL,
        "The next layer needs y, so this all-reduce hides behind nothing unless the batch is cut in two.",
    ),
)


def tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 4, C: float = SPEED, W: float = EGRESS
) -> Answer:
    """Forward and backward with the hidden width split over N: FLOPs, seconds, and the largest N."""
    check_layer("tensor-parallel", C, W, columns=("N", N, "F", F))
    ways = {"forward": floor(1 + 3 * F * W / (2 * C)), "backward": floor(1 + 3 * F * W / C)}
    forward, reduce = 6 * B * D * F / (N * C), ring_seconds(N, 2 * B * D, W)
    return Answer(
        _TENSOR_PARALLEL,
        (
            *layer_symbols(B, D, F, C, W),
            Symbol("N", "devices", N),
        ),
        (
            Step("Forward on device i, with its columns and rows",
                 "y⁽ⁱ⁾ = (f(x W₁⁽ⁱ⁾) ∘ (x W₂⁽ⁱ⁾)) W₃⁽ⁱ⁾, y = all-reduce(y⁽ⁱ⁾)"),
            Step("Backward starts from dy, which is whole", "dz⁽ⁱ⁾ = dy W₃⁽ⁱ⁾ᵀ, dW₃⁽ⁱ⁾ = z⁽ⁱ⁾ᵀ dy"),
            Step("Element by element", "dx₂⁽ⁱ⁾ = dz⁽ⁱ⁾ ∘ f(x₁⁽ⁱ⁾), dx₁⁽ⁱ⁾ = dz⁽ⁱ⁾ ∘ f'(x₁⁽ⁱ⁾) ∘ x₂⁽ⁱ⁾"),
            Step("Weights' gradients are local", "dW₁⁽ⁱ⁾ = xᵀ dx₁⁽ⁱ⁾, dW₂⁽ⁱ⁾ = xᵀ dx₂⁽ⁱ⁾"),
            Step("The input's is a sum over devices; both products are added first, so one all-reduce is enough",
                 "dx = all-reduce(dx₁⁽ⁱ⁾ W₁⁽ⁱ⁾ᵀ + dx₂⁽ⁱ⁾ W₂⁽ⁱ⁾ᵀ)"),
            Step("Forward", "6 B D F/N", "forward_flops", 6 * B * D * F / N, "FLOP"),
            Step("which take", "6 B D F/(N C)", "forward_compute", forward, "s"),
            Step("y has B D numbers of 2 bytes; their all-reduce takes", "4 B D (N - 1)/(N W)",
                 "forward_communication", reduce, "s"),
            Step("Backward", "12 B D F/N", "backward_flops", 12 * B * D * F / N, "FLOP"),
            Step("which take", "12 B D F/(N C)", "backward_compute", 2 * forward, "s"),
            Step("dx is as large as y", "4 B D (N - 1)/(N W)", "backward_communication", reduce, "s"),
            Step("Forward is hidden while N - 1 <= 3 F W/(2 C), whatever B and D are; N may be up to",
                 "1 + 3 F W/(2 C)", "largest_forward", 1 + 3 * F * W / (2 * C)),
            Step("Backward has twice the compute for the same bytes", "1 + 3 F W/C", "largest_backward",
                 1 + 3 * F * W / C),
        ),
        f"With N = {N} communication takes {quantity(reduce / forward, '%')} of compute's time forward, "
        f"{verdict(ways['forward'] >= N)}, and {quantity(reduce / forward / 2, '%')} backward, "
        f"{verdict(ways['backward'] >= N)}; up to {quantity(min(F, ways['forward']), 'devices')} forward and "
        f"{quantity(min(F, ways['backward']), 'devices')} backward: the wider the layer the more, and no batch helps.",
    )  # fmt: skip
