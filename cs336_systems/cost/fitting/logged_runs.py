"""Model, plan and measured time of a run, from the arguments in its Megatron-LM log.

A missing argument has the value of the versions that lack it: no sequence parallelism before 3.0, gradients summed
after backward unless `overlap_grad_reduce` is there. How attention ran follows from several arguments or from none, so
a note on the run states the conclusion. A user's options override a log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cs336_systems.cost.logs import LoggedRun
from cs336_systems.cost.machines import System
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.runs import KEYS, TrainingRun, read_run
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag
from cs336_systems.presets import ModelConfig

_NUMBERS, _ARGUMENTS = KEYS["megatron"], KEYS["options"]
_SHAPE = {key: _NUMBERS[key].split()[0] for key in ("h", "L", "a", "s")}
# Options that count besides those of `_ARGUMENTS`.
_COUNTED = ("recompute", "zero", "overlap", "precision", "attention", "feed_forward", "dropout", "kernels")
_LONG = 4096  # tokens; scores of longer sequences do not fit into memory


@dataclass(frozen=True)
class LogOptions:
    """A user's options about logged runs: their machine, and options of the command line by their names in
    `ModelOptions` and `PlanOptions`."""

    system: System | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def logged_run(logged: LoggedRun, given: LogOptions) -> TrainingRun:
    """The run that a log describes, on the given machine, which no log names. Raises UserError, naming the run, for
    what neither log nor user gives, and for contradictions."""
    if not any(name in logged.arguments for name in _SHAPE.values()):
        raise UserError(
            f"{logged.name} has times, but not the arguments of Megatron-LM: write it into a list of runs instead, as "
            "in docs/cost.md"
        )
    said = {_ARGUMENTS[name]: str(value) for name, value in given.options.items() if name in _ARGUMENTS}
    said |= {"group_query_attention": "True"} if "num_kv_heads" in given.options else {}
    logged = replace(logged, arguments=logged.arguments | said)
    numbers = {key: logged.number(*names.split()) for key, names in _NUMBERS.items()}
    if lacking := [name for key, name in _SHAPE.items() if numbers[key] is None]:
        flags = [flag(name) for name, argument in _ARGUMENTS.items() if argument in lacking]
        raise UserError(f"{logged.name}: the arguments in this log lack {', '.join(lacking)}: give {', '.join(flags)}")
    if given.system is None:
        raise UserError(f"{logged.name}: a log does not say on what machine it was written: give --system")
    fused, why = _fused(logged, given)
    run = read_run(_row(logged, given, numbers) | {"gpu": given.system.name, "attention": fused}, logged.name)
    config, plan, options = run.config, run.plan, given.options
    if "bert" in logged.arguments.get("tokenizer_type", "").lower():
        config = config.override(causal=False, token_types=2, bert_heads=config.bias and config.tied_head)
    elif logged.says("untie_embeddings_and_output_weights"):
        config = config.override(tied_head=False)
    every = logged.number("moe_layer_freq")
    if numbers["experts"] and logged.says("moe_layer_freq") and every is None:
        freq = logged.arguments["moe_layer_freq"]
        raise UserError(f"{logged.name}: moe_layer_freq {freq} is no number: give --expert-every")
    overlap = "all" if logged.says("tp_comm_overlap") else "data" if logged.says("overlap_grad_reduce") else "none"
    narrow = options["precision"] != "fp32" if options.get("precision") else logged.says("fp16") or logged.says("bf16")
    plan = plan.override(overlap=options.get("overlap") or overlap, width=2 if narrow else 4)
    asked = {name: options.get(name) for name in ("feed_forward", "dropout", "kernels")}
    config = config.override(**asked, expert_every=every or 1)
    notes = [_taken(config, plan, why)]
    unused = (flag(name) for name in options if name not in (*_ARGUMENTS, *_COUNTED))
    notes += [f"{name} is not used, since the log has arguments" for name in unused]
    return replace(run, config=config, plan=plan, system=given.system, seconds=logged.seconds, notes=tuple(notes))


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
    asked, arguments = given.options.get("attention"), logged.arguments
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
    words = logged.vocabulary()
    if words is None:
        raise UserError(f"{logged.name} does not say how many words its vocabulary has: give --vocab-size")
    micro, layers, within = numbers["mbs"], numbers["L"], logged.number("num_layers_per_virtual_pipeline_stage")
    # Version 1 has no microbatches: its batch_size is a replica's.
    older = micro * dp if micro and logged.number("micro_batch_size") is None else None
    batch = given.options.get("batch_size") or logged.batch or older
    if micro is None or batch is None:
        name = "micro_batch_size: give --micro-batch-size" if micro is None else "global_batch_size: give --batch-size"
        raise UserError(f"{logged.name}: the arguments in this log lack {name}")
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
        "recompute": given.options.get("recompute") or recompute,
        "sp": logged.says("sequence_parallel"),
        "fp8": given.options["precision"] == "fp8" if given.options.get("precision") else logged.says("fp8"),
        "zero": given.options.get("zero", int(logged.says("use_distributed_optimizer"))),
    }
