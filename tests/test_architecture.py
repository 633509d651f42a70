"""The house rules, read from the source with ast: ARCHITECTURE.md's table of layers is the law that this enforces."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "cs336_systems", "benchmarks", "writeup")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ROW = re.compile(r"^\| L(\d+) \| `([\w/]+?)(\.py|/)` \|", re.MULTILINE)
LAYERS = {name: int(layer) for layer, name, _ in ROW.findall((ROOT / "ARCHITECTURE.md").read_text())}
TORCH_FREE = ("cs336_systems/presets", "cs336_systems/errors", "cs336_systems/console", "cs336_systems/cost")


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def place(path: Path) -> str:
    """The row of the table that a file belongs to: its own, or its folder's."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    while name not in LAYERS and "/" in name:
        name = name.rsplit("/", 1)[0]
    return name


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[str]:
    """Dotted names of everything that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(tree_of(path)):
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


def climbing(path: Path) -> list[str]:
    """What a file imports from its own floor or above."""
    here = place(path)
    if path.name == "__init__.py" and here not in LAYERS:
        return [f"{ids(path)}, a package's front, imports {name}" for name in imports(path) if ours(name)]
    if here not in LAYERS:
        return [f"{ids(path)} has no row in ARCHITECTURE.md"]
    found = []
    for name in imports(path):
        target = ours(name)
        if target is None or place(target) == here or (target.name == "__init__.py" and place(target) not in LAYERS):
            continue
        if LAYERS[place(target)] >= LAYERS[here]:
            found.append(f"{ids(path)} on floor {LAYERS[here]} imports {name} on floor {LAYERS[place(target)]}")
    return found


def test_imports_go_down():
    assert not [line for path in FILES for line in climbing(path)]


def test_the_table_names_what_exists():
    for name in LAYERS:
        there = (ROOT / f"{name}.py").exists() or (ROOT / name / "__init__.py").exists()
        assert there, f"{name} is in ARCHITECTURE.md only"


def test_modules_of_a_folder_import_each_other_without_cycles():
    graph = {path: {target for name in imports(path) if (target := ours(name)) and target != path} for path in FILES}
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " -> ".join(ids(each) for each in (*trail, path))
        if path not in done:
            for target in graph.get(path, ()):
                if target.name != "__init__.py":
                    visit(target, (*trail, path))
            done.add(path)

    for path in FILES:
        visit(path, ())


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_everything_imports_without_triton():
    extra = all(find_spec(name) for name in ("jinja2", "matplotlib", "pypandoc", "typst"))
    files = [path for path in FILES if extra or ROOT / "writeup" not in path.parents]
    modules = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files]
    # The one file that is about Triton itself; kernels/backend.py imports it only where Triton interprets.
    names = ", ".join(sorted({name.removesuffix(".__init__") for name in modules} - {"kernels.interpreter"}))
    run_python(f"import sys; sys.modules['triton'] = None; import {names}")


def test_a_prediction_does_not_load_torch():
    run_python("import sys, cs336_systems.cost, cs336_systems.cost.capacity; assert 'torch' not in sys.modules")


def test_one_door_to_torch_distributed():
    inside = [path for path in FILES if ids(path).startswith(("cs336_systems/", "kernels/"))]
    users = {
        ids(path)
        for path in inside
        if any(name.startswith(("torch.distributed", "torch._C._distributed")) for name in imports(path))
    }
    assert all(user.startswith("cs336_systems/comm/") for user in users), users


def test_what_must_not_load_torch_does_not():
    for path in FILES:
        if ids(path).startswith(TORCH_FREE) and path.name != "probe.py":
            assert not {name.split(".")[0] for name in imports(path)} & {"torch", "einops", "triton"}, ids(path)
    for name in ("parameters", "flops", "memory", "step", "capacity"):
        assert "cs336_systems.cost.probe" not in imports(ROOT / f"cs336_systems/cost/{name}.py")


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
        if ids(path) != "cs336_systems/comm/startup.py":
            assert "os.environ" not in path.read_text(), ids(path)
            assert "os.getenv" not in path.read_text(), ids(path)


def faults_of(path: Path) -> list[str]:
    """Where a file is longer or says less than a reader's page."""
    tree, found = tree_of(path), []
    if (lines := path.read_text().count("\n")) > 300:
        found.append(f"has {lines} lines")
    if not ast.get_docstring(tree):
        found.append("does not say in its first line what it is about")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 45:
            found.append(f"{node.name} is long")
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node in tree.body and not node.name.startswith("_"):
            found += [f"{node.name} has no docstring"] * (not ast.get_docstring(node))
    return [f"{ids(path)}: {fault}" for fault in found]


def test_files_and_functions_are_a_readers_page():
    assert not [line for path in FILES for line in faults_of(path)]
