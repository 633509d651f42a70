"""Outcomes in docs/data_parallel.md are those that tests prove: `python -m tests.test_outcomes` writes it."""

from pathlib import Path

from tests import test_faults_backward, test_faults_ddp, test_faults_gradient, test_faults_sharding, test_faults_zero

PAGE = Path(__file__).resolve().parents[1] / "docs/data_parallel.md"
BEGIN, END = "<!-- outcomes: begin (python -m tests.test_outcomes writes this) -->", "<!-- outcomes: end -->"


def describe(outcome: str | dict[str, str]) -> str:
    """`right`, or the words of the error, by mode where modes differ."""
    if outcome == "right":
        return "right"
    if isinstance(outcome, str):
        return f"error on every rank: “{outcome.strip()}”"
    return (
        "; ".join(f"{modes.replace(' | ', ', ')}: “{words.strip()}”" for modes, words in outcome.items())
        + "; else right"
    )


def outcome_table() -> str:
    """One row per case, in every mode in which its outcome is tested."""
    lines = ["| what happens | outcome |", "| --- | --- |"]
    modules = (test_faults_ddp, test_faults_backward, test_faults_gradient, test_faults_zero, test_faults_sharding)
    for module in modules:
        lines += [f"| {name} | {describe(case.outcome)} |".replace("<", "\\<") for name, case in module.CASES.items()]
    return "\n".join(lines)


def with_table(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{outcome_table()}\n\n{END}{rest.split(END)[1]}"


def test_the_page_lists_what_is_proven():
    text = PAGE.read_text()
    assert with_table(text) == text, "run python -m tests.test_outcomes and commit"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
