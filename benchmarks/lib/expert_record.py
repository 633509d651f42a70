"""The record of an evaluation: score, speed, bytes and calls of each formulation, with what was predicted beside it."""

from dataclasses import replace
from math import isfinite
from typing import Any

from benchmarks.harness import WrongResultError, noise, summarise
from benchmarks.lib.expert_calls import OF_WORDS, PUBLISHED, Calls, calls, waiting
from benchmarks.lib.expert_model import TAGS
from benchmarks.lib.expert_scores import SEPARATOR, Outcome, Scorer
from benchmarks.lib.scaling_record import affinity
from benchmarks.records import Record
from cs336_systems.cost import experts as cost
from cs336_systems.presets import Dispatch, ModelConfig

ROWS = ("dispatch", "combine")  # the labels of the all-to-alls that carry tokens


def bytes_each(outcome: Outcome) -> float | None:
    """Measured bytes of an all-to-all that carries tokens, the mean over calls and ranks; None if there was none."""
    names = [f"all-to-all{SEPARATOR}{label}" for label in ROWS]
    found = [rank["collectives"][name] for rank in outcome.ranks for name in names if name in rank["collectives"]]
    count = sum(times for times, _ in found)
    return sum(nbytes for _, nbytes in found) / count if count else None


def predicted_bytes(config: ModelConfig, dispatch: Dispatch, tokens: int, width: int) -> float:
    """Bytes that the cost model predicts for the same, with a balanced router."""
    config = replace(config, mixture=replace(config.mixture, dispatch=dispatch))
    return cost.row_bytes(config, cost.computed_rows(config, tokens, training=False), width)


def ratios(base: Outcome, mine: Outcome) -> dict[str, float]:
    """Cost of the first formulation over that of the second, from the same turns."""
    found = {"cpu_per_layer": base.mean("layers_cpu") / max(mine.mean("layers_cpu"), 1e-9)}
    found |= {"cpu_per_batch": base.mean("cpu") / mine.mean("cpu")}
    found |= {"seconds": base.seconds(words=False) / mine.seconds(words=False)}
    sent = bytes_each(base), bytes_each(mine)
    if sent[0] and sent[1]:
        found["bytes_per_all_to_all"] = sent[0] / sent[1]
    return found


def make_record(
    scorer: Scorer, outcome: Outcome, ranks: list[Calls], chosen: dict[str, Any], width: int, stamp: dict[str, Any]
) -> Record:
    """The record of a formulation. `chosen` are options that it quotes, `width` the bytes of a number, `stamp` is the
    machine's environment. Raises WrongResultError for a score that is not finite."""
    config, mesh, sizes, mixture = scorer.config, scorer.mesh, scorer.mesh.sizes, scorer.config.mixture
    if not isfinite(outcome.score):
        raise WrongResultError(f"{outcome.dispatch}: the score is {outcome.score}; no speed reported")
    what: dict[str, Any] = chosen | {
        "moe": outcome.dispatch, "d_model": config.d_model, "d_ff": config.d_ff, "num_layers": config.num_layers,
        "num_experts": config.num_experts, "vocab_size": config.vocab_size, "top_k": mixture.top_k,
        "eval_fraction": mixture.eval_fraction, "capacity_factor": mixture.capacity_factor,
        "context": scorer.blocks.context, "batch_size": scorer.rows, "batches": len(outcome.ranks[0]["scoring"]),
        "data": scorer.blocks.name, "ranks": mesh.world.size(), "tp": sizes["tp"], "ep": sizes["ep"], "dp": sizes["dp"],
    }  # fmt: skip
    samples = [1e3 * max(laps) for laps in zip(*(rank["scoring"] for rank in outcome.ranks), strict=True)]
    metrics: dict[str, Any] = summarise(samples) | outcome.load | {
        "loss": outcome.loss, "perplexity": outcome.perplexity, "score": outcome.score, "tokens": outcome.tokens,
        "tokens_per_s": outcome.tokens / outcome.seconds(words=True),
        "tokens_per_s_without_words": outcome.tokens / outcome.seconds(words=False),
        "cpu_ms_per_batch": 1e3 * outcome.mean("cpu"),
        "cpu_ms_per_layer": 1e3 * outcome.mean("layers_cpu") / max(1, config.expert_layers),
        "bytes_per_all_to_all": bytes_each(outcome),
        "collectives": [rank["collectives"] for rank in outcome.ranks],
        "waiting": waiting(ranks),
        "calls": {name: calls(ranks, name) for name in dict.fromkeys((*PUBLISHED, *OF_WORDS, *TAGS))},
    }  # fmt: skip
    predicted: dict[str, Any] = {}
    if config.num_experts and sizes["ep"] > 1:
        tokens = scorer.rows * scorer.blocks.context
        predicted["bytes_per_all_to_all"] = predicted_bytes(config, outcome.dispatch, tokens, width)
    flags = noise(metrics)
    if stamp["device_type"] == "cpu" and (note := affinity(mesh.world.size(), stamp["threads"])["note"]):
        flags.append(note.split(": efficiency")[0] + ": wall times and waits hold turns at the cores")
    return Record("moe_eval", what, stamp, samples, metrics, predicted, flags)
