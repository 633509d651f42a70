"""Times of Megatron-LM's logs, in the wordings of its versions."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.cost.fitting.observations import LogOptions, logged_run, observe_log, observe_timers, read_measured
from cs336_systems.cost.logs import read_log
from cs336_systems.cost.machines import CONSTANTS, system_preset
from cs336_systems.cost.operator_time import group_seconds
from cs336_systems.cost.step_time import stage_weights, step_time
from cs336_systems.errors import UserError

NOTES = Path(__file__).resolve().parents[1] / "files" / "megatron_bert_345m.txt"
A100 = LogOptions(system_preset("A100-40GB"))


def block(**arguments) -> str:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    return "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}", ""])


def arguments(**changes) -> dict:
    return {
        "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512, "micro_batch_size": 4,
        "global_batch_size": 32, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2, "world_size": 8, "padded_vocab_size": 51200, "fp16": True,
    } | changes  # fmt: skip


def run_of(text: str, given: LogOptions = A100):
    (logged,) = read_log(text, "x.log")
    return logged_run(logged, given)


def iteration(number: int, ms: float | str, batch: int = 32, skipped: int = 0, more: str = "") -> str:
    return (
        f" iteration {number:8d}/ 2000000 | consumed samples: {number * batch:12d} | elapsed time per iteration (ms): "
        f"{ms} |{more} learning rate: 1.000E-04 | global batch size: {batch:5d} | lm loss: 1.000000E+01 | "
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def test_notes_of_five_runs():
    found = read_log(NOTES.read_text(), NOTES.name)
    assert [each.name for each in found] == ["1 GPU", "8 GPUs", "32 GPUs", "64 GPUs", "128 GPUs"]
    assert [each.batch for each in found] == [8, 32, 128, 256, 512]
    assert [each.seconds for each in found] == pytest.approx([0.17912, 0.232, 0.3776, 0.36864, 0.44544])
    assert found[2].timers() == {
        "forward-compute": 89.49, "backward-compute": 113.45, "backward-params-all-reduce": 47.78,
        "backward-embedding-all-reduce": 32.91, "optimizer-unscale-and-check-inf": 40.61, "optimizer": 48.84,
    }  # fmt: skip
    assert [each.vocabulary() for each in found] == [29_056, 29_184, 29_184, 29_184, 29_184]
    assert logged_run(found[4], replace(A100, vocab_size=30_000)).config.vocab_size == 30_000
    run = logged_run(found[4], A100)
    config, plan = run.config, run.plan
    assert (config.num_layers, config.d_model, config.num_heads, run.seq, config.d_ff) == (24, 1024, 16, 512, 4096)
    assert (config.causal, config.attention, config.recompute, config.token_types) == (False, "naive", "segments", 2)
    assert (plan.tp, plan.pp, plan.dp, plan.micro_batch, plan.global_batch, plan.microbatches) == (2, 2, 32, 4, 512, 4)
    assert (plan.overlap, plan.zero, plan.sequence, plan.width, run.system.name) == ("none", 0, False, 2, "A100-40GB")


def test_what_timers_are_compared_with():
    one, eight, *_ = read_log(NOTES.read_text(), NOTES.name)
    seconds = {each.what: each.seconds for each in observe_log(eight, A100)}
    expected = {"step": 0.232, "compute": 0.05394 + 0.0992, "gradients": 0.00646}
    assert seconds == pytest.approx(expected)
    # The last stage has the head, and with it most to do: what is predicted are parts of the step.
    run = logged_run(eight, A100)
    step = step_time(run.config, run.plan, run.seq, run.system)
    predicted = {each.what: each.predict(CONSTANTS) for each in observe_log(eight, A100)}
    assert step.stage == 1
    assert predicted["step"] == pytest.approx(step.total)
    computing = ("forward", "backward", "recompute", "host", "tensor-parallel")
    assert predicted["compute"] == pytest.approx(sum(step.parts[name] for name in computing))
    eight.arguments["accumulate_allreduce_grads_in_fp32"] = "True"
    (wide,) = (each.predict(CONSTANTS) for each in observe_log(eight, A100) if each.what == "gradients")
    assert wide == pytest.approx(2 * predicted["gradients"], rel=0.05)  # but for latency
    for other in ({"zero": 1}, {"overlap": "data"}):
        spread = replace(run, plan=run.plan.override(**other))
        assert [each.what for each in observe_timers(spread, eight.timers())] == ["compute"]
    # One replica sums no gradients: the timer is of copies.
    assert [each.what for each in observe_log(one, A100)] == ["step", "compute"]


def test_a_training_log_is_its_median_without_start_and_skipped_steps():
    lines = [iteration(10, 900.0), iteration(20, 100.0, skipped=1)]
    lines += [iteration(30 + 10 * i, ms) + f"time (ms) | forward-compute: {ms / 4:.2f} | optimizer: 9.00\n"
              for i, ms in enumerate((240.0, 232.0, 224.0))]  # fmt: skip
    start = "time (ms) | model-and-optimizer-setup: 900.00 | train/valid/test-data-iterators-setup: 4.00\n"
    (logged,) = read_log(block(**arguments()) + start + "".join(lines), "x")
    assert logged.seconds == 0.232
    assert logged.timers() == {"forward-compute": 58.0, "optimizer": 9.0}
    ramp = "".join(iteration(*each) for each in ((5, 50.0, 16), (10, 50.0, 16), (20, 90.0, 64), (30, 96.0, 64)))
    (logged,) = read_log(block(**arguments()) + start + ramp, "x")
    assert logged.timers() == {}  # those of starting up are none
    assert (logged.batch, logged.seconds) == (64, 0.093)


WORDINGS = {
    "version 1": " iteration 20/ 100 | elapsed time per iteration (ms): 232.5 | learning rate 1.000E-04 | loss 1.0 |",
    "2": iteration(20, 232.5),
    "core": "[2026-04-28 14:23:45.123456]" + iteration(20, 232.5, more=" throughput per GPU (TFLOP/s/GPU): 245.3 |"),
    "running mean": iteration(20, "232.5/240.9", more=" hip mem usage/free/total/usage_ratio: 1GB/2GB/3GB/60.09% |"),
}


@pytest.mark.parametrize("line", WORDINGS.values(), ids=WORDINGS)
def test_iterations_of_every_version(line):
    (logged,) = read_log(block(**arguments()) + line, "x")
    assert (logged.seconds, logged.batch, len(logged.reports)) == (0.2325, 32, 1)


def test_a_line_cut_between_two_fields():
    line = iteration(20, 232.5, batch=64).replace("| learning", "|\n learning").replace("| lm", "\n| lm")
    timers = "time (ms) | forward-compute: 40.00 |\n optimizer: 9.00 | x: 1"
    (logged,) = read_log(block(**arguments()) + line + timers, "x")
    assert (logged.seconds, logged.batch) == (0.2325, 64)
    assert logged.timers() == {"forward-compute": 40.0, "optimizer": 9.0, "x": 1.0}


@pytest.mark.parametrize(
    "prefix",
    ["[default7]:", "[rank3]:", "3: ", "[1,15]<stdout>:", "2024-01-02 03:04:05,678 INFO ", "[2024-01-02 03:04:05] ",
     "[default0]:2024-01-02T03:04:05.678Z ", "\x1b[1m"],
)  # fmt: skip
def test_what_launchers_write_before_a_line_does_not_matter(prefix):
    text = block(**arguments()) + iteration(20, 232.5) + "time (ms) | forward-compute: 40.00 | optimizer: 9.00\n"
    end = "\x1b[0m\r" if prefix[0] == "\x1b" else ""
    assert read_log("\n".join(prefix + line + end for line in text.splitlines()), "x") == read_log(text, "x")


@pytest.mark.parametrize("one_line", [False, True])
def test_a_table_over_ranks_counts_the_most(one_line):
    rows = [
        f"    {name + ' ':.<48}: ({least}, {most})" for name, least, most in
        (("forward-backward", 200.0, 210.25), ("forward-compute", 41.0, 43.42), ("backward-compute", 91.0, 93.5),
         ("all-grads-sync", 0.01, 20.0), ("optimizer", 9.0, 9.5))
    ]  # fmt: skip
    head = "(min, max) time across ranks (ms):"
    table = f"{head} {' '.join(map(str.strip, rows))}" if one_line else "\n".join([head, *rows])
    setup = f"{head}\n    {'model-and-optimizer-setup ':.<48}: (1.00, 2.00)\n"
    (logged,) = read_log(block(**arguments()) + setup + iteration(20, 232.5) + table + "\ndone\n", "x")
    assert logged.timers() == {
        "forward-backward": 210.25, "forward-compute": 43.42, "backward-compute": 93.5, "all-grads-sync": 20.0,
        "optimizer": 9.5,
    }  # fmt: skip
    assert logged.over_ranks
    assert {each.what: round(each.seconds, 9) for each in observe_log(logged, A100)} == {
        "step": 0.2325, "compute": 0.13692, "gradients": 0.02,
    }  # fmt: skip


def test_the_slowest_rank_is_not_the_last():
    """With the head on it the last stage computes longer, unless the first has more blocks."""
    text = block(**arguments(num_layers=3, padded_vocab_size=256)) + iteration(20, 232.5)
    timers = "time (ms) | forward-compute: 40.00 | backward-compute: 90.00 | backward-params-all-reduce: 6.00\n"
    (logged,) = read_log(text + timers, "x")
    run = logged_run(logged, A100)
    weights = stage_weights(run.config, run.plan, run.seq, 1)[0]
    (sums,) = (each for each in observe_log(logged, A100) if each.what == "gradients")
    expected = group_seconds("all-reduce", 2 * weights, 2, 2, A100.system)
    assert sums.predict(CONSTANTS) == pytest.approx(expected)
    (last,) = (each for each in observe_log(logged, A100) if each.what == "compute")
    logged.over_ranks = True
    (most,) = (each for each in observe_log(logged, A100) if each.what == "compute")
    assert most.predict(CONSTANTS) > 1.2 * last.predict(CONSTANTS)


def test_arguments_of_newer_and_older_versions():
    newer = arguments(
        group_query_attention=True, num_query_groups=4, swiglu=True, ffn_hidden_size=2816, sequence_parallel=True,
        use_distributed_optimizer=True, overlap_grad_reduce=True, use_flash_attn=True, bf16=True, fp16=False,
        context_parallel_size=2, world_size=16, num_layers_per_virtual_pipeline_stage=6,
        recompute_granularity="selective", untie_embeddings_and_output_weights=True,
        accumulate_allreduce_grads_in_fp32=True,
    )  # fmt: skip
    run = run_of(block(**newer) + iteration(20, 232.5))
    config, plan = run.config, run.plan
    assert (config.kv_heads, config.feed_forward, config.d_ff, config.tied_head) == (4, "swiglu", 2816, False)
    assert (config.attention, config.recompute, config.causal) == ("sdpa", "attention", True)
    assert (plan.cp, plan.chunks, plan.sequence, plan.zero, plan.overlap) == (2, 2, True, 1, "data")
    assert (plan.width, run.seconds, plan.global_batch) == (2, 0.2325, 32)
    experts = arguments(num_experts=8, moe_router_topk=1, expert_model_parallel_size=2)
    run = run_of(block(**experts) + iteration(20, 232.5))
    assert (run.config.num_experts, run.config.mixture.top_k, run.config.expert_every) == (8, 1, 1)
    assert (run.plan.ep, run.plan.dp, run.plan.data, run.plan.ranks) == (2, 1, 2, 8)
    note = " > padded vocab (size: 28996) with 188 dummy tokens (new size: 29184)\n"  # from the start of a log
    assert run_of(block(**arguments(padded_vocab_size="None")) + note + iteration(20, 1.0)).config.vocab_size == 29_184
    older = {"batch_size": 4, "model_parallel_size": 2, "checkpoint_activations": True}  # of version 1
    older |= dict.fromkeys(("micro_batch_size", "global_batch_size", "data_parallel_size"))
    older |= dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"))
    text = "\n".join(line for line in block(**arguments(**older)).split("\n") if not line.endswith(" None"))
    run = run_of(text + WORDINGS["version 1"])
    assert (run.plan.tp, run.plan.pp, run.plan.dp, run.plan.micro_batch, run.plan.global_batch) == (2, 1, 4, 4, 16)
    assert run.config.recompute == "segments"
    assert run_of(block(**arguments(fp16=False)) + iteration(20, 1.0)).plan.width == 4
    assert run_of(block(**arguments(data_parallel_size=None)) + iteration(20, 1.0)).plan.dp == 2


@pytest.mark.parametrize(
    ("changes", "options", "attention", "why"),
    [
        ({}, {}, "naive", "assumed, since no argument says"),
        ({"transformer_impl": "transformer_engine"}, {}, "sdpa", "transformer_impl transformer_engine"),
        ({"transformer_impl": "local", "attention_backend": "AttnBackend.auto"}, {}, "naive", "transformer_impl local"),
        ({"attention_backend": "AttnBackend.auto"}, {}, "sdpa", "attention_backend auto"),
        ({"transformer_impl": "transformer_engine", "attention_backend": "unfused"}, {}, "naive", "backend unfused"),
        ({"seq_length": 8192}, {}, "sdpa", "assumed, since no argument says, of 8192 tokens"),
        ({"seq_length": 8192, "use_flash_attn": False}, {}, "naive", "use_flash_attn False"),
        ({"use_flash_attn": True}, {}, "sdpa", "use_flash_attn"),
        ({}, {"attention": "flash"}, "sdpa", "--attention flash"),
        ({"use_flash_attn": True}, {"attention": "naive"}, "naive", "--attention naive"),
    ],
)  # fmt: skip
def test_how_attention_ran_and_why_it_is_thought_so(changes, options, attention, why):
    run = run_of(block(**arguments(**changes)) + iteration(20, 232.5), replace(A100, **options))
    assert run.config.attention == attention
    assert why in run.notes[0]
    assert run.notes[0].startswith("attention fused (" if attention == "sdpa" else "attention unfused (")


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("epoch 1, loss 2.0\n", A100, "x.log has no timings: looked for `elapsed time"),
        (
            iteration(20, 232.5),
            A100,
            "not have Megatron-LM's arguments hidden_size, num_layers",
        ),
        (block(**arguments()) + iteration(20, 232.5), LogOptions(), "give --system"),
        (block(**arguments(padded_vocab_size="None")) + iteration(20, 1.0), A100, "give --vocab-size"),
        (
            block(**arguments(num_layers=None)) + iteration(20, 1.0),
            A100,
            "arguments num_layers: write the run into",
        ),
        (block(**arguments(hidden_size=None)) + iteration(20, 1.0), A100, "arguments hidden_size: "),
        (block(**arguments(micro_batch_size=None)) + iteration(20, 1.0), A100, "arguments micro_batch_size: "),
        (block(**arguments(world_size=12)) + iteration(20, 1.0), A100, "world_size 12 is not tp 2 x pp 2 x cp 1 x dp"),
        (block(**arguments(num_attention_heads=15)) + iteration(20, 1.0), A100, "15"),
        (block(**arguments()) + iteration(20, "1e400"), A100, "x.log: step took inf s: times are positive"),
        (block(**arguments(num_experts=8, moe_layer_freq="[0,1]")) + iteration(20, 1.0), A100, "[0,1] is no number"),
        (block(**arguments(fp8="hybrid")) + iteration(20, 1.0), A100, "A100-40GB has no 8-bit floating-point GEMMs"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, text, given, words):
    (tmp_path / "x.log").write_text(text)
    with pytest.raises(UserError) as caught:
        read_measured(tmp_path / "x.log", given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_degrees_that_a_log_says_without_arguments():
    line = (
        "[default0]:using world size: 16, data-parallel size: 2, context-parallel size: 2, tensor-model-parallel "
        "size: 2, pipeline-model-parallel size: 2\n"
    )
    (logged,) = read_log(line + iteration(20, 232.5), "x")
    assert logged.arguments == {
        "world_size": "16", "data_parallel_size": "2", "context_parallel_size": "2",
        "tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "2",
    }  # fmt: skip
    older = "using world size: 4 and model-parallel size: 2\n"
    found = read_log(2 * (older + iteration(20, 232.5)), "x")
    assert [(each.arguments["model_parallel_size"], len(each.reports)) for each in found] == [("2", 1), ("2", 1)]
    (noted,) = read_log("22.5 ms per sample\n", "x")
    assert noted.sample_ms == 22.5
