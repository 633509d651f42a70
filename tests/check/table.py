"""The tables of docs/check.md, from what the tests of check prove: `python -m tests.check.table` writes them."""

from pathlib import Path

from tests.check.planted import MISTAKES, PUBLISHED
from tests.check.test_check import LOUD, OURS, RIGHT, SEEN, STUDENTS, WEAK
from writeup.gallery import variants

PAGE = Path(__file__).resolve().parents[2] / "docs/check.md"
BEGIN, END = "<!-- says: begin (python -m tests.check.table writes this) -->", "<!-- says: end -->"
ISSUES = "https://github.com/{}/issues/{}"


def says_table() -> str:
    """Right candidates, published bugs, planted mistakes, and the gallery's variants."""
    rows = ["| candidate | verdict |", "| --- | --- |"]
    for name in RIGHT:
        told = WEAK.get(name, OURS)
        names = {status: [each for each in told if told[each] == status] for status in sorted({*told.values()})}
        texts = [f"{status}: {', '.join(each)}" for status, each in names.items()]
        rows.append(f"| `{name}` | right{'; ' * bool(texts)}{'; '.join(texts)} |")
    rows += [f"| {name}, as a student writes it | right in all that it must have |" for name in STUDENTS]
    rows += ["", "| a published bug, rebuilt small | where | property | cause named |", "| --- | --- | --- | --- |"]
    for each in PUBLISHED:
        repository, _, number = each.where.partition("#")
        link = f"[{each.where}]({ISSUES.format(repository, number)})"
        rows.append(f"| {each.name} | {link} | {each.property} | {each.cause} |")
    rows += ["", "| a mistake planted in 30 lines | property | cause named |", "| --- | --- | --- |"]
    rows += [f"| {each.name} | {each.property} | {each.cause} |" for each in MISTAKES]
    rows += [
        "",
        "| a broken variant of this library | candidate | property | cause named |",
        "| --- | --- | --- | --- |",
    ]
    titles = {each.name: each.title for each in variants()}
    for name, (target, where, cause) in (SEEN | LOUD).items():
        rows.append(f"| {titles[name]} | `{target}` | {where} | {f'an error: {cause}' if name in LOUD else cause} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{says_table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
