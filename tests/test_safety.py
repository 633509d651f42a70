"""Unsafe code that the source must not contain, found with ast, and secrets that no file of a run may contain."""

import ast
import gzip
import json
import os
from pathlib import Path

import pytest

from benchmarks import e2e, profiling_run
from cs336_systems.comm import Place
from cs336_systems.host.console import run_command
from cs336_systems.train import __main__ as training
from tests.support import ranks
from tests.support.machine import made_up
from tests.test_architecture import FILES, ROOT, ids, nodes_of

# Modules that run code from data, and functions that run code, start a shell, or make a name that others can guess.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "breakpoint", "os.system", "os.popen", "pty.spawn",
    "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp", "yaml.load", "yaml.unsafe_load",
    "code.interact", "torch.save", "torch.serialization.load", "torch.package.PackageImporter",
    "torch.distributed.checkpoint.load", "numpy.loads",
}  # fmt: skip
UNSAFE_FAMILIES = ("os.exec", "os.spawn", "os.posix_spawn")  # beginnings of names
UNSAFE_BUILTINS = {"eval", "exec", "__import__", "breakpoint"}
LOADERS = ("torch.", "numpy.")  # whose functions called `load` unpickle unless told otherwise
SENT_AS_OBJECTS = (
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
# What this project is compared with may pickle: files that it has just written, in a folder of its own.
PEERS = {"benchmarks/checkpoints.py": {"torch.save", "torch.distributed.checkpoint.state_dict_loader.load"}}
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# Where an attribute of torch is named by a variable.
BY_NAME = {"kernels/launch.py": "torch.ops.cs336_kernels", "cs336_systems/check/foreign.py": "torch.distributed"}


Aliases = dict[str, str]


def aliases_of(nodes: list[ast.AST]) -> Aliases:
    """Meaning of the names that a file imports: `t` is `torch` after `import torch as t`."""
    found = {"np": "numpy", "dist": "torch.distributed"}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def dotted(node: ast.AST, aliases: Aliases) -> str:
    """`torch.distributed.barrier` of an expression that is a name with attributes, also one of `getattr`; else what it
    ends with."""
    if (
        isinstance(node, ast.Call)
        and dotted(node.func, aliases) == "getattr"
        and isinstance(node.args[1], ast.Constant)
    ):
        return f"{dotted(node.args[0], aliases)}.{node.args[1].value}"
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_unsafe(name: str, path: str) -> bool:
    return name in UNSAFE_CALLS - PEERS.get(path, set()) or name.startswith(UNSAFE_FAMILIES)


def is_loader(name: str, path: str) -> bool:
    return name.startswith(LOADERS) and name.endswith(".load") and name not in PEERS.get(path, set())


def keyword(call: ast.Call, name: str) -> object:
    """The literal given to a keyword, None if there is none."""
    found = [each.value for each in call.keywords if each.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def faults_of_call(call: ast.Call, path: str, aliases: Aliases) -> list[str]:
    name = dotted(call.func, aliases)
    last = name.rpartition(".")[2]
    faults = [name] if is_unsafe(name, path) else []
    if is_loader(name, path) and keyword(call, "weights_only") is not True:
        faults.append(f"{name} without weights_only=True")
    if any(each.arg == "shell" for each in call.keywords):
        faults.append(f"{name}(shell=...)")
    if any(each.arg == "allow_pickle" for each in call.keywords) or last.startswith("set_extra_safe_globals"):
        faults.append(f"{name} that unpickles")
    if last.endswith(SENT_AS_OBJECTS):
        faults.append(f"{name}, a collective of pickled objects")
    if name in ("json.dump", "json.dumps") and keyword(call, "allow_nan") is not False:
        faults.append(f"{name} without allow_nan=False: JSON has no NaN")
    if name == "getattr" and not isinstance(call.args[1], ast.Constant):
        owner = dotted(call.args[0], aliases)
        if owner.partition(".")[0] in ("torch", "os", "builtins") and BY_NAME.get(path) != owner:
            faults.append(f"getattr({owner}, a name that is not written here)")
    return faults


def faults_of(nodes: list[ast.AST], path: str) -> list[str]:
    found, aliases = [], aliases_of(nodes)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        for name in names:
            if (
                name.partition(".")[0] in UNSAFE_MODULES
                or is_unsafe(name, path)
                or name.endswith((*SENT_AS_OBJECTS, ".*"))
            ):
                found.append(f"{path}:{node.lineno} imports {name}")
        if isinstance(node, ast.Constant) and str(node.value).startswith(SHARED_FOLDERS):
            found.append(f"{path}:{node.lineno} has a temporary file of a name that others can guess")
        if isinstance(node, ast.Call):
            found += [f"{path}:{node.lineno} calls {fault}" for fault in faults_of_call(node, path, aliases)]
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in called:  # to be called by another name
            name = dotted(node, aliases)
            if is_loader(name, path) or ("." in name and is_unsafe(name, path)) or name in UNSAFE_BUILTINS:
                found.append(f"{path}:{node.lineno} hands on {name}")
    return found


def test_nothing_runs_what_it_reads():
    assert not [line for path in FILES for line in faults_of(nodes_of(path), ids(path))]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import dill.source", "from marshal import load", "import shelve",
        "eval('1')", "exec(text)", "compile(text, 'x', 'exec')", "__import__(name)", "os.system('ls')",
        "from os import system", "os.popen('ls')", "subprocess.run('ls', shell=True)", "tempfile.mktemp()",
        "from tempfile import mktemp", "torch.load(path)", "torch.load(path, weights_only=False)",
        "np.load(path)", "np.load(path, allow_pickle=True)", "yaml.load(text)", "torch.save(x, path)",
        "dist.all_gather_object(a, b)", "torch.distributed.broadcast_object_list(a)", "json.dumps(x)",
        "from torch.distributed import all_gather_object", "json.dump(x, f, allow_nan=True)", "getattr(torch, name)",
        "getattr(torch.nn, name, None)", "open('/tmp/x')", "from torch import load\nload(path)",
        "from torch import load as safe\nsafe(path)", "import torch as t\nt.load(path)",
        "import numpy as xp\nxp.load(path)", "import os as o\no.system('ls')", "read = torch.load\nread(path)",
        "map(os.system, lines)", "run = eval", "from os import *", "os.execvp('ls', ['ls'])", "os.spawnl(0, 'ls')",
        "from os import posix_spawn", "import torch.serialization as s\ns.load(path)", "getattr(torch, 'load')(path)",
        "import torch as t\ngetattr(t, name)", "from subprocess import getoutput as run",
    ],
)  # fmt: skip
def test_the_checker_sees(code):
    assert faults_of([*ast.walk(ast.parse(code))], "x.py")


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path, weights_only=True)", "model.eval()", "re.compile(text)", "getattr(torch, 'float32')",
        "getattr(self, name)", "json.dumps(x, allow_nan=False)", "torch.compile(model)", "json.load(file)",
        "subprocess.run(['ls'], check=True)",
        "from torch import load\nload(path, weights_only=True)", "from json import load\nload(file)", "self.load(path)",
    ],
)  # fmt: skip
def test_the_checker_lets_pass(code):
    assert not faults_of([*ast.walk(ast.parse(code))], "x.py")


