"""Shared fixtures: one seed for every test, and fresh memory poisoned with NaN so that an unwritten element is seen."""

import gc
import os
from pathlib import Path

import pytest
import torch

from cs336_systems.host import load
from tests.support.leftovers import pytest_configure, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401, hooks
from tests.support.machine import made_up, seed_cpus_alone, use_huge_pages

gc.disable()  # until all is imported and collected: there is nothing to free

seed_cpus_alone()
load.used_by_others = lambda: 0.0  # it is the tests themselves that make this machine busy

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU
# Autograd decides now that it needs no threads, with which this process could not fork ranks. With a build for CUDA it
# would decide otherwise after a test with fake tensors, for which torch pretends that there are GPUs.
torch.ones((), requires_grad=True).backward()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need on a GPU


# `make proof`: strategies equal to one process, misuse right or refused by name, kernels against float64, the model
# against a second transformer, crashes, broken variants, overlap against HTA, dry runs (slow ones in `make test-all`).
PROOF = (
    *("test_ddp", "test_zero", "test_fsdp", "test_sharded_optimizer", "test_layouts", "test_layouts_mixed"),
    *("test_expert_layouts", "test_expert_parallel", "test_context_parallel", "test_pipeline", "test_gallery"),
    *("test_faults_ddp", "test_faults_backward", "test_faults_optimizer", "test_faults_zero", "buffers/test_guards"),
    *(f"kernels/test_{name}" for name in ("reference", "rmsnorm", "flash_attention", "cross_entropy", "swiglu")),
    *(f"kernels/test_{name}" for name in ("fused_adamw", "weighted_sum", "every_kernel")),
    *("model/test_transformer", "checkpoint/test_kill_sweep", "profiling/test_hta", "train/test_dry_run"),
)

# `make test-all` only: compilers, torchrun, network namespaces, a browser, very large models, whole benchmarks and
# what takes longest of long tables whose other rows stay.
SLOW = (
    "benchmarks/test_allreduce::test_alone_it_starts",
    "benchmarks/test_compare::test_compare_inter",
    "benchmarks/test_e2e::",
    "benchmarks/test_fused::test_a_",
    "benchmarks/test_kernel_benchmarks::",
    "benchmarks/test_leaderboard::",
    "benchmarks/test_long_context",
    "benchmarks/test_memory::test_all_sizes_end",
    "benchmarks/test_memory::test_both",
    "benchmarks/test_memory::test_residuals",
    "benchmarks/test_memory::test_segments",
    "benchmarks/test_moe_eval::",
    "benchmarks/test_moe_eval_scores",
    "benchmarks/test_parallel_benchmarks::",
    "benchmarks/test_profiling_run::",
    "benchmarks/test_records::test_any_field",
    "benchmarks/test_refusals::test_a_smoke_run",
    "benchmarks/test_residuals::",
    "benchmarks/test_scaling::",
    "benchmarks/test_scaling_record::",
    "benchmarks/test_two_nodes",
    "buffers/test_shard_tensor::test_penalties_that_weigh_differently_by_rank_equal_one_process[3]",
    "check/test_check::test_a_cause",
    "check/test_check::test_a_hang",
    "check/test_check::test_adapters",
    "check/test_check::test_no_false_alarm_on_what_students_write[a DDP over",
    "check/test_check::test_no_false_alarm_on_what_students_write[a DDP whose",
    "check/test_check::test_no_false_alarm_on_what_students_write[an FSDP",
    "check/test_check::test_no_false_alarm_on_what_students_write[an optimizer",
    "check/test_check::test_the_gallery",
    "check/test_check::test_weak_points",
    "check/test_exercises",
    "check/test_pages::test_the_examples",
    "comm/test_faults_network",
    "comm/test_faults_ranks::test_a_store",
    "comm/test_faults_ranks::test_sigterm",
    "comm/test_faults_ranks::test_torchrun_that_is_killed",
    "comm/test_flight_recorder::test_a_living_rank_tells_other_machines_of_its_neighbours[True",
    "comm/test_startup::test_ranks_are_spawned",
    "cost/test_course::test_ends",
    "cost/test_course::test_published_measurements",
    "cost/test_course::test_the_page",
    "cost/test_operators::test_traffic_is_that_of_the_projects_own_code[config3",
    "cost/test_operators::test_traffic_is_that_of_the_projects_own_code[config5",
    "cost/test_operators::test_under_sequence",
    "cost/test_plot_commands::test_all_pictures",
    "cost/test_probe_system::test_this_machine",
    "cost/test_search::test_a_limit",
    "cost/test_search::test_what_would_fit",
    "cost/test_stacks::test_runs_that_were_left_out",
    "cost/test_stacks::test_the_constants_are_those_that_a_fit_finds[fsdp",
    "cost/test_stacks::test_the_constants_are_those_that_a_fit_finds[nanotron",
    "data/test_tokenizer::test_training",
    "host/test_observe::test_fake_tensors",
    "kernels/test_codegen",
    "kernels/test_every_kernel::test_compiles",
    "kernels/test_triton_launch",
    "model/test_moe::test_experts_survive",
    "profiling/test_hostile",
    "tensor_parallel/test_plan::test_losses_and_gradients_equal_one_process[4",
    "test_architecture::test_everything_imports",
    "test_commands::test_output_that_nobody",
    "test_context_layouts",
    "test_expert_layouts::test_experts_over_ranks_learn_what_one_process_learns[ep4-dropless-gpt-zero1-none-sort]",
    "test_expert_layouts::test_experts_over_ranks_learn_what_one_process_learns[tp2-pp2-ep2-padded",
    "test_faults_backward::test_right_or_an_error_that_names_the_cause[5 batches on one rank",
    "test_faults_backward::test_right_or_an_error_that_names_the_cause[backward fails on one rank, which retries",
    "test_faults_backward::test_right_or_an_error_that_names_the_cause[two forwards, then two backwards, a",
    "test_faults_ddp::test_right_or_an_error_that_names_the_cause[one more backward on one rank, without",
    "test_fsdp::test_compiled",
    "test_layouts::test_layouts_learn_what_one_process_learns[4",
    "test_layouts_mixed::test_an_overflow_on_one_rank_skips_the_step_on_all[tp1-pp2",
    "test_pipeline::test_every_schedule_equals_accumulation_in_one_process[4",
    "test_safety::test_secrets_of_the_environment_are_in_no_file[profile",
    "test_safety::test_secrets_of_the_environment_are_in_no_file[record",
    "train/test_dry_run::test_bert_345m",
    "train/test_dry_run::test_real_ranks",
    "train/test_observation::test_ranks_send",
    "train/test_resume::test_other_layouts",
    "train/test_resume::test_so_they_do",
    "train/test_resume::test_steps_in_two_parts_are_steps_in_one[routing",
    "train/test_resume::test_steps_in_two_parts_are_steps_in_one[text",
    "train/test_resume::test_three_kills",
    "train/test_run_folder::test_torchrun_restarts",
    "train/test_run_state::test_a_run_goes_on_with_the_same_bits_and_its_checkpoint_has_what_its_ranks_have[1",
    "train/test_run_state::test_a_run_goes_on_with_the_same_bits_and_its_checkpoint_has_what_its_ranks_have[2",
    "train/test_run_state::test_a_run_goes_on_with_the_same_bits_and_its_checkpoint_has_what_its_ranks_have[4",
    "train/test_run_state::test_other_layouts",
    "train/test_stop::test_all_ranks",
    "train/test_train::test_ranks_that_share_a_model_learn_what_one_process_learns[lm",
    "train/test_train::test_text_is_learned",
    "writeup/test_page",
    "writeup/test_play::test_another_process",
    "writeup/test_play::test_the_script",
)


