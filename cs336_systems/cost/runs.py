"""Published or measured runs, one JSON object each: read into a model, a plan and a machine.

Sizes and degrees are required. Every other key has a default in `DEFAULTS`: the likely choice of authors who do not
say what they chose. People write `"8"` for 8, 1 for true and `Selective` for selective, which is all read.
A value that cannot be read counts as absent, and a note says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.machines import DEFAULT_SYSTEM, Constants, System, nearest_system, read_json, system_preset
from cs336_systems.cost.plan import ENDS, RECOMPUTE, Plan
from cs336_systems.cost.plan_memory import fits
from cs336_systems.cost.shape import MOST, wider
from cs336_systems.cost.stacks import STACKS, Stack, usual_stack
from cs336_systems.cost.step_time import Case, step_time
from cs336_systems.cost.template import read_data
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig, model_preset

PUBLISHED = Path(__file__).parent / "data" / "published_runs.json"
OLDER = ("V100", "A100", "ThetaGPU")
LITTLE = 0.25  # of the microbatches: with more other stages than that, a pipeline fills and drains for long
MICRO_BATCHES = (1, 2, 4, 8, 16)

KEYS = read_data("data/run_keys")
REQUIRED, DEFAULTS = KEYS["required"], KEYS["others"]
# Values of some keys as words, with their meaning: recomputation and attention in the terms of `ModelConfig`.
FLAGS: dict[str, Any] = {"0": False, "1": True, "false": False, "true": True}
WORDS = {"recompute": RECOMPUTE, "attention": {"flash": "sdpa", "unfused": "naive"}}
WORDS |= dict.fromkeys(("sp", "gated", "fp8"), FLAGS)


def tidy(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the keys of a run: (values, as numbers, flags and words; a note on each that cannot be read).
    Raises UserError for a required key that is missing or is no whole number from 1 on."""
    found: dict[str, Any] = {}
    notes = []
    for key in (*REQUIRED, *DEFAULTS):
        if row.get(key) is None:
            continue
        value = _understood(key, row[key])
        if value is not None:
            found[key] = value
        elif key in REQUIRED:
            raise UserError(f"{key} ({REQUIRED[key]}) must be a number, not {row[key]!r}")
        elif _number(row[key]) != 0:
            notes.append(f"{key} {row[key]!r} is not understood, so it is taken as absent")
    if "dp" not in found and all(key in found for key in ("gpus", "tp", "pp")):
        copy = found["tp"] * found["pp"] * found.get("cp", 1)
        if found["gpus"] % copy:
            raise UserError(f"gpus {found['gpus']} is not a multiple of tp x pp x cp = {copy}, so dp cannot be derived")
        found["dp"] = found["gpus"] // copy
    if missing := [key for key in REQUIRED if key not in found]:
        raise UserError(f"{', '.join(missing)} missing: a run needs {', '.join(REQUIRED)}")
    return found, notes


def _understood(key: str, value: Any) -> Any:
    """A value of the key's kind, or None. Raises UserError for a count that is none."""
    if key in ("id", "gpu"):
        return value if isinstance(value, str) or key == "id" else None
    word, number = str(value).strip().lower(), _number(value)
    if key == "stack":
        return word if word in STACKS else None
    if key in WORDS:
        return WORDS[key].get(word)
    if key == "zero":
        return int(number) if number in (0, 1, 2, 3) else None
    if key in ("t_iter_s", "mem_gib"):
        return number if number and 0 < number <= MOST else None
    if number is None or (number == 0 and key not in REQUIRED):
        return None
    if not 1 <= number <= MOST or number != int(number):
        raise UserError(f"{key} must be a whole number from 1 to {MOST:.0e}, not {value}")
    return int(number)


def _number(value: Any) -> float | None:
    """A number, or a string of digits as one; None for anything else, also for NaN and Infinity, which Python reads."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class TrainingRun(Case):
    """A training run; `seconds` of a step are None where nobody measured it."""

    id: str
    seconds: float | None
    notes: tuple[str, ...] = ()
    gib: float | None = None  # measured memory of a rank
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)  # its row in a list of runs

    def under(self, constants: Constants) -> "TrainingRun":
        """Copy of the run, on the same machine with other constants."""
        return replace(self, system=STACKS[self.plan.stack].on(self.system, constants))

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less one; None where nobody measured."""
        return self.step.total / self.seconds - 1 if self.seconds else None

    @property
    def in_range(self) -> bool:
        """True if the measured time lies in the predicted range."""
        low, high = time_range(self.step)
        return self.seconds is not None and low <= self.seconds <= high


def read_runs(path: Path) -> list[TrainingRun]:
    """Read a list of runs in JSON. Raises UserError, naming file and run, for what cannot be read or run."""
    rows = read_json(path, "no list of runs")
    rows = [rows] if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of runs, each an object with {', '.join(REQUIRED)}")
    if not rows:
        raise UserError(f"{path} holds an empty list, and no run")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: entry {number} is {str(row)[:40]!r}, not an object with {', '.join(REQUIRED)}")
    return [read_run(row, f"run {number}") for number, row in enumerate(rows, 1)]


Family = tuple[bool, str, str, str, str]  # fitted, family, source, stack, machine


def families(runs: Iterable[TrainingRun], by_source: bool = False) -> dict[Family, list[TrainingRun]]:
    """Published runs by family, fitted ones first. Sources are only told apart if `by_source`, and else empty."""
    found: dict[Family, list[TrainingRun]] = {}
    for run in sorted(runs, key=lambda run: not run.given["fitted"]):
        named = run.given["family"], run.given["source"] if by_source else ""
        found.setdefault((run.given["fitted"], *named, run.plan.stack, run.system.name), []).append(run)
    return found


