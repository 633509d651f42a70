"""Verdicts of `check`: no false alarm on right candidates, and the cause of each planted or published mistake named."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from cs336_systems.check import assert_right, check
from cs336_systems.check.candidates import Candidate, candidate, load
from cs336_systems.check.cases import CASES
from cs336_systems.check.targets import OURS as TARGETS
from cs336_systems.ddp import NaiveDDP
from cs336_systems.errors import UserError
from tests.check.planted import DDP, DIVIDE, MISTAKES, OPTIMIZED, PUBLISHED, STUDENTS, Planted, make
from tests.support.gallery import plant, slow_down
from tests.support.ranks import patience
from tests.test_readme import ROOT, anchors
from writeup.gallery import Variant, variants

ADAPTERS = ROOT / "tests/check/adapters.py"
PATIENCE = 2.0  # seconds that a rank waits for another one on a quiet machine
BUCKETED, WAITS = "ours:ddp-bucketed", "waits for what it launches"
MUST = tuple(each.name for each in CASES if each.must)
RIGHT = ("torch:ddp", "torch:fsdp2", "torch:zero", *(f"ours:{name}" for name in TARGETS))
SEEN = {  # the gallery's variants of data parallelism: candidate, the property that shows it, and the cause
    "missing-wait": ("ours:ddp-naive", "gradients", "never synchronised"),
    "averaged-twice": (BUCKETED, "gradients", "averaged twice"),
    "not-averaged": (BUCKETED, "gradients", "summed"),
    "skipped-bucket": (BUCKETED, "unused on every rank", "never synchronised"),
    "sticky-no-sync": (BUCKETED, "accumulation in no_sync", "never synchronised"),
    "wrong-slice": ("ours:zero2", "gradients", "another tensor's"),
    "lost-tail": ("ours:zero1", "weights after 3 steps", "unmoved"),
    "lost-rows": ("ours:zero3", "gradients", "zero"),
    "no-all-gather": ("ours:zero1", "weights after 3 steps", "unmoved"),
    "norm-counts-replicas": ("ours:zero1", "clipping by the norm", "norm of replicas"),
}
LOUD = {  # variants that the library's own guards or torch refuse
    "order-of-readiness": ("ours:ddp-overlapped", "unused on one rank", "refused"),
    "freed-too-early": ("ours:zero3", "training", "FAILED"),
}


def with_variant(variant: Variant, base: Candidate) -> Candidate:
    """The candidate with a broken variant of the library planted in its ranks."""

    def build(*arguments: Any) -> Any:
        if variant.slow_network:
            slow_down()
        plant(variant)
        return base.build(*arguments)

    return replace(base, build=build)


OURS = {"unequal parts of the batch": "weak"}  # of every wrapper and stage of this library
WEAK = {  # what the torch wrappers' reports say, but for what is right
    "torch:ddp": dict.fromkeys(
        ("unused on every rank", "unused on one rank", "unequal parts of the batch", "two forwards, two backwards",
         "two backwards of one graph", "the bare module called", "frozen later", "unfrozen later",
         "a parameter replaced", "cast after wrapping", "layers in another order on one rank",
         "another learning rate on one rank"), "weak"),
    "torch:zero": {"mixed dtypes": "refused", "another learning rate on one rank": "weak"},
    "torch:fsdp2": {"a parameter without axes": "refused", "unused on one rank": "refused", "mixed dtypes": "refused",
                    "accumulation in no_sync": "not offered"}
    | dict.fromkeys(
        ("unequal parts of the batch", "seeds that differ by rank", "a backward that fails, and again",
         "a parameter replaced", "layers in another order on one rank", "another learning rate on one rank"), "weak"),
}  # fmt: skip


def odd(report):
    return {each.name: each.status for each in report.verdicts if each.status != "right"}


@pytest.mark.parametrize("name", WEAK)
def test_weak_points_of_torch_are_told(name):
    """Advice, with a page that explains it, and no false alarm: exit code 0 unless it is strict."""
    report = check(load(name)[0][0], timeout=patience(PATIENCE))
    assert odd(report) == WEAK[name], report
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)
    for page, _, anchor in (each.page.partition("#") for each in report.verdicts if each.name in WEAK[name]):
        assert page in str(report)
        assert anchor in anchors(ROOT / page)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RIGHT if name.startswith("ours")])
def test_this_library_is_right_in_everything(name):
    assert odd(report := check(load(name)[0][0], timeout=patience(PATIENCE))) == OURS, report


@pytest.mark.parametrize("name", STUDENTS)
def test_no_false_alarm_on_what_students_write(name):
    assert_right(make(STUDENTS[name][1]), timeout=patience(PATIENCE), only=MUST)


class Descent:
    """An optimizer that is none of torch's, and has no param_groups."""

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    def step(self):
        for p in self.params:
            p.data -= self.lr * p.grad

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def test_an_optimizer_of_ones_own_is_followed():
    """After a cast its updates are right, but rounded."""

    def with_descent(module, lr):
        model = make(DDP)(module)
        return model, Descent(model.parameters(), lr)

    report = check(with_descent, timeout=patience(PATIENCE), only=("training", "cast after wrapping"))
    assert [each.cause for each in report.verdicts if each.status != "right"] == ["rounded"], report


