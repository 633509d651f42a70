"""The course map points at what is there: every file, name, command, chapter and test, and no problem is missing."""

import ast
from functools import cache
from pathlib import Path

import pytest

from cs336_systems.cost.course import QUESTIONS
from cs336_systems.errors import UserError
from cs336_systems.presets import COURSE_YEARS
from tests.support.command_lines import problem_of
from tests.support.course_questions import problems_of, years_of
from writeup.chapters.course_map import MAP, course_map

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = course_map()
# What each edition asks, by the names in its handout; what has no name there is in words, here with a _ for a blank.
ALWAYS = (
    "benchmarking_script model_sizes mixed_precision_accumulation benchmarking_mixed_precision weighted-sum_example "
    "torch_compile memory_profiling distributed_communication_single_node naive_ddp naive_ddp_benchmarking "
    "minimal_ddp_flat_benchmarking ddp_overlap_individual_parameters ddp_overlap_individual_parameters_benchmarking "
    "optimizer_state_sharding optimizer_state_sharding_accounting"
)
NORMS = (
    "pytorch_layernorm triton_rmsnorm_forward rmsnorm_jvp_g rmsnorm_jvp_x triton_rmsnorm_backward "
    "rmsnorm_forward_benchmarking rmsnorm_benchmarking"
)
FLASH = "nsys_profile pytorch_attention flash_forward flash_backward flash_backward_in_Triton flash_benchmarking"
BUCKETS = "ddp_overlap_bucketed ddp_bucketed_benchmarking"
CALCS = "alternate_ring_all_reduce data_parallel_calcs fsdp_calcs tp_calcs fsdp_tp_calcs"
ASKED = {
    2024: f"{ALWAYS} function_call_table flame_graph {NORMS} distributed_communication_multi_node {BUCKETS}",
    2025: f"{ALWAYS} {FLASH} {BUCKETS} communication_accounting leaderboard",
    2026: f"{ALWAYS} {FLASH} {CALCS} gradient_checkpointing fsdp fsdp_accounting leaderboard",
}
ENTRY = """
[[problem]]
id = "a"
asks = "b"
years = [2024]
chapter = "ddp"
code = ["README.md"]
commands = ["make help"]
tests = ["tests/test_ddp.py"]
"""


@pytest.mark.parametrize("year", COURSE_YEARS)
def test_no_problem_is_missing(year):
    assert {problem.id.replace(" ", "_") for problem in PROBLEMS if year in problem.years} == set(ASKED[year].split())


@cache
def names_in(file: str) -> set[str]:
    """Names that a file defines at its top, and the methods of its classes as Class.method."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_everything_that_is_named_is_there(problem):
    for file, name in problem.code:
        assert (ROOT / file).is_file(), file
        assert name is None or name in names_in(file), f"{file} has no {name}"
    for test in problem.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), file
        assert not name or name in names_in(file), test
    for command in problem.commands:
        assert (wrong := problem_of(command)) is None, f"{command}: {wrong}"


def test_the_accounting_has_the_same_problems():
    known = {(problem.id, year) for problem in PROBLEMS for year in problem.years}
    for asked in QUESTIONS.values():
        for name in problems_of(asked):
            assert {year for id, year in known if id == name.split()[0]} & set(years_of(asked)), name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "x = 1\n", r"x: there are only \[\[problem\]\]"),
        ("[[problem]]", "[problem]", r"every problem begins with a line \[\[problem\]\]"),
        ('chapter = "ddp"\n', "", r"problem 1 \(a\): missing 1 required .* 'chapter'"),
        ('chapter = "ddp"', "chapter = 'ddb'", "no chapter is called 'ddb'"),
        ('chapter = "ddp"', 'chapters = "ddp"', "unexpected keyword argument 'chapters'"),
        ('asks = "b"', 'asks = ""', "asks must not be empty"),
        ("[2024]", "[2026, 2024]", r"years are \[2026, 2024\]"),
        ("[2024]", "[2023]", r"years are \[2023\]"),
        ('["README.md"]', '["README.md: no name"]', "neither FILE nor FILE: NAME"),
        ("a", "a\x00", "cannot be read"),
    ],
)
def test_a_bad_entry_is_named(tmp_path, old, new, message):
    path = tmp_path / "course.toml"
    path.write_text(ENTRY)
    assert [problem.id for problem in course_map(path)] == ["a"]
    path.write_text(ENTRY.replace(old, new, 1) if old else new + ENTRY)
    with pytest.raises(UserError, match=message):
        course_map(path)


def test_a_problem_is_there_once_a_year(tmp_path):
    path = tmp_path / "course.toml"
    path.write_text(ENTRY + ENTRY.replace("2024", "2025"))
    assert len(course_map(path)) == 2
    path.write_text(ENTRY + ENTRY)
    with pytest.raises(UserError, match="a of 2024 is there twice"):
        course_map(path)
    with pytest.raises(UserError, match=f"{MAP.name} cannot be read"):
        course_map(tmp_path / "none" / MAP.name)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("python -m benchmarks.nothing", "there is no module"),
        ("python -m benchmarks.e2e --siez tiny", "--siez"),
        ("python -m benchmarks.e2e --precision fp7", "fp7"),
        ("python -m cs336_systems.cost exlain", "no command exlain"),
        ("torchrun --standalone --nproc-per-node 2 benchmarks/nothing.py", "no file"),
        ("python -m benchmarks.two_nodes -- benchmarks/allreduce.py --size 1", "--size"),
        ("make tset", "no target tset"),
        ("rm -r x", "no program"),
        ("torchrun --standalone --nproc-per-node 2 -m cs336_systems.train --zero 3  # and so on", ""),
    ],
)
def test_a_command_that_cannot_run_is_seen(line, wrong):
    said = problem_of(line)
    assert said is None if not wrong else wrong in said
