"""Measured times beside the cost model's predictions: of whole steps, and of parts of a step with timers.

Times come from lists of runs and from training logs (`cost/logs.py`). Megatron-LM times a step's parts on the last
rank, or prints the largest over all ranks. Two of them have a prediction: computing, and the sum of gradients over
replicas.

A missing argument of a log has the value of the versions that lack it. How attention ran follows from several arguments
or from none, so a note on the run states the conclusion, and a user may say otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from cs336_systems.cost.logs import LoggedRun, read_log, read_train_log
from cs336_systems.cost.machines import Constants, System
from cs336_systems.cost.operator_time import group_seconds
from cs336_systems.cost.plan import OPTIONS, Plan
from cs336_systems.cost.runs import KEYS, TrainingRun, read_run, read_runs
from cs336_systems.cost.step_time import replica_groups, stage_kinds, stage_seconds, stage_weights
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular
from cs336_systems.presets import Attention, Mixture, ModelConfig

# Timers of gradient reduction in versions 2.0 to 2.7, in 3.0 to core 0.4, and since then.
_GRADIENTS = ("backward-params-all-reduce", "grads-all-reduce", "all-grads-sync")
_WIDTHS = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an activation by precision
_NUMBERS = KEYS["megatron"]
_NEEDED = ("h", "L", "a", "s", "mbs")
_LONG = 4096  # tokens; scores of longer sequences do not fit into memory
INSTEAD = "write the run into a list instead, as in docs/cost.md"


@dataclass(frozen=True)
class LogOptions:
    """Entries that a log may lack: the machine, how attention ran, and the length of the vocabulary."""

    system: System | None = None
    attention: Attention | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Observation:
    """Measured seconds of one thing in a run, positive and finite, and their prediction given the constants."""

    run: TrainingRun
    what: Literal["step", "compute", "gradients"]
    seconds: float
    predict: Callable[[Constants], float]

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise UserError(f"{self.run.id}: {self.what} took {self.seconds:g} s: times are positive and finite")


def read_measured(path: Path, given: LogOptions) -> list[Observation]:
    """Read a file's measurements: by suffix a list of runs (.json), a training log of this project (.jsonl), or else a
    log of Megatron-LM. Raises UserError for a file that cannot be read, has no timings, or does not say what ran."""
    if path.suffix == ".json":
        found = [each for run in read_runs(path) for each in observe_step(run)]
        if not found:
            raise UserError(f"{path} has no timings: none of its runs has t_iter_s, the seconds of a step")
        return found
    with os_errors(f"read {path}"):
        text = regular(path).read_text("utf-8-sig", errors="replace")
    if path.suffix != ".jsonl":
        return [each for logged in read_log(text, path.name) for each in observe_log(logged, given)]
    try:
        return list(_of_training(read_train_log(text, path.name), given))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is no training log of this project: {why}") from None


def observe_log(logged: LoggedRun, given: LogOptions) -> Iterator[Observation]:
    """The step of a run of Megatron-LM, and the parts of it that timers measured. Raises UserError as `logged_run`."""
    run = logged_run(logged, given)
    half = not logged.says("accumulate_allreduce_grads_in_fp32") and run.plan.width == 2
    yield from observe_step(run)
    yield from observe_timers(run, logged.timers(), logged.over_ranks, 2 if half else 4)


def observe_step(run: TrainingRun) -> Iterator[Observation]:
    """The step of a run, if it was measured."""
    if run.seconds:
        yield Observation(run, "step", run.seconds, lambda used: run.under(used).step.total)


def observe_timers(
    run: TrainingRun, milliseconds: Mapping[str, float], over_ranks: bool = False, gradient_width: int = 4
) -> Iterator[Observation]:
    """The parts of a step that timers of Megatron-LM measured and the model predicts.

    `over_ranks` timers are the slowest stage's, others the last one's. Gradients have `gradient_width` bytes; if
    they are sent during backward, in shards, or not at all, their timer measures something else and is left out.
    """
    plan = run.plan

    def computed(constants: Constants) -> float:
        """Forward and backward of all microbatches, without messages between stages."""
        stages = stage_kinds(run.config, plan) if over_ranks else [plan.pp - 1]
        system = run.under(constants).system
        each = [stage_seconds(run.config, plan, run.seq, stage, system) for stage in stages]
        return plan.microbatches * max(sum(spent) - spent.messages for spent in each)

    def reduced(constants: Constants) -> float:
        """One all-reduce after backward, of the gradients of the last stage, which has the head."""
        shared, owned, _ = stage_weights(run.config, plan, run.seq, plan.pp - 1)
        return sum(
            group_seconds("all-reduce", gradient_width * each.weights, *each.near, run.under(constants).system)
            for each in replica_groups(plan, shared, owned, run.system.node)
        )

    ahead, back = (milliseconds.get(f"{way}-compute", 0.0) for way in ("forward", "backward"))
    if ahead and back:
        yield Observation(run, "compute", (ahead + back) / 1e3, computed)
    summed = next((milliseconds[name] for name in _GRADIENTS if milliseconds.get(name)), None)
    if summed and plan.replicas > 1 and plan.overlap == "none" and not plan.zero:
        yield Observation(run, "gradients", summed / 1e3, reduced)


def _of_training(logged: LoggedRun, given: LogOptions) -> Iterator[Observation]:
    """A run of this project, whose log describes its layout, but not the machine that it ran on."""
    if given.system is None:
        raise UserError(f"{logged.name}: this file does not say what its machine can do: give --system")
    header = logged.header
    model = ModelConfig(**header["model"] | {"mixture": Mixture(**header["model"]["mixture"])})
    if model.recompute == "nested":  # of which the cost model has one kind
        model = replace(model, recompute="segments")
    row = header["recipe"] | header["mesh"] | header
    plan = Plan(
        **{axis: row.get(axis, 1) for axis in ("tp", "pp", "dp", "ep")},
        **{
            name: row[OPTIONS.get(name, name)] for name in ("chunks", "sequence", "zero", "micro_batch", "global_batch")
        },
        width=_WIDTHS[row["precision"]],
    )
    plan.check(model, row["seq"])
    run = TrainingRun(model, plan, row["seq"], given.system, logged.name, logged.seconds)
    yield from observe_step(run)
    yield from observe_timers(run, logged.timers())


def logged_run(logged: LoggedRun, given: LogOptions) -> TrainingRun:
    """The run that a log describes, on the given machine, which no log names. Raises UserError, naming the run, for
    what neither log nor user gives, and for contradictions."""
    numbers = {key: logged.number(*names.split()) for key, names in _NUMBERS.items()}
    if lacking := [_NUMBERS[key].split()[0] for key in _NEEDED if numbers[key] is None]:
        raise UserError(f"{logged.name} does not have Megatron-LM's arguments {', '.join(lacking)}: {INSTEAD}")
    if given.system is None:
        raise UserError(f"{logged.name}: a log does not say on what machine it was written: give --system")
    fused, why = _fused(logged, given)
    run = read_run(_row(logged, given, numbers) | {"gpu": given.system.name, "attention": fused}, logged.name)
    config = run.config
    if "bert" in logged.arguments.get("tokenizer_type", "").lower():
        config = config.override(causal=False, token_types=2, bert_heads=config.bias and config.tied_head)
    elif logged.says("untie_embeddings_and_output_weights"):
        config = config.override(tied_head=False)
    every = logged.number("moe_layer_freq")
    if numbers["experts"] and logged.says("moe_layer_freq") and every is None:
        raise UserError(f"{logged.name}: moe_layer_freq {logged.arguments['moe_layer_freq']} is no number: {INSTEAD}")
    config = config.override(expert_every=every or 1)
    overlap = "all" if logged.says("tp_comm_overlap") else "data" if logged.says("overlap_grad_reduce") else "none"
    plan = run.plan.override(overlap=overlap, width=2 if logged.says("fp16") or logged.says("bf16") else 4)
    notes = (_taken(config, plan, why),)
    return replace(run, config=config, plan=plan, system=given.system, seconds=logged.seconds, notes=notes)


def _taken(config: ModelConfig, plan: Plan, why: str) -> str:
    """Note on a conclusion from arguments that leave room for doubt."""
    again = {"none": "nothing", "attention": "attention's core", "segments": "blocks"}[config.recompute]
    sums = {"none": "after backward", "data": "behind backward", "all": "behind backward, tensor-parallel parts too"}
    return (
        f"attention {'unfused' if config.attention == 'naive' else 'fused'} ({why}), {again} recomputed, gradients "
        f"summed {sums[plan.overlap]}, ZeRO {plan.zero}, {8 * plan.width}-bit numbers"
    )


def _fused(logged: LoggedRun, given: LogOptions) -> tuple[str, str]:
    """("flash" or "unfused", why): by the user's option, the log's arguments, or the length of the sequence."""
    asked, arguments = given.attention, logged.arguments
    layers = arguments.get("transformer_impl", "None").lower()
    backend = arguments.get("attention_backend", "None").rsplit(".", 1)[-1].lower()
    seq = logged.number("seq_length", "encoder_seq_length") or 0
    flash = backend in ("flash", "fused") or (backend == "auto" and layers == "none")
    name = "use_flash_attn" if "use_flash_attn" in arguments else "transformer_impl"
    rules = (
        (asked, "unfused" if asked == "naive" else "flash", f"--attention {asked}"),
        (logged.says("use_flash_attn"), "flash", "use_flash_attn"),
        (backend in ("unfused", "local"), "unfused", f"attention_backend {backend}"),
        (layers == "transformer_engine", "flash", f"transformer_impl {layers}"),
        (flash, "flash", f"attention_backend {backend}"),
        (name in arguments and (name == "use_flash_attn" or layers != "none"), "unfused",
         f"{name} {arguments.get(name)}"),
        (seq > _LONG, "flash", f"assumed, since no argument says, of {seq} tokens"),
        (True, "unfused", "assumed, since no argument says; else give --attention flash"),
    )  # fmt: skip
    return next((kind, why) for holds, kind, why in rules if holds)


def _row(logged: LoggedRun, given: LogOptions, numbers: dict[str, Any]) -> dict[str, Any]:
    """The keys of a list of runs."""
    tp, pp, cp = (numbers[axis] or 1 for axis in ("tp", "pp", "cp"))
    world = logged.number("world_size") or tp * pp * cp
    dp = numbers["dp"] or world // (tp * pp * cp)
    if tp * pp * cp * dp != world:
        raise UserError(f"{logged.name}: world_size {world} is not tp {tp} x pp {pp} x cp {cp} x dp {dp}")
    words = given.vocab_size or logged.vocabulary()
    if words is None:
        raise UserError(f"{logged.name} does not say how many words its vocabulary has: give --vocab-size")
    micro, layers, within = numbers["mbs"], numbers["L"], logged.number("num_layers_per_virtual_pipeline_stage")
    # Version 1 has no microbatches: its batch_size is a replica's.
    older = micro * dp if logged.number("micro_batch_size") is None else None
    batch = logged.batch or older
    if batch is None:
        raise UserError(f"{logged.name} does not say global_batch_size: {INSTEAD}")
    # By version: `checkpoint_activations`, `activations_checkpoint_method`, then `recompute_granularity`.
    older_full = logged.says("checkpoint_activations") or logged.says("activations_checkpoint_method")
    recompute = logged.arguments.get("recompute_granularity", "None")
    recompute = recompute if recompute in ("full", "selective") else "full" if older_full else "none"
    return numbers | {
        **{"V": words, "tp": tp, "pp": pp, "dp": dp, "cp": cp, "gbs": batch},
        "vpp": numbers["vpp"] or (layers // pp // within if layers and within else 1),
        "kv": logged.number("num_query_groups") if logged.says("group_query_attention") else None,
        "top_k": numbers["top_k"] if numbers["experts"] else None,
        "gated": logged.says("swiglu"),
        "recompute": recompute,
        "sp": logged.says("sequence_parallel"),
        "fp8": logged.says("fp8"),
        "zero": int(logged.says("use_distributed_optimizer")),
    }
