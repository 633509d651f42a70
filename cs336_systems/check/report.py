"""Verdicts: one for each property of a candidate, from its ranks' notes and the reference's."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from textwrap import wrap as wrap_text
from typing import Any

import torch
from torch import nn

from cs336_systems.check.candidates import OWN_OPTIMIZER, Candidate, called, candidate
from cs336_systems.check.cases import CASES, DIED, FIRST, Case, bound, clipped
from cs336_systems.check.diagnosis import Diagnosis, diagnose
from cs336_systems.check.oracle import Notes, Wrong
from cs336_systems.check.ranks import HUNG, BrokenPromiseError, clean_torch, is_gone, references, run_cases
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

RIGHT, WRONG, WEAK, REFUSED, ABSENT, FAILED = "right", "WRONG", "weak", "refused", "not offered", "FAILED"
TRAINING = {  # rows of the first case: kind of tensor, and whether it is before the first step
    "initial weights": ("weight", True), "loss": ("loss", False), "gradients": ("gradient", False),
    "weights after 3 steps": ("weight", False),
}  # fmt: skip
BUILT = (FIRST.name, "waits for what it launches", "accumulation in no_sync", "accumulation without no_sync",
         "clipping by the norm", "state saved and loaded", "a rank that dies")  # with the user's own model  # fmt: skip
OFFERED = {"no_sync": "the model has no method no_sync", OWN_OPTIMIZER: OWN_OPTIMIZER}
BROKEN = f"{BrokenPromiseError.__name__}: "
REFERENCES: dict[tuple[str, int], dict[str, list[Notes]]] = {}  # by kind and ranks, of the cases without a user's model


@dataclass(frozen=True)
class Verdict:
    """The finding on a property, and the page that explains it."""

    name: str
    status: str
    says: str = ""
    page: str = ""
    cause: str = ""


@dataclass
class Report:
    """All verdicts on a candidate."""

    candidate: str
    kind: str
    ranks: int
    verdicts: list[Verdict] = field(default_factory=list)
    how: str = "compared with one process"

    def of(self, name: str) -> Verdict:
        return next(each for each in self.verdicts if each.name == name)

    def exit_code(self, strict: bool = False) -> int:
        """0: right; 1: wrong numbers, with `strict` also what is weak, refused or not offered; 2: it could not run."""
        found = {each.status for each in self.verdicts}
        if FAILED in found:
            return 2
        return int(WRONG in found or (strict and bool(found - {RIGHT})))

    def __str__(self) -> str:
        lines = [f"{self.candidate}: {self.kind} on {self.ranks} rank{'s' * (self.ranks > 1)}, {self.how}"]
        for each in self.verdicts:
            says, page = printable(each.says), f"See {each.page}" if each.page and each.status != RIGHT else ""
            short = not page and len(says) < 60
            row = ", ".join(filter(None, (each.cause, says if short else "")))
            lines.append(f"  {each.status:<11} {each.name}{f': {row}' * bool(row)}")
            for text in ("" if short else says, page):
                lines += [" " * 16 + line for line in wrap_text(text, 94, break_on_hyphens=False)]
        counts = Counter(each.status for each in self.verdicts)
        order = (RIGHT, WRONG, FAILED, WEAK, REFUSED, ABSENT)
        return "\n".join([*lines, ", ".join(f"{counts[status]} {status}" for status in order if status in counts)])


def check(
    wrap: Any, build: Callable[[], Any] | None = None, kind: str | None = None, ranks: int = 2, timeout: float = 5.0,
    only: tuple[str, ...] | str = (),
) -> Report:  # fmt: skip
    """Compare a parallel run with one process, in double precision, on forked ranks of this machine's CPU.

    `wrap`: a class or function of a module (ddp, fsdp, tensor-parallel), a sharded optimizer's class, a training step,
    or a `Candidate`. `build`: returns a module, or (module, loss, batch), where batch(step) returns inputs and targets
    whose first axis is divided among the ranks; a small model by default. `only`: names of properties.
    Raises UserError.
    """
    if not 2 <= ranks <= 4:
        raise UserError(f"--ranks {ranks}: take 2, 3 or 4; a batch has 12 rows, in some cases divided unequally")
    chosen = wrap if isinstance(wrap, Candidate) else candidate(wrap, kind)
    only, names = (only,) if isinstance(only, str) else only, [each.name for each in CASES]
    wanted = {FIRST.name if name in TRAINING else name for name in only} or set(names)
    cases = [each.of(chosen.kind) for each in CASES if chosen.kind in each.kinds and each.name in wanted]
    if build is not None:
        cases = [_built(each, build, ranks) if each.name in BUILT else each for each in cases]
    if unknown := wanted - set(names):
        raise UserError(f"no property is named {', '.join(unknown)}; there are {', '.join(names)}")
    report = Report(chosen.name, chosen.kind, ranks)
    found = run_cases(chosen, cases, ranks, timeout)
    kept = REFERENCES.setdefault((chosen.kind, ranks), {})
    own = [case for case, _ in found if build is not None and case.name in BUILT]
    kept |= references([case for case, _ in found if case not in own and case.name not in kept], ranks)
    want = kept | references(own, ranks)
    with clean_torch():
        for case, notes in found:
            report.verdicts += _judge(case, want, notes)
    known = [each.cause for each in report.verdicts if each.name in TRAINING and each.cause]
    for i, each in enumerate(report.verdicts):
        if each.name not in TRAINING and each.cause in known:
            report.verdicts[i] = replace(each, says="as in ordinary training", page="")
    return report


def assert_right(wrap: Any, build: Callable[[], Any] | None = None, strict: bool = False, **options: Any) -> None:
    """`check` for a test. Raises AssertionError with the report unless its exit code is 0."""
    report = check(wrap, build, **options)
    assert report.exit_code(strict) == 0, f"\n{report}"


def _built(case: Case, build: Callable[[], Any], ranks: int) -> Case:
    """A case over the user's own module, loss and batch."""
    with clean_torch(), called("build()"):
        built = build()
        model, loss, batch = built if isinstance(built, tuple) else (built, case.criterion, case.data)
        rows = len(batch(0)[0]) if isinstance(model, nn.Module) else 0
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        what = type(model).__name__
        raise UserError(f"build() returned {what}; return a module with parameters, or (module, loss, batch)")
    if rows % ranks:
        raise UserError(f"the batch has {rows} rows, which {ranks} ranks cannot share equally")
    longest = max([rows, *(max(p.shape, default=1) for p in model.parameters())])
    stages = 3 * 16 * sum(1 for _ in model.modules())  # a module is a few operations, forward and backward

    def make() -> nn.Module:  # a copy: build() may return the same module again
        again = build()
        return copy.deepcopy(again[0] if isinstance(built, tuple) else again)

    tolerance = max(case.tolerance, bound(torch.float64, stages, longest))
    return replace(case, make=make, criterion=loss, data=batch, tolerance=tolerance)