@pytest.mark.parametrize("name", ["ours:zero2", "torch:fsdp2", "accelerate"])
def test_no_false_alarm_on_three_ranks(name):
    assert_right(load(name)[0][0], ranks=3, timeout=patience(PATIENCE), only=("training", "tied weights"))


@pytest.mark.parametrize("mistake", MISTAKES + PUBLISHED, ids=lambda each: each.where or each.name)
def test_a_mistake_is_named(mistake: Planted):
    report = check(make(*mistake[1:4]), timeout=patience(PATIENCE), only=("training", mistake.property))
    weak = mistake.property == "buffers"
    assert (report.exit_code(), report.exit_code(strict=True)) == (0 if weak else 1, 1)
    found = {each.cause for each in report.verdicts if each.status == ("weak" if weak else "WRONG")} - {""}
    assert found == {mistake.cause} or (mistake.cause in found and mistake.name == "nobody waits"), report


@pytest.mark.parametrize("name", SEEN | LOUD)
def test_the_gallery_is_seen(name):
    target, where, expected = (SEEN | LOUD)[name]
    variant = next(each for each in variants() if each.name == name)
    report = check(with_variant(variant, load(target)[0][0]), timeout=patience(PATIENCE), only=("training", where))
    verdict = report.of(where)
    assert (verdict.cause if name in SEEN else verdict.status) == expected, report


def test_a_model_of_ones_own():
    """Its loss and batch are used, and a mistake is found in its parameters by their names."""

    def build() -> tuple:
        module = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False))
        batch = lambda step: (torch.linspace(-1, 1, 48).view(6, 8).roll(step), torch.ones(6, 3))  # noqa: E731
        return module, torch.nn.functional.mse_loss, batch

    only = ("training", "clipping by the norm", "a rank that dies")
    assert_right(make(DDP), build, only=only)
    with pytest.raises(AssertionError, match=r"gradient of 2\.weight in step 0"):
        assert_right(make(DDP, DIVIDE, ""), build, only=only)
    for wrong, said in (
        (lambda: 3, "build\\(\\) returned int"),
        (lambda: (*build()[:2], lambda step: [torch.ones(5)] * 2), "5 rows"),
        (lambda: torch.nn.Identity(), "return a module with parameters"),
        (lambda: 1 / 0, "^build\\(\\): ZeroDivisionError: division by zero$"),
        (lambda: (*build()[:2], lambda step: 1), "^build\\(\\): TypeError: "),
        (lambda: torch.nn.Linear(4, 2), "^one process with the model of build\\(\\): RuntimeError: mat1 and mat2"),
    ):
        with pytest.raises(UserError, match=said):
            check(make(DDP), wrong, only="training")
    same = build()
    same[0].double()
    assert_right(make(DDP), lambda: same, only="training")  # the same module each time


THREAD = "import threading\nthread = threading.Thread(target=lambda: os._exit(0))\nthread.start()\nthread.join()"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", THREAD], ids=["sys.exit", "os._exit", "in a thread"])
def test_a_file_that_exits_is_an_error(how, tmp_path):
    (tmp_path / "leaves.py").write_text(f"import os, sys\n{how}\n")
    with pytest.raises(UserError, match=r"leaves.py cannot be imported: it ended by itself with exit code 0$"):
        load(str(tmp_path / "leaves.py"))


def exit_in_thread(code: int) -> None:
    thread = Thread(target=lambda: os._exit(code))
    thread.start()
    thread.join()


def sleep_without_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(1000)


