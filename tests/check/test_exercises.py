"""Exercises: an empty file fails, a solution passes, and one that breaks a promise fails."""

import os
import py_compile
import re
from pathlib import Path

import pytest

from cs336_systems.check.candidates import load_file
from cs336_systems.check.exercises import VARIANTS, grade
from cs336_systems.check.targets import EXERCISES
from cs336_systems.errors import UserError
from tests.check.planted import DDP, OPTIMIZER, TENSOR
from tests.check.solutions import MISTAKES, SOLUTIONS
from tests.check.table import ROOT
from tests.check.test_pages import run
from tests.support.ranks import patience

RING = """
def all_reduce(flat, exchange, rank, world):
    size = -(-len(flat) // world)
    cuts = [flat[i * size : (i + 1) * size] for i in range(world)]
    for step in range(world - 1):
        new = flat.new_empty(len(cuts[(rank - step - 1) % world]))
        exchange(cuts[(rank - step) % world], new)
        cuts[(rank - step - 1) % world] += new
    for step in range(world - 1):
        exchange(cuts[(rank - step + 1) % world], cuts[(rank - step) % world])
"""
WHOLE = """
def all_reduce(flat, exchange, rank, world):
    passed = flat.clone()
    for step in range(world - 1):
        new = flat.new_empty(len(flat))
        exchange(passed, new)
        flat += new
        passed = new
"""
NAIVE = DDP.replace("StudentDDP", "DDP")
EARLY = NAIVE.replace(
    "        self.buckets = ",
    "        self.marked = {p: p.register_post_accumulate_grad_hook(lambda p: self.launch([p])) for p in trained}\n"
    "        self.buckets = []  # ",
)
BUCKETS = NAIVE.replace("size=4", "bucket_size_mb, size=4").replace(
    "        self.buckets = [trained[i : i + size] for i in range(0, len(trained), size)]",
    "        for bucket in [trained[i : i + size] for i in range(0, len(trained), size)]:\n"
    "            waiting = set(bucket)\n"
    "            for p in bucket:\n"
    "                p.register_post_accumulate_grad_hook(self.hook(bucket, waiting))\n"
    "        self.buckets = []\n\n"
    "    def hook(self, bucket, waiting):\n"
    "        def ready(p):\n"
    "            waiting.discard(p)\n"
    "            if not waiting:\n"
    "                waiting.update(bucket)\n"
    "                self.launch(bucket)\n\n"
    "        return ready",
)
ZERO = OPTIMIZER.replace("StudentSharded", "ShardedOptimizer")
SOLVED = {"ring": RING, "naive-ddp": NAIVE, "overlap": EARLY, "buckets": BUCKETS, "zero-1": ZERO, "matrices": TENSOR}
SOLVED |= SOLUTIONS
FEW = ("training", "a layer used twice")


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_tells_files_apart(name, tmp_path):
    """The file as it is printed fails, and a solution passes."""
    ranks, only = (3 if name == "ring" else 2), FEW[: 1 if name == "matrices" else 2]
    empty = grade(name, written(tmp_path, EXERCISES[name]["file"]), ranks, patience(5.0), only)
    assert (empty.exit_code(), "NotImplementedError" in str(empty)) == (2, True), empty
    solved = grade(name, written(tmp_path, SOLVED[name]), ranks, patience(5.0), only)
    assert solved.exit_code() == 0, solved