def test_one_door_to_the_terminal():
    # A plain Console of rich reads markup in foreign text and lets escape sequences through; ours does neither.
    for path in FILES:
        if ids(path) == "cs336_systems/host/console.py":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                name = dotted(node.func, {})
                assert name not in ("Console", "rich.print", "Text.from_markup", "Text.from_ansi"), ids(path)
                assert keyword(node, "markup") is not True, ids(path)


def test_pages_of_html_come_from_one_place():
    users = {ids(path) for path in FILES if "<!DOCTYPE" in path.read_text() or "<html" in path.read_text()}
    assert users == {"cs336_systems/profiling/report.py"}, (
        "a page needs a policy and a test like that of tests/host/test_text.py"
    )


SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY",
    "OPENAI_API_KEY", "GITHUB_TOKEN", "MASTER_PASSWORD",
)  # fmt: skip
STAMP = {
    "device", "device_type", "cores", "threads", "torch", "triton", "python", "world_size", "backend", "commit",
    "dirty", "date",
}  # fmt: skip
MARKER = "dont-write-me-down"


def leave(rank: int, world: int, folder: str, what: str, out: str) -> None:
    """A run's log and checkpoint, a record, or the report of a profile, in an environment full of secrets."""
    os.environ.update({name: f"{MARKER}-{number}" for number, name in enumerate(SECRETS)})
    os.chdir(out)
    training.probe = profiling_run.probe = made_up  # in the process of this case only
    size = ("--size", "tiny", "--batch-size", "1", "--context", "8", "--device", "cpu")
    if what == "run":
        assert run_command(training.main, [*size, "--data", "random", "--steps", "1", "--out", "run"]) == 0
    elif what == "record":
        timed = ("--steps", "2", "--warmup", "1", "--mode", "forward", "--results", ".")
        assert run_command(e2e.main, [*size, *timed]) == 0
    else:
        settings = profiling_run.ProfilingSettings(
            size="tiny", batch_size=1, context=8, warmup=1, steps=1, out=Path("."), results=Path(".")
        )
        profiling_run.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("run", {"train.jsonl", "lock", "manifest.json", "rank-00000-00.safetensors"}),
        ("record", {"e2e.jsonl"}),
        ("profile", {"profiling.jsonl", "index.html", "flame.svg"}),
    ],
)
def test_secrets_of_the_environment_are_in_no_file(what, expected, tmp_path):
    ranks.run_alone(leave, 1, what=what, out=str(tmp_path))
    files = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert expected <= set(files)
    for name, path in files.items():
        data = path.read_bytes()
        text = gzip.decompress(data) if name.endswith(".gz") else data
        assert MARKER.encode() not in text, name
        assert not [secret for secret in SECRETS if secret.encode() in text], name
        if name.endswith(".jsonl"):
            assert set(json.loads(text.splitlines()[0])["environment"]) == STAMP


def test_the_project_names_how_to_report():
    text = (ROOT / "SECURITY.md").read_text()
    assert "SECURITY.md" in (ROOT / "README.md").read_text()
    for promise in ("unencrypted", "127.0.0.1", "SHA-256", "safetensors"):
        assert promise in text
