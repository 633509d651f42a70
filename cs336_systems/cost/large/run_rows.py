"""The keys of a run in JSON: what each means, which values it takes, and what is taken where it says nothing.

People write `"8"` for 8, 1 for true and `Selective` for selective, which is all understood. What is not understood
counts as absent, and a note says so.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from cs336_systems.cost.large.systems import DEFAULT_SYSTEM
from cs336_systems.errors import UserError

LITTLE = 0.25  # of the microbatches: a pipeline whose other stages are more takes long to fill and to drain
MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST = 10**15

REQUIRED = {
    "h": "d_model",
    "a": "heads",
    "L": "layers",
    "s": "tokens of a sequence",
    "V": "vocabulary",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel replicas; may be left out where gpus is given",
    "gbs": "sequences of a step",
}
# Key: what it is; what is taken where it is absent, null, 0 or not understood.
DEFAULTS = {
    "id": "name; its place in the list",
    "gpu": f"accelerator; {DEFAULT_SYSTEM}, also for a name of no known family",
    "gpus": "accelerators; always tp x pp x dp x cp, another number is noted",
    "nvs": "accelerators of a node; the machine's",
    "network": "bytes/s out of an accelerator to other nodes; the machine's",
    "mbs": f"sequences of a microbatch; the fastest of {', '.join(map(str, MICRO_BATCHES))} that divides and fits",
    "vpp": f"chunks of a stage; 1, or one a layer if pp - 1 is more than {LITTLE} of all microbatches (of mbs 1)",
    "recompute": "none, selective or full; full on V100 and A100, none on newer accelerators",
    "sp": "sequence parallelism; where blocks are not recomputed, and s divides over tp x cp",
    "cp": "context-parallel ranks; 1",
    "zero": "ZeRO stage; 0 on V100 and A100, 1 on newer accelerators, whose frameworks shard the optimizer",
    "kv": "heads of keys and values; a",
    "ffn": "width of the feed-forward; 4 h. Another than 4 h is a gated one",
    "gated": "whether the feed-forward is; by ffn",
    "attention": "flash or unfused; unfused where V100 or A100 recompute, without gates, kv, ZeRO 3 or s over 4096",
    "experts": "of every layer; none. The ranks of ep are among those of dp",
    "top_k": "experts that a token is sent to; 2",
    "ep": "expert-parallel ranks; 1, also without experts",
    "t_iter_s": "measured seconds of a step; the run is only predicted",
}
WORDS = {"recompute": ("none", "selective", "full"), "attention": ("flash", "unfused")}
FLAGS = {"0": False, "1": True, "false": False, "true": True}


def tidy(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the keys that say something, as numbers, flags and words; a note for each that is not understood).

    Raises UserError for a required key that is missing or is no whole number from 1 on.
    """
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
    _derive(found)
    if missing := [key for key in REQUIRED if key not in found]:
        raise UserError(f"{', '.join(missing)} missing: a run needs {', '.join(REQUIRED)}")
    return found, notes


def _understood(key: str, value: Any) -> Any:
    """A value of the key's kind, or None. Raises UserError for a count that is none."""
    if key in ("id", "gpu"):
        return value if isinstance(value, str) or key == "id" else None
    if key in WORDS:
        word = value.strip().lower() if isinstance(value, str) else None
        return word if word in WORDS[key] else None
    if key in ("sp", "gated"):
        return FLAGS.get(str(value).strip().lower())
    number = _number(value)
    if key == "zero":
        return int(number) if number in (0, 1, 2, 3) else None
    if key == "t_iter_s":
        return float(number) if number and 0 < number <= MOST else None
    if not number and key not in REQUIRED:
        return None
    if number is not None and (not 1 <= number <= MOST or number != int(number)):
        raise UserError(f"{key} must be a whole number from 1 to {MOST:.0e}, not {value}")
    return None if number is None else int(number)


def _number(value: Any) -> float | None:
    """A number, or one in words of digits; None for anything else, also for NaN and Infinity, which Python reads."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _derive(found: dict[str, Any]) -> None:
    """Replicas that were not named, if accelerators were."""
    if "dp" in found or any(found.get(key) is None for key in ("gpus", "tp", "pp")):
        return
    copy = found["tp"] * found["pp"] * found.get("cp", 1)
    if found["gpus"] % copy:
        raise UserError(f"gpus {found['gpus']} is not a multiple of tp x pp x cp = {copy}, so dp cannot be derived")
    found["dp"] = found["gpus"] // copy