BROKEN = [  # what a file does wrong, or its exercise forbids, such as the work by other means, and what is said of it
    *((name, changed(SOLUTIONS[name], old, new), said) for name, each in MISTAKES.items() for old, new, said in each),
    ("ring", WHOLE, "a rank sent"),
    ("naive-ddp", NAIVE.replace("            flat /= dist.get_world_size()\n", ""), "2 times the mean"),
    ("overlap", NAIVE, "0 collectives were launched during backward; 2 or more"),
    ("buckets", EARLY.replace("size=4", "bucket_size_mb"), "a step took 14 collectives; 12 or fewer"),
    ("zero-1", ZERO.replace(" if owner == rank", ""), "keeps state of 362 of 362 elements"),
    ("matrices", TENSOR.replace("torch.clone, summed", "torch.clone, torch.clone"), "add up to the right one"),
    ("ring", "import torch.distributed as dist\ndef all_reduce(flat, exchange, rank, world): dist.all_reduce(flat)\n",
             "something else than exchange moves data"),
    ("matrices", "def tensor_parallel(module): return module\n", "axis 0 of last.weight has 6 elements; 3 are"),
    ("zero-1", ZERO.replace("optimizer_cls([", "torch.optim.AdamW(["),
               "optimizer_cls is given no parameters, although steps were taken"),
    ("checkpoint", "S = {}\n"
                   "def save(state, folder): S[folder] = state\n"
                   "def load(folder): return S.get(folder)\n",
                   "load after the save of step 1 gives something else"),
    ("vocabulary-loss", "import torch\n"
                        "from torch.distributed.distributed_c10d import _get_default_group\n"
                        "from torch.nn.functional import cross_entropy\n"
                        "def vocabulary_loss(logits, targets):\n"
                        "    group = _get_default_group()\n"
                        "    parts = [torch.empty_like(logits) for _ in range(group.size())]\n"
                        "    group.allgather([parts], [logits.detach()]).wait()\n"
                        "    parts[group.rank()] = logits\n"
                        "    return cross_entropy(torch.cat(parts, 1), targets)\n",
                        "collectives were given 1152 elements for 12 tokens"),
    ("naive-ddp", NAIVE.replace(" if p.requires_grad", "").replace(" if p.grad is not None", ""),
     "WRONG       frozen parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), BROKEN)
def test_a_mistake_is_told(name, text, said, tmp_path):
    """Each ends with exit code 1, and what is wrong is said."""
    ranks = 3 if name == "ring" else 2
    report = grade(name, written(tmp_path, text), ranks, patience(5.0), (*FEW, "frozen parameters"))
    assert report.exit_code() == 1, report
    assert said in " ".join(str(report).split()) or said in str(report)


def test_a_norm_over_one_ranks_share_is_named(tmp_path):
    """torch's clip_grad_norm_ over flat shares, which the exercise allows."""
    path = written(tmp_path, SOLVED["zero-3"].replace("p.dim() > 1", "True"))
    report = grade("zero-3", path, only=("training", "clipping by the norm"))
    assert report.of("clipping by the norm").cause == "norm of a share", report


def test_the_command_line_lists_prints_and_grades(tmp_path, capsys):
    assert run("--exercises") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(EXERCISES)
    assert run("--exercise", "zero-1") == 0
    printed = capsys.readouterr().out
    assert printed.strip() == EXERCISES["zero-1"]["file"].strip()
    assert run("--exercise", "zero-1", str(written(tmp_path, printed))) == 2
    assert "NotImplementedError" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no DDP, which the exercise overlap asks for"):
        grade("overlap", written(tmp_path, "x = 1\n"))


def test_no_exercise_has_a_solution():
    """A file to fill in calls nothing but what raises."""
    for each in EXERCISES.values():
        code = each["file"].split('"""')[2]
        assert code.count("raise NotImplementedError") == len(each["name"].split())
        assert not any(word in code for word in ("dist", "hook", "return", "wait"))


RING_TESTS = """
import torch


def test_the_sum_and_what_is_sent(all_reduce, exchange, rank, world):
    sent = []

    def counting(piece, into):
        sent.append(piece.numel())
        exchange(piece, into)

    flat = torch.arange(7.0) + rank
    all_reduce(flat, counting, rank, world)
    assert torch.equal(flat, world * torch.arange(7.0) + sum(range(world)))
    assert sum(sent) <= 2 * (world - 1) * -(-7 // world)
"""
DDP_TESTS = """
import torch
import torch.distributed as dist
from torch import nn


def test_every_step(DDP):
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[1].running_mean.copy_(torch.randn(4))
    model = DDP(module)
    for tensor in (*module.parameters(), module[1].running_mean):
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
    for step in range(2):
        model.zero_grad()
        model(torch.randn(5, 3)).exp().sum().backward()
        own = [p.grad.clone() for p in module.parameters()]
        model.finish_gradient_synchronization()
        for p, mean in zip(module.parameters(), own):
            dist.all_reduce(mean)
            torch.testing.assert_close(p.grad, mean / dist.get_world_size())
"""
TESTS = {"ring": (RING, RING_TESTS), "naive-ddp": (NAIVE, DDP_TESTS)}


def graded_tests(name, folder, tests, solution=""):
    path = folder / "test_mine.py"
    path.write_text(tests)
    return grade(name, written(folder, solution or TESTS[name][0]), 2, patience(5.0), tests=path)


def test_broken_variants_take_what_the_wrapper_takes(tmp_path):
    """Else tests that pass a group would seem to see every variant."""
    solution = NAIVE.replace("(self, module, size=4)", "(self, module, group=None, size=4)")
    tests = "from torch import nn\n\ndef test_nothing(DDP):\n    DDP(nn.Linear(2, 2), group=None)\n"
    report = graded_tests("naive-ddp", tmp_path, tests, solution)
    assert [each.status for each in report.verdicts].count("WRONG") == len(VARIANTS["naive-ddp"]), report


def test_the_page_says_what_its_test_misses(tmp_path):
    text = (ROOT / "docs/check.md").read_text().split("```python test_ring.py\n")[1].split("```")[0]
    missed = [each.name for each in graded_tests("ring", tmp_path, text).verdicts if each.status == "WRONG"]
    assert missed == ["what does not divide evenly is left out", "every piece is sent twice"]


def test_tests_that_assert_nothing_are_told_what_they_accept(tmp_path):
    """All broken variants, one by one, with exit code 1."""
    for name, text in (("ring", RING_TESTS), ("naive-ddp", DDP_TESTS)):
        report = graded_tests(name, tmp_path, re.sub("assert |torch.testing.assert_close", "", text))
        accepted = {each.name for each in report.verdicts if each.says.startswith("your tests accept this broken")}
        assert accepted == VARIANTS[name].keys(), report
        assert report.exit_code() == 1


def test_tests_of_what_is_wrong_or_without_variants(tmp_path):
    """Tests that fail on the file itself, a file that is wrong itself, no tests, and an exercise without variants."""
    report = graded_tests("ring", tmp_path, RING_TESTS.replace("sum(range(world))", "0"))
    assert (report.exit_code(), report.of("your own file").status) == (2, "FAILED")
    report = graded_tests("ring", tmp_path, RING_TESTS, RING.replace("+= new", "-= new"))
    assert (report.exit_code(), report.candidate) == (1, "all_reduce")
    for name, tests, said in (("ring", "x = 1\n", "has no function test_"),
                              ("matrices", RING_TESTS, "no broken variants; ring, naive-ddp have")):  # fmt: skip
        with pytest.raises(UserError, match=said):  # before anything runs: the file is not filled in
            graded_tests(name, tmp_path, tests, EXERCISES[name]["file"])


def test_a_file_that_changes_within_a_second_is_read_anew(tmp_path):
    for text in ("number = 1\n", "number = 2\n"):
        path = written(tmp_path, text)
        os.utime(path, (0, 0))
        assert vars(load_file(Path(os.path.relpath(path))))["number"] == int(text[-2])
        py_compile.compile(str(path))  # as an import elsewhere would
    assert load_file(Path(os.path.relpath(path))).__file__ == str(path.resolve())


@pytest.mark.parametrize("name", TESTS)
def test_the_command_line_grades_tests(name, tmp_path, capsys):
    """They see every broken variant."""
    solution, path = str(written(tmp_path, TESTS[name][0])), tmp_path / "test_mine.py"
    path.write_text(TESTS[name][1])
    assert run("--exercise", name, solution, "--tests", str(path), "--strict") == 0
    assert capsys.readouterr().out.count(" fails") == len(VARIANTS[name])
