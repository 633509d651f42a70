"""Published or measured runs, one JSON object each: read into a model, a plan and a machine.

Sizes and degrees are required. What else a run may say has a default, which `run_rows.DEFAULTS` states: where its
authors chose and did not tell, what they would have chosen.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs336_systems.cost.large.plan import ENDS, Plan
from cs336_systems.cost.large.plan_memory import fits
from cs336_systems.cost.large.run_rows import LITTLE, MICRO_BATCHES, REQUIRED, tidy
from cs336_systems.cost.large.settings import RECOMPUTE
from cs336_systems.cost.large.step_time import step_time
from cs336_systems.cost.large.systems import DEFAULT_SYSTEM, System, nearest_system, system_preset
from cs336_systems.errors import UserError
from cs336_systems.mixture import Mixture
from cs336_systems.presets import ModelConfig

OLDER = ("V100", "A100", "ThetaGPU")
PUBLISHED = Path(__file__).parent / "data" / "published_runs.json"


@dataclass(frozen=True)
class Run:
    """One run; `seconds` is None where nobody measured it."""

    id: str
    config: ModelConfig
    plan: Plan
    seq: int
    system: System
    seconds: float | None
    notes: tuple[str, ...] = ()
    key: object = None  # its id as it was given, a number perhaps


def read_runs(path: Path) -> list[Run]:
    """The runs of a file, a list in JSON. Raises UserError, naming file and run, for what cannot be read or run."""
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    rows = [rows] if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of runs, each an object with {', '.join(REQUIRED)}")
    if not rows:
        raise UserError(f"{path} holds an empty list, and no run")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: entry {number} is {str(row)[:40]!r}, not an object with {', '.join(REQUIRED)}")
    return [read_run(row, f"run {number}") for number, row in enumerate(rows, 1)]


def read_run(given: Mapping[str, Any], name: str = "run") -> Run:
    """One run from its keys. Raises UserError, naming the run, for a required key that is missing and for sizes or
    degrees that do not divide."""
    name = str(given.get("id") or name)
    try:
        row, notes = tidy(given)
        system = _system(row, notes)
        config = _config(row, system)
        plan = _plan(row, config, system)
        plan.check(config, config.context_length)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if row.get("gpus", plan.ranks) != plan.ranks:
        notes.append(f"gpus {row['gpus']} is not tp x pp x dp x cp = {plan.ranks}, which is taken")
    return Run(
        name, config, plan, config.context_length, system, row.get("t_iter_s"), tuple(notes), row.get("id", name)
    )


def _system(row: dict[str, Any], notes: list[str]) -> System:
    found = nearest_system(row.get("gpu", DEFAULT_SYSTEM))
    system = found or system_preset(DEFAULT_SYSTEM)
    if not found:
        notes.append(f"gpu {row['gpu']!r} is not known: {system.name} is taken")
    between = replace(system.between, bandwidth=float(row.get("network", system.between.bandwidth)))
    return replace(system, node=row.get("nvs", system.node), between=between)


def _config(row: dict[str, Any], system: System) -> ModelConfig:
    h, a, seq = row["h"], row["a"], row["s"]
    ffn, kv, older = row.get("ffn", 4 * h), row.get("kv", a), system.name.startswith(OLDER)
    gated = row.get("gated", ffn != 4 * h)
    recompute: Any = RECOMPUTE[row.get("recompute", "full" if older else "none")]
    # Scores were in memory until FlashAttention came, about when gates, grouped queries and long sequences did.
    modern = not older or gated or kv != a or seq > 4096 or recompute == "none" or row.get("zero") == 3
    fused = row["attention"] == "flash" if "attention" in row else modern
    llama = gated or kv != a
    return ModelConfig(
        vocab_size=row["V"],
        context_length=seq,
        d_model=h,
        d_ff=ffn,
        num_layers=row["L"],
        num_heads=a,
        num_kv_heads=kv,
        positions="rotary" if llama else "learned",
        bias=not llama,
        norm="rmsnorm" if llama else "layernorm",
        feed_forward="swiglu" if gated else "gelu",
        tied_head=not llama,
        dropout=0.0 if fused else 0.1,
        attention="sdpa" if fused else "naive",
        recompute=recompute,
        # Sharded data parallelism came with plain torch, tensor parallelism with fused kernels.
        kernels="torch" if row.get("zero") == 3 else "triton",
        num_experts=row.get("experts", 0),
        expert_every=1,
        mixture=Mixture(top_k=row.get("top_k", 2)),
    )


def _plan(row: dict[str, Any], config: ModelConfig, system: System) -> Plan:
    tp, pp, dp, cp, batch = (row.get(key, 1) for key in ("tp", "pp", "dp", "cp", "gbs"))
    ep = row.get("ep", 1) if config.num_experts else 1
    if dp % ep:
        raise UserError(f"dp {dp} is not a multiple of ep {ep}, whose ranks are among them")
    splits = config.recompute != "segments" and config.context_length % (tp * cp) == 0
    chunks = min(round(config.num_layers / pp), (config.num_layers + ENDS) // pp)
    filling = pp - 1 > LITTLE * batch / (dp * row.get("mbs", 1))

    def plan(micro: int) -> Plan:
        interleaves = filling and pp > 1 and batch // (dp * micro) % pp == 0
        return Plan(
            tp=tp,
            pp=pp,
            dp=dp // ep,
            ep=ep,
            cp=cp,
            chunks=row.get("vpp", max(1, chunks) if interleaves else 1),
            sequence=row.get("sp", splits) and tp > 1,
            zero=row.get("zero", 0 if system.name.startswith(OLDER) else 1),
            micro_batch=micro,
            global_batch=batch,
            overlap=system.overlap,
        )

    if "mbs" in row:
        return plan(row["mbs"])
    rounds = pp if row.get("vpp", 1) > 1 else 1  # interleaved stages take their microbatches in rounds
    return _fastest([plan(size) for size in _dividing(batch, dp, rounds)], config, system)


def _dividing(batch: int, replicas: int, rounds: int) -> list[int]:
    """Sizes of a microbatch of which a batch gives each replica so many, or a multiple; 1 if none does, which the plan
    then refuses in words."""
    return [size for size in MICRO_BATCHES if batch % (replicas * size * rounds) == 0] or [1]


def _fastest(plans: list[Plan], config: ModelConfig, system: System) -> Plan:
    """The fastest of the plans that fit; the first, which needs least, if none does."""
    seq = config.context_length
    plans[0].check(config, seq)
    able = [plan for plan in plans if fits(config, plan, seq, system)] or plans[:1]
    return min(able, key=lambda plan: step_time(config, plan, seq, system).total)