HANGS = {"a hang": lambda: time.sleep(1000), "a hang without the alarm": sleep_without_alarm}
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "an error": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "sys.exit": (lambda: sys.exit(3), "rank 1 ended by itself with exit code 3"),
    "sys.exit with words": (lambda: sys.exit("no GPU"), "rank 1 ended by itself with exit code 1: no GPU"),
    "os._exit": (lambda: os._exit(3), "rank 1 ended by itself with exit code 3"),
    "os._exit as before": (partial(os._exit, 0), "rank 1 ended by itself with exit code 0"),
    "os._exit in a thread": (lambda: exit_in_thread(3), "rank 1 ended by itself with exit code 3"),
    "a crash": (lambda: signal.raise_signal(signal.SIGSEGV), "rank 1 was killed by SIGSEGV"),
}


class Ending(torch.nn.Module):
    """Data parallelism whose rank 1 ends at once, or when a layer is left out or frozen."""

    def __init__(self, module: torch.nn.Module, end: Callable[[], object], when: str = "at once") -> None:
        super().__init__()
        self.inner, self.end, self.when = NaiveDDP(module), end, when
        self.finish_gradient_synchronization = self.inner.finish_gradient_synchronization
        if when == "at once" and torch.distributed.get_rank() == 1:
            end()

    def forward(self, tokens: torch.Tensor, skip: bool = False) -> torch.Tensor:
        is_frozen = not self.inner.module.optional.weight.requires_grad
        if torch.distributed.get_rank() == 1 and {"left out": skip, "frozen": is_frozen}.get(self.when):
            self.end()
        return self.inner(tokens, skip=skip)


def ending(*how: Any, only: str = "training", timeout: float | None = None) -> Any:
    """Report on data parallelism that ends so."""
    wrap = lambda module: Ending(module, *how)  # noqa: E731
    return check(wrap, kind="ddp", only=("training", only), timeout=timeout or patience(PATIENCE))


class Forgetful(torch.optim.Optimizer):
    """A sharded optimizer that has not kept the class that it was given."""

    def __init__(self, params: Any, optimizer_cls: Any, **options: Any) -> None:
        super().__init__([*params], options)
        self.inner = self.optimizer_cls(self.param_groups)


@pytest.mark.parametrize("name", [*ENDS, "a mistake about optimizer_cls"])
def test_a_rank_that_ends_by_itself_is_told(name):
    if name in ENDS:
        report = ending(ENDS[name][0])
        assert [each.says for each in report.verdicts] == [ENDS[name][1]], report
    else:
        report = check(Forgetful, kind="sharded-optimizer", only=("training",))
    assert [each.status for each in report.verdicts] == ["FAILED"], report
    assert report.exit_code() == 2


def test_a_rank_that_ends_by_itself_later_is_told_where_it_does():
    report = ending(lambda: os._exit(7), "left out", only="unused on every rank")
    *before, last = report.verdicts
    assert ({each.status for each in before}, last.status) == ({"right"}, "refused"), report
    assert last.says.startswith("rank 1 ended by itself with exit code 7")


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_no_verdict_and_later_a_weak_point(name):
    report = ending(HANGS[name], timeout=0.5)
    assert report.exit_code() == 2
    assert re.search("did not end|hung and was killed", str(report))
    verdict = ending(HANGS[name], "frozen", only="frozen later", timeout=patience(0.5)).of("frozen later")
    assert (verdict.status, "hung and was killed" in verdict.says or "did not end" in verdict.says) == ("weak", True)