def _judge(case: Case, want: dict[str, list[Notes]], got: list[Notes]) -> list[Verdict]:
    """The rows of a case, of which `want` has the reference unless an error is right."""
    errors = [notes.error for notes in got]
    for name, says in OFFERED.items():
        if any(name in error and "AttributeError" in error for error in errors):
            return [Verdict(case.name, ABSENT, says, case.page)]
    if case.error:  # right if every remaining rank raises one
        left = errors[:-1] if case.name == "a rank that dies" else errors
        if not (gone := [each for each in left if is_gone(each) or not each]):
            return [Verdict(case.name, RIGHT, first_error(left))]
        silent = ", ".join(str(rank) for rank, each in enumerate(left) if not each)
        says = "it hangs" if HUNG in gone else gone[0] or f"no error on rank {silent}"
        return [Verdict(case.name, WEAK, says, case.page)]
    evidence = Diagnosis(case, want[case.name], got)
    found = [] if any(map(is_gone, errors)) and case.name == FIRST.name else evidence.wrong()
    first = [Wrong(*each[:5], *evidence.cause(each)) for each in found if each.moment == found[0].moment]
    if case.name != FIRST.name or (any(errors) and not found):
        return [_verdict(evidence, errors, first)]
    rows = []
    for name, (kind, is_before) in TRAINING.items():
        if kind == "loss" and not any(key[1] == kind for key in evidence.got[0].tensors):
            continue  # a training step, whatever it returns
        moments = [each.moment for each in found if each.key[1] == kind and (each.key[0] < 0) == is_before]
        if not moments:
            rows.append(Verdict(name, RIGHT))
        elif moments[0] == found[0].moment:
            rows.append(replace(_verdict(evidence, errors, first), name=name))
        else:
            rows.append(Verdict(name, WRONG, "a consequence of the cause named in another row"))
    return rows


def _verdict(evidence: Diagnosis, errors: list[str], found: list[Wrong]) -> Verdict:
    """The verdict on a case from its first wrong tensors and the ranks' errors."""
    case, error = evidence.case, first_error(errors)
    silent = ", ".join(str(rank) for rank, each in enumerate(errors) if not each)
    if found:
        cause, says, page = diagnose(found, evidence)
        must = case.must and not (evidence.in_step and case.program is clipped)  # there are no gradients to clip yet
        wrong = case.name == FIRST.name or (must and not error)
        page = case.page if cause == "unknown" else page
        return Verdict(case.name, WRONG if wrong else WEAK, f"{says}{f' Later: {error}' * bool(error)}", page, cause)
    if not error:
        return Verdict(case.name, RIGHT)
    is_weak = silent or any(map(is_gone, errors))
    status = FAILED if case.name == FIRST.name else REFUSED if case.must else WEAK if is_weak else RIGHT
    says = error + "; it hung and was killed" * (HUNG in errors and error != HUNG)
    says += f", while rank {silent} went on as if nothing had happened" if silent else ""
    if status in (FAILED, REFUSED) and says.startswith(BROKEN):  # it runs, but breaks a condition of the exercise
        return Verdict(case.name, WRONG, says.removeprefix(BROKEN))
    return Verdict(case.name, status, says, DIED if is_gone(error) else case.page)


def first_error(errors: list[str]) -> str:
    """The first error that says more than that another rank has ended, or else the first, or an empty text."""
    lost = ("onnection", "CommError", "closed", HUNG)
    said = [each for each in errors if each]
    return next((each for each in said if not any(words in each for words in lost)), "".join(said[:1]))
