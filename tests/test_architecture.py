"""Tests of ARCHITECTURE.md's rules on rooms, floors (allowed imports) and line budgets, read from the source by ast."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sizes import TOLERANCE, lines_of, parts, rooms, week_end

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "cs336_systems", "benchmarks", "writeup")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FLOORS = {room.name: room.floor for room in rooms()}
LESSONS = ("ddp", "sharded_optimizer", "fsdp", "tensor_parallel", "pipeline", "context_parallel", "expert_parallel")
PREDICTORS = ("cs336_systems/cost", "cs336_systems/profiling")
TORCH_FREE = tuple(
    f"cs336_systems/{name}"
    for name in ("presets", "errors", "traffic", "schedule", "layout", "host/console", "host/text", "cost")
)
MEASURES = ("probe.py", "observed.py")  # of cost/, run by commands of their own


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def room_of(path: Path) -> str:
    """The row of the table that a file belongs to: its own, or its folder's."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    while name not in FLOORS and "/" in name:
        name = name.rsplit("/", 1)[0]
    return name


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imports(path: Path) -> list[str]:
    """Dotted names of everything that a file imports, at its top or inside a function."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@cache
def ours(name: str) -> Path | None:
    """The file behind a dotted name, None for foreign ones and for names inside a module."""
    path = ROOT / Path(*name.split("."))
    if name.split(".")[0] not in PACKAGES:
        return None
    if path.with_suffix(".py").exists():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").exists() else None


@cache
def arrows() -> list[tuple[Path, Path]]:
    """Every import of one file of ours by another."""
    found = ((path, ours(name)) for path in FILES for name in imports(path))
    return [(path, target) for path, target in found if target and target != path]


def test_every_file_has_a_room_and_every_room_exists():
    assert [ids(path) for path in FILES if room_of(path) not in FLOORS] == ["cs336_systems/__init__.py"]
    assert not [room.name for room in rooms() if not all(path.exists() for path in room.files) or not room.files]
    assert len(FLOORS) == len(rooms()) <= 30
    assert sorted(set(FLOORS.values())) == list(range(1, max(FLOORS.values()) + 1))
    assert max(FLOORS.values()) <= 10


def test_imports_go_down():
    crossing = [(path, target) for path, target in arrows() if room_of(path) != room_of(target)]
    assert not [
        f"{ids(path)} on floor {FLOORS[room_of(path)]} imports {ids(target)} on floor {FLOORS[room_of(target)]}"
        for path, target in crossing
        if ids(target) != "cs336_systems/__init__.py" and FLOORS[room_of(target)] >= FLOORS[room_of(path)]
    ]


def test_the_library_knows_no_predictor():
    """Nothing imports the cost model or the profiler but the command line of train, benchmarks and the write-up."""
    outside = ("benchmarks/", "writeup/", "cs336_systems/train/__main__.py", *(f"{name}/" for name in PREDICTORS))
    users = [(path, target) for path, target in arrows() if not ids(path).startswith(outside)]
    assert not [f"{ids(path)} imports {ids(target)}" for path, target in users if ids(target).startswith(PREDICTORS)]
    cost = [target for path, target in arrows() if ids(path).startswith("cs336_systems/cost/")]
    assert not [ids(target) for target in cost if ids(target).startswith("cs336_systems/profiling/")]


def test_lessons_do_not_import_each_other():
    lessons = {f"cs336_systems/{name}" for name in LESSONS}
    assert lessons < FLOORS.keys()
    pairs = {(room_of(path), room_of(target)) for path, target in arrows()}
    assert not {(one, other) for one, other in pairs if {one, other} <= lessons and one != other}


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_a_room_keeps_its_budget(room):
    assert lines_of(room.files) <= room.budget * TOLERANCE


def test_each_part_keeps_its_limit():
    assert not {name: sizes for name, sizes in parts().items() if sizes[0] > sizes[1]}
    assert len(week_end()) > 20


def test_files_import_each_other_without_cycles():
    graph: dict[str, set[str]] = {}
    for path, target in arrows():
        if target.name != "__init__.py":
            graph.setdefault(ids(path), set()).add(ids(target))
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_everything_imports_without_triton():
    extras = {"writeup": ("jinja2", "matplotlib", "pypandoc", "typst"), "benchmarks/lib/mpi_rank.py": ("mpi4py",)}
    absent = tuple(place for place, needs in extras.items() if not all(map(find_spec, needs)))
    files = [path for path in FILES if not path.relative_to(ROOT).as_posix().startswith(absent)]
    modules = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files]
    # The one file that is about Triton itself; kernels/launch.py imports it only where Triton interprets.
    names = ", ".join(sorted({name.removesuffix(".__init__") for name in modules} - {"kernels.interpreter"}))
    run_python(f"import sys; sys.modules['triton'] = None; import {names}")


def test_a_prediction_does_not_load_torch():
    files = [path for path in FILES if ids(path).startswith(TORCH_FREE) and path.name not in MEASURES]
    names = ", ".join(ids(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files)
    run_python(f"import sys, {names}; assert not {{'torch', 'einops', 'triton'}} & sys.modules.keys()")


def test_one_door_to_torch_distributed():
    inside = [path for path in FILES if ids(path).startswith(("cs336_systems/", "kernels/"))]
    users = {
        ids(path)
        for path in inside
        if any(name.startswith(("torch.distributed", "torch._C._distributed")) for name in imports(path))
    }
    assert all(user.startswith("cs336_systems/comm/") for user in users), users
    # Those that a user names are loaded by name, in one file.
    named = {ids(path) for path in inside if '"torch.distributed' in path.read_text()} - users
    assert named == {"cs336_systems/check/targets.py"}


def test_benchmarks_hide_no_other_module():
    # torchrun puts the script's folder first on sys.path, where its files hide every module of the same name.
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    foreign = (
        {re.match(r"[\w-]+", each)[0] for each in dependencies} | set(sys.stdlib_module_names) | {"numpy", "typing"}
    )
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}
    assert not names & foreign


def test_environment_variables_are_read_at_the_doors_only():
    for path in FILES:
        if ids(path) not in ("cs336_systems/comm/startup.py", "cs336_systems/host/load.py"):
            assert "os.environ" not in path.read_text(), ids(path)
            assert "os.getenv" not in path.read_text(), ids(path)


def faults_of(path: Path) -> list[str]:
    """Where a file is longer or says less than a reader's page."""
    tree, found = tree_of(path), []
    if (lines := path.read_text().count("\n")) > 300:
        found.append(f"has {lines} lines")
    if not ast.get_docstring(tree):
        found.append("does not say in its first line what it is about")
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 45:
            found.append(f"{node.name} is long")
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node in tree.body and not node.name.startswith("_"):
            found += [f"{node.name} has no docstring"] * (not ast.get_docstring(node))
    return [f"{ids(path)}: {fault}" for fault in found]


def test_files_and_functions_are_a_readers_page():
    assert not [line for path in FILES for line in faults_of(path)]