def wide() -> tuple:
    """A model so wide that its loss hardly moves."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    data = torch.randn(12, 72, generator=torch.Generator().manual_seed(0)).split((64, 8), 1)
    return module, torch.nn.functional.mse_loss, lambda step: tuple(each.roll(step) for each in data)


RENAMED = """
        head, weight = module.head, module.head.weight
        del head.weight
        head.mine = weight
        head.register_forward_pre_hook(lambda *_: setattr(head, "weight", head.mine * 1))
        trained ="""
REDUCED, HAVING = "self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))", "if p.grad is not None]"
LOW = "; dist.all_reduce(low); flat.copy_(low); self.works.append((bucket, flat, dist.barrier(async_op=True)))"
SENT = "            dist.broadcast(parameter.detach(), 0)\n"
AXES = "a parameter without axes"
TOLD = [  # a changed DDP and its options, the one cause to be named, and what else is said
    # After wrapping, no parameter of the head has its name.
    (("\n        trained =", RENAMED), {}, "missing", ""),
    ((DIVIDE, f"{DIVIDE}            flat[0] = float('nan')\n"), {}, "not a number", ""),
    # The mean of the sum is taken in a lower precision, or in double precision; on two ranks halving is exact.
    ((".double()", ".to(torch.float16)"), {"ranks": 3}, "rounded", "(float16: relative error"),
    ((".double()", ".to(torch.bfloat16)"), {"ranks": 3}, "rounded", "(bfloat16: relative error 0.00"),
    ((REDUCED, f"low = flat.float(){LOW}"), {"ranks": 3}, "rounded", "(float32: relative error"),
    ((REDUCED, f"low = flat.half(){LOW}"), {"ranks": 3}, "rounded", "(float16: relative error"),
    ((REDUCED, f"low = flat.bfloat16(){LOW}"), {"ranks": 3}, "rounded", "(bfloat16: relative error 0.00"),
    ((DIVIDE, f"{DIVIDE}            flat[::2] *= 1.03\n"), {}, "unknown", ""),
    # A loss that is right says nothing of the weights if it does not depend on them, or not by enough.
    ((HAVING, f"{HAVING[:-1]} and p.dtype != torch.bfloat16]"), {"only": "mixed dtypes"}, "never synchronised", ""),
    (("            self.launch(bucket)", "            pass"), {"build": wide}, "never synchronised", ""),
    ((HAVING, f"{HAVING[:-1]} and p is not getattr(self.module, 'optional').weight]"), {"only": "unused on every rank"},
     "never synchronised", ""),
    # Zero is no shard of another rank.
    ((SENT, f"{SENT}            parameter.dim() or parameter.detach().zero_()\n"), {"only": AXES}, "unknown", ""),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "cause", "said"), TOLD)
def test_a_cause_is_told_with_what_shows_it(change, options, cause, said):
    report = check(make(DDP, *change), **{"only": "training", "timeout": patience(PATIENCE)} | options)
    assert {each.cause for each in report.verdicts if each.status == "WRONG"} - {""} == {cause}, report
    assert said in str(report), report
    assert report.exit_code() == 1


def test_step_sizes_of_a_parameter_without_axes_are_counted():
    report = check(make(OPTIMIZED, "lr=lr", "lr=2 * lr"), only=AXES, timeout=patience(PATIENCE))
    assert "28 another step size, 2 summed" in report.verdicts[0].says, report


def test_a_training_step_may_return_any_loss():
    """Of a step that returns the mean over the ranks, only gradients and weights are compared."""

    def step(model, optimizer, loss, inputs, targets):
        value = loss(model(inputs), targets)
        value.backward()
        for each in [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]:
            torch.distributed.all_reduce(each)
            each /= torch.distributed.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    report = check(step, only=("training", "unequal parts of the batch"))
    found = [("initial weights", ""), ("gradients", ""), ("weights after 3 steps", "")]
    found.append(("unequal parts of the batch", "mean of means"))
    assert [(each.name, each.cause) for each in report.verdicts] == found, report


def test_a_missing_wait_is_seen_behind_an_import_by_name(tmp_path):
    source = DDP.replace("from torch import nn", "from torch import nn\nfrom torch.distributed import all_reduce")
    source = source.replace("dist.all_reduce(flat", "all_reduce(flat").replace(
        "work.wait()", "__import__('time').sleep(0.02)"
    )
    (tmp_path / "mine.py").write_text(source)
    report = check(load(f"{tmp_path}/mine.py:StudentDDP")[0][0], only=("training", WAITS))
    assert report.of(WAITS).cause == "never synchronised", report
    coalesced = source.replace(" all_reduce(flat", " dist.all_reduce_coalesced([flat]")
    (tmp_path / "other.py").write_text(f"import warnings\nwarnings.simplefilter('ignore')\n{coalesced}")  # deprecated
    report = check(load(f"{tmp_path}/other.py:StudentDDP")[0][0], only=WAITS)
    assert report.of(WAITS).cause == "never synchronised", report
    polled = "            while not work.is_completed():\n                pass\n"
    assert_right(make(DDP, "            work.wait()\n", polled), only=WAITS)


def test_complex_numbers_are_compared_whole():
    def build() -> tuple:
        module = torch.nn.Linear(4, 4, dtype=torch.complex128)
        data = torch.linspace(-1, 1, 16).view(4, 4).to(torch.complex128)
        return module, lambda y, t: (y - t).abs().square().mean(), lambda step: (data.roll(step), 1j * data)

    assert_right(make(DDP, ".double()", ""), build, only="training")
    assert check(make(DDP, ".double()", ".real"), build, only="training").of("gradients").status == "WRONG"


def test_a_failed_case_leaves_nothing_to_the_next():
    """Ranks that went on after an error would find the list of ready gradients as it left it."""
    finish = "    def finish_gradient_synchronization(self):\n"
    listed = f"""{finish}
        StudentDDP.ready = [*getattr(StudentDDP, "ready", []), *self.parameters()]
        assert all(p.dim() for p in StudentDDP.ready), "no scalars"
        StudentDDP.ready = []
