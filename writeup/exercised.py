"""Which files a benchmark exercises: those of the definitions that it reaches, by name, read with ast.

What only prints, draws, reads options or predicts is left out: it cannot change what is measured. Pictures of a profile
are kept beside its record, so what draws them counts.
"""

import ast
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "cs336_systems", "benchmarks")
SILENT = (
    *(f"cs336_systems/{name}.py" for name in ("errors", "host/console", "host/text")),
    *(f"cs336_systems/train/{name}.py" for name in ("megatron*", "run_log")),
    *("cs336_systems/cost/*", "cs336_systems/checkpoint/__main__.py", "*/__init__.py"),
    *(f"benchmarks/{name}.py" for name in ("records", "*_options", "*_table*", "*_plot", "*_show", "*_report")),
    *(f"benchmarks/{name}.py" for name in ("gpu_s*", "scaling_anomalies", "scaling_logs")),
)


@dataclass(frozen=True)
class Module:
    """A file: what each of its definitions names, and where the names come from that it imports."""

    definitions: dict[str, frozenset[str]]
    always: frozenset[str]  # what its other statements name, which run at import
    imported: dict[str, str]  # by the name here, the dotted name there


@cache
def _read(path: str) -> Module:
    definitions: dict[str, frozenset[str]] = {}
    always: set[str] = set()
    imported: dict[str, str] = {}
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                each.asname or each.name.split(".")[0]: (each.asname and each.name) or "" for each in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in tree.body:
        names = frozenset(_names(node))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = names
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {
                each.id: names for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
            }
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            always |= names
    return Module(definitions, frozenset(always), imported)


def _names(node: ast.AST) -> set[str]:
    """Names in a piece of code, annotations included, whose methods it may call; of `module.name` also both, joined."""
    dotted = {
        f"{each.value.id}.{each.attr}"
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
    }
    return dotted | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _file(module: str) -> str | None:
    if module.split(".")[0] not in PACKAGES:
        return None
    path = ROOT / Path(*module.split("."))
    for each in (path.with_suffix(".py"), path / "__init__.py"):
        if each.exists():
            return each.relative_to(ROOT).as_posix()
    return None


def _target(module: Module, path: str, name: str) -> tuple[str, str] | None:
    """The file and the definition behind a name in a file, if they are ours."""
    first, _, rest = name.partition(".")
    if first in module.imported:
        there = module.imported[first]
        if whole := _file(there):
            return (whole, rest) if rest else None  # a module alone does nothing; what is taken from it does
        outer, _, inner = there.rpartition(".")
        return (found, inner) if (found := _file(outer)) else None
    return (path, first) if first in module.definitions else None


@cache
def exercised(module: str) -> tuple[str, ...]:
    """The project's files that a module exercises, relative to the project's root, in the order of the alphabet."""
    start = _file(module)
    assert start is not None, module
    waiting = [(start, name) for name in _read(start).definitions]
    seen: set[tuple[str, str]] = set()
    while waiting:
        path, name = waiting.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        here = _read(path)
        names = here.definitions.get(name, frozenset()) | here.always | ({name} if name in here.imported else set())
        waiting += [target for each in names if (target := _target(here, path, each)) and not _silent(target[0])]
    return tuple(sorted({path for path, _ in seen if not _silent(path, and_fronts=True)}))


def _silent(path: str, and_fronts: bool = False) -> bool:
    patterns = SILENT if and_fronts else tuple(each for each in SILENT if each != "*/__init__.py")
    return any(fnmatch(path, pattern) for pattern in patterns)