def left_out_errors(runs: Iterable[TrainingRun]) -> list[float]:
    """Errors of published runs by constants of a fit without their family or, where a stack has few, their model. Rows
    have the ratios, measured over predicted time, which `fitting.left_out` writes."""
    return [1 / run.given["left_out"] - 1 for run in runs]


def summed_up(errors: Iterable[float | None]) -> tuple[float, float, float]:
    """(mean size, mean, worst) of the errors of some runs, without those that nobody measured."""
    found = [each for each in errors if each is not None]
    return mean(map(abs, found)), mean(found), max(found, key=abs)


def read_run(given: Mapping[str, Any], name: str = "run") -> TrainingRun:
    """Read one run from its keys. Raises UserError, naming the run, for a missing key and for what does not divide."""
    name = str(given.get("id") or name)
    try:
        row, notes = tidy(given)
        found = nearest_system(row.get("gpu", DEFAULT_SYSTEM))
        system = found or system_preset(DEFAULT_SYSTEM)
        if not found:
            notes.append(f"gpu {row['gpu']!r} is not known: {system.name} is taken")
        between = replace(system.between, bandwidth=float(row.get("network", system.between.bandwidth)))
        system = replace(system, node=row.get("nvs", system.node), between=between)
        system.check_fp8(row.get("fp8", False))
        stack = STACKS[row.get("stack", usual_stack(row.get("zero", 0)))]
        system, config = stack.on(system), _config(row, system).override(kernels=stack.kernels)
        plan, seq = _plan(row, config, system, stack), config.context_length
        plan.check(config, seq)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if row.get("gpus", plan.ranks) != plan.ranks:
        notes.append(f"gpus {row['gpus']} is not tp x pp x dp x cp = {plan.ranks}, which is taken")
    said = {"id": name} | {key: value for key, value in given.items() if value is not None}
    return TrainingRun(config, plan, seq, system, name, row.get("t_iter_s"), tuple(notes), row.get("mem_gib"), said)


def _config(row: dict[str, Any], system: System) -> ModelConfig:
    h, a, seq = row["h"], row["a"], row["s"]
    ffn, kv, older = row.get("ffn", 4 * h), row.get("kv", a), system.name.startswith(OLDER)
    gated = row.get("gated", ffn != 4 * h)
    recompute = row.get("recompute", "segments" if older else "none")
    # Scores were in memory until FlashAttention came, about when gates, grouped queries and long sequences did.
    modern = not older or gated or kv != a or seq > 4096 or recompute == "none" or row.get("zero") == 3
    attention = row.get("attention", "sdpa" if modern else "naive")
    llama = gated or kv != a
    of_experts = ("top_k", "expert_ffn", "shared_ffn", "dense") if "experts" not in row else ()
    return wider(
        model_preset("llama-8b" if llama else "gpt3-175b"),  # for positions, biases, norms and the head
        **{name: row.get(key) for key, name in KEYS["model"].items() if key not in of_experts},
        d_ff=ffn,
        num_kv_heads=kv,
        feed_forward="swiglu" if gated else "gelu",
        dropout=0.0 if attention == "sdpa" else 0.1,
        attention=attention,
        recompute=recompute,
        kernels="triton",
        expert_every=1,
        shared_expert=True if "experts" in row and row.get("shared_ffn") else None,
    )


def _plan(row: dict[str, Any], config: ModelConfig, system: System, stack: Stack) -> Plan:
    tp, pp, dp, cp, batch = (row.get(key, 1) for key in ("tp", "pp", "dp", "cp", "gbs"))
    ep = row.get("ep", 1) if config.num_experts else 1
    if dp % ep:
        split = f", and experts are split over tp {tp} as well" if tp > 1 else ""
        raise UserError(f"dp {dp} is not a multiple of ep {ep}, whose ranks are among them{split}")
    splits = config.recompute != "segments" and config.context_length % (tp * cp) == 0
    chunks = min(round(config.num_layers / pp), (config.num_layers + ENDS) // pp)
    filling = pp - 1 > LITTLE * batch / (dp * row.get("mbs", 1))

    def plan(micro: int) -> Plan:
        interleaves = filling and pp > 1 and batch // (dp * micro) % pp == 0
        asked = Plan(
            **{name: row[name] for name in ("tp", "pp", "cp", "shard", "fp8") if name in row},
            dp=dp // ep,
            ep=ep,
            chunks=row.get("vpp", max(1, chunks) if interleaves else 1),
            sequence=row.get("sp", splits) and tp > 1,
            zero=row.get("zero", 0 if system.name.startswith(OLDER) else 1),
            micro_batch=micro,
            global_batch=batch,
            overlap=system.overlap,
            stack=stack.name,
        )
        return stack.shape(config, asked)[1]

    if "mbs" in row:
        return plan(row["mbs"])
    rounds, seq = pp if row.get("vpp", 1) > 1 else 1, config.context_length  # interleaved: in rounds of pp
    # If no size divides, the check of a microbatch of 1 says why.
    plans = [plan(size) for size in MICRO_BATCHES if batch % (dp * size * rounds) == 0] or [plan(1)]
    plans[0].check(config, seq)
    able = [each for each in plans if fits(config, each, seq, system)] or plans[:1]  # the first needs least memory
    return min(able, key=lambda each: step_time(config, each, seq, system).total)
