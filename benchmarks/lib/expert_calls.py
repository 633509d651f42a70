"""Calls and times by name that the profiler counts during an evaluation; the published numbers.

fairseq's eval_lm was profiled on a 15B mixture of experts: four V100 evaluated five batches of one block of 2048 tokens
each, 12 layers, every second with 512 experts, of which a rank has 128. Every matrix product of that is determined
(`expected`), so a formulation that computes the same things has the same numbers, whatever its width and its hardware.
The figures are those of the published table of rank 1.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import line_up
from benchmarks.lib.expert_scores import ATTENTION, DECODER, MOE, RUN, WITH, WITHOUT, How, Scorer, Tally, tagged
from cs336_systems.comm import agree
from cs336_systems.presets import Dispatch, ModelConfig
from cs336_systems.profiling import Capture
from cs336_systems.profiling.capture import quiet_profiler
from cs336_systems.profiling.names import parse_collective, parse_tag, step_number

Calls = dict[str, list[int]]  # by name: how many, and nanoseconds in all
RANKS, BATCHES = 4, 5
ALL_TO_ALL = "launch all-to-all"  # in the published table it is NCCL's kernel
# Equal by construction; then what it depends on how one reads words and which torch it is.
PUBLISHED = {
    "aten::addmm": 7740, "aten::linear": 8015, "aten::matmul": 275, "aten::mm": 335, "aten::gelu": 3870,
    "aten::bmm": 180, ALL_TO_ALL: 60, DECODER: 5, WITH: 30, WITHOUT: 30, ATTENTION: 60, MOE: 30,
}  # fmt: skip
OF_WORDS = {"aten::item": 40_995, "aten::select": 51_220}


def expected(config: ModelConfig, ranks: int, batches: int) -> dict[str, tuple[int, str]]:
    """(calls, why so many) of each operator in the one-hot formulation, on each of `ranks` expert-parallel ranks;
    nothing for a model with other matrices than fairseq's."""
    if (config.bias, config.feed_forward, config.attention) != (True, "gelu", "naive") or config.mixture.shared_expert:
        return {}
    layers, mixed = config.num_layers, config.expert_layers
    dense, local = layers - mixed, config.num_experts // ranks
    addmm, apart = batches * 2 * (mixed * local + dense), batches * (4 * layers + mixed + 1)
    all_to_all = 2 * mixed * batches if ranks > 1 else 0
    top_k, spans = config.mixture.top_k, {WITH: mixed, WITHOUT: dense, ATTENTION: layers, MOE: mixed}
    return {
        "aten::addmm": (addmm, f"{batches} x 2 x ({mixed} layers x {local} experts + {dense} dense)"),
        "aten::linear": (addmm + apart, f"addmm + {batches} x (4 x {layers} attention + {mixed} routers + 1)"),
        "aten::matmul": (apart, "linear layers whose bias is not part of the product"),
        "aten::mm": (apart + 2 * mixed * batches, f"matmul + 2 one-hot products x {mixed} x {batches}"),
        "aten::gelu": (addmm // 2, "one between two addmm"),
        "aten::bmm": (
            batches * (2 * layers + top_k * mixed),
            f"{batches} x (2 x {layers} attention + {top_k} outer products x {mixed})",
        ),
        ALL_TO_ALL: (all_to_all, f"there and back, {mixed} x {batches}"),
        DECODER: (batches, "batches"),
        **{name: (count * batches, f"{count} x {batches}") for name, count in spans.items()},
    }


def count_calls(
    scorer: Scorer, batches: int, how: How, size: str, dispatch: Dispatch, folder: Path | None
) -> list[Calls]:
    """Score some batches under the profiler: each rank's calls, the same on every rank, all of which must call this.
    With a folder every rank leaves its trace there. Counts what `key_averages` does, without a Python object for each
    of hundreds of thousands of events."""
    tally, world, device = Tally(dispatch), scorer.mesh.world, scorer.device

    def score() -> None:
        line_up(world, device)
        with tagged(scorer.model), record_function(RUN):
            for number in range(batches):
                with record_function(f"step {number}"), record_function("forward"):
                    scorer.take(number, tally, how)

    if folder is not None:
        about = {"size": f"{size}, {dispatch}", "device": device.type}
        with Capture(folder, world, scorer.model, steps=batches, device=device, meta=about) as capture:
            score()
        run = capture.profiler
    else:
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
        with quiet_profiler(), profile(activities=activities) as run:
            score()
    return [json.loads(said) for said in agree("calls", json.dumps(calls_of(run), allow_nan=False), world)]


def calls_of(run: profile) -> Calls:
    """Calls by name on the host, and the nanoseconds of all. Numbered collectives count by verb; steps and modules,
    which only the merged trace shows, do not count."""
    assert run.profiler is not None
    assert run.profiler.kineto_results is not None
    found: Calls = defaultdict(lambda: [0, 0])
    for event in run.profiler.kineto_results.events():
        name = event.name()
        if not name.startswith("aten::"):
            if collective := parse_collective(name):
                name = f"{collective.action} {collective.verb}"
            if event.device_type() != DeviceType.CPU or parse_tag(name) or step_number(name) is not None:
                continue
        entry = found[name]
        entry[0] += 1
        entry[1] += event.duration_ns()
    return found


def spread(counts: Sequence[int]) -> str:
    """`7,740`, or `7,740 to 7,800` where ranks differ."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