# Files that take longest, with which the workers begin, so that at the end none waits for another's long test, and no
# file is cut whose fixtures would be made twice. A column for each of three workers: up to eight ranks, runs, others.
FIRST = (
    "test_layouts", "train/test_run_state", "check/test_check",
    "test_context_parallel", "train/test_resume", "writeup/test_page",
    "test_context_layouts", "train/test_stop", "kernels/test_codegen",
    "test_pipeline", "train/test_dry_run", "cost/test_course",
    "test_expert_layouts", "train/test_train", "benchmarks/test_parallel_benchmarks",
    "test_faults_backward", "train/test_observation", "benchmarks/test_moe_eval",
    "test_faults_ddp", "benchmarks/test_profiling_run", "benchmarks/test_e2e",
    "test_gallery", "benchmarks/test_long_context", "benchmarks/test_memory",
    "test_layouts_mixed", "benchmarks/test_scaling", "benchmarks/test_refusals",
    "test_faults_zero", "buffers/test_shard_tensor", "check/test_exercises",
    "test_zero", "train/test_run_folder", "benchmarks/test_two_nodes",
    "test_sharded_optimizer", "test_fsdp", "kernels/test_triton_launch",
)  # fmt: skip
collected: dict[str, str] = {}  # the file of each test, which is named "FILE::NAME" without "tests/" and ".py"


def file_of(item) -> str:
    """The file of a test, without `tests/` and `.py`."""
    return item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()


def pytest_itemcollected(item):
    """Mark a test of the proof and a slow one."""
    file = file_of(item)
    collected[f"{file}::{item.name}"] = file
    if file in PROOF:
        item.add_marker(pytest.mark.proof)
    if f"{file}::{item.name}".startswith(SLOW):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # of those that are not left out
def pytest_collection_modifyitems(config, items):
    """Begin each worker's share, which pytest-xdist cuts from the list, with files that take longest."""
    workers, by_file = getattr(config, "workerinput", {}).get("workercount", 1), {}
    for item in items:
        by_file.setdefault(file_of(item), []).append(item)
    rest = [item for file, its in by_file.items() if file not in FIRST for item in its]
    left = len(items)
    items.clear()
    for number in range(workers):
        share = [item for file in FIRST[number::workers] for item in by_file.get(file, [])]
        more = max(0, left // (workers - number) - len(share))
        items += [*share, *rest[:more]]
        left, rest = left - len(share) - more, rest[more:]
    items += rest


def pytest_collection_finish():
    """Exclude imported objects, which stay, from garbage collections, of which benchmarks have one for
    each candidate: torch alone is a million objects."""
    torch.use_deterministic_algorithms(False)  # imports the compiler
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()


@pytest.fixture(autouse=True, scope="module")
def without_caches():
    """Exclude what a file's tests leave in caches, such as observations of models, in the same way."""
    yield
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seeded_and_poisoned():
    """Every test starts from seed 0; torch.empty returns NaN (deterministic mode fills what is not initialised)."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def where_triton_runs():
    """New tensors are made on the GPU if there is one: Triton compiles for it, and interprets where there is none."""
    if torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def quick_probe(monkeypatch):
    """Commands that this process runs do not measure the machine's speed."""
    for name in (
        "cs336_systems.train.__main__.probe",
        "benchmarks.lib.workload.measure_once",
        "benchmarks.profiling_run.probe",
    ):
        monkeypatch.setattr(name, made_up)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Run in an empty folder, so that nothing a command writes lands in the project."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