"""
    report = check(make(DDP, finish, listed), only=("a parameter without axes", "clipping by the norm"))
    assert [each.status for each in report.verdicts] == ["refused", "right"], report


def test_a_process_that_checks_computes_no_gradients(tmp_path, monkeypatch):
    """Beside a GPU they would give it threads, with which it could fork no ranks for a second check."""
    backward, log = torch.Tensor.backward, tmp_path / "processes"

    def logged(loss: torch.Tensor, *rest: Any, **options: Any) -> None:
        with log.open("a") as file:
            print(os.getpid(), file=file)
        backward(loss, *rest, **options)

    def build() -> tuple:
        data = torch.linspace(-1, 1, 48).view(6, 8)
        return torch.nn.Linear(8, 8), torch.nn.functional.mse_loss, lambda step: (data.roll(step), data)

    monkeypatch.setattr(torch.Tensor, "backward", logged)
    monkeypatch.setattr("cs336_systems.check.report.REFERENCES", {})
    assert_right(NaiveDDP, build, only=("training", "tied weights"))
    processes = {*map(int, log.read_text().split())}
    assert len(processes - {os.getpid()}) == len(processes) == 4, "two ranks, two references"
    monkeypatch.setattr("cs336_systems.check.ranks.has_autograd_threads", lambda: True)
    with pytest.raises(UserError, match=r"has computed gradients beside a GPU.*CUDA_VISIBLE_DEVICES="):
        check(make(DDP))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: check(make(DDP), ranks=1), "--ranks 1"),
        (lambda: check(make(DDP), ranks=5), "--ranks 5: take 2, 3 or 4"),
        (lambda: check(make(DDP), only=("speed",)), "no property is named speed"),
        (lambda: check(make(DDP), kind="pipeline"), "--as pipeline does not exist"),
        (lambda: candidate(lambda model, optimizer, cat: None, name="train"), "what is cat"),
        (lambda: load("ours:zero4"), "ours:zero4 does not exist"),
        (lambda: load("deepspeed:zero1"), "deepspeed is not installed here"),
    ],
)
def test_what_is_asked_wrongly_is_refused(call: Callable[[], Any], said: str):
    with pytest.raises(UserError, match=said):
        call()


def test_adapters_of_the_course_are_accepted(tmp_path):
    """The functions that the editions of 2024, 2025 and 2026 name, as they are."""
    candidates, build = load(str(ADAPTERS))
    assert build is None
    assert [(each.name, each.kind) for each in candidates] == [
        ("get_ddp_individual_parameters", "ddp"), ("get_ddp_bucketed", "ddp"), ("get_ddp", "ddp"),
        ("get_sharded_optimizer", "sharded-optimizer"), ("get_fsdp", "fsdp"),
    ]  # fmt: skip
    for each in candidates:
        assert_right(each, only=("training", "tied weights"), strict=True)
    path = tmp_path / "adapters.py"
    path.write_text(ADAPTERS.read_text().replace("    ddp_model.finish_gradient_synchronization()", "    pass"))
    for each in load(str(path))[0]:
        if each.kind == "ddp":
            assert check(each, only=("training",)).exit_code() == 1


def test_what_is_never_synchronised_is_wrong_in_half_precision():
    """There weights differ by less than their tolerance after a step, and gradients by more."""

    def build():
        layers = torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
        rows = torch.linspace(-1, 1, 12 * 24, dtype=torch.bfloat16).view(12, 24).sin()
        return (
            torch.nn.Sequential(*layers).bfloat16(),
            torch.nn.functional.mse_loss,
            lambda step: rows.split((16, 8), 1),
        )

    def wrap(module):
        for p in module.parameters():
            torch.distributed.broadcast(p.data, 0)
        return module

    verdict = check(wrap, build, kind="ddp", only="training").of("gradients")
    assert (verdict.status, verdict.cause) == ("WRONG", "never synchronised")
