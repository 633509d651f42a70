"""The tables of docs/check.md and README.md, from what the tests of check prove: `python -m tests.check.table`."""

from pathlib import Path

from tests.check.planted import MISTAKES, PUBLISHED, Planted
from tests.check.test_check import LOUD, OURS, RIGHT, SEEN, STUDENTS, WEAK
from writeup.gallery import variants

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- says: begin (python -m tests.check.table writes this) -->", "<!-- says: end -->"
ISSUES = "https://github.com/{}/issues/{}"
SHOWN = ("huggingface/picotron#39", "NVIDIA/Megatron-LM#1446")  # published bugs in README


def told(name: str, shortly: bool = False) -> str:
    """What a report says of a right candidate, but for what is right."""
    said = WEAK.get(name, OURS)
    names = {status: [each for each in said if said[each] == status] for status in sorted({*said.values()})}
    if shortly and len(weak := names.get("weak", [])) > 1:
        names["weak"] = [f"{len(weak)} usages that one process allows, such as “{weak[0]}”"]
    return "; ".join(["right", *(f"{status}: {', '.join(each)}" for status, each in names.items())])


def link(bug: Planted) -> str:
    """A published bug's issue."""
    repository, _, number = bug.where.partition("#")
    return f"[{bug.where}]({ISSUES.format(repository, number)})"


def says_table() -> str:
    """Right candidates, published bugs, planted mistakes, and the gallery's variants."""
    rows = ["| candidate | verdict |", "| --- | --- |"]
    rows += [f"| `{name}` | {told(name)} |" for name in RIGHT]
    rows += [f"| {name}, as a student writes it | right in all that it must have |" for name in STUDENTS]
    rows += ["", "| a published bug, rebuilt small | where | property | cause named |", "| --- | --- | --- | --- |"]
    rows += [f"| {each.name} | {link(each)} | {each.property} | {each.cause} |" for each in PUBLISHED]
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


def short_table() -> str:
    """PyTorch's wrappers, this library's, and a few published bugs."""
    rows = ["| candidate | what `check` says |", "| --- | --- |"]
    rows += [f"| `{name}` | {told(name, shortly=True)} |" for name in WEAK]
    rows.append(f"| each of this library's {len(RIGHT) - len(WEAK)} wrappers and ZeRO stages | {told(RIGHT[-1])} |")
    bugs = [each for each in PUBLISHED if each.where in SHOWN]
    return "\n".join(rows + [f"| {link(each)}, rebuilt small | {each.property}: {each.cause} |" for each in bugs])


TABLES = {ROOT / "docs/check.md": says_table, ROOT / "README.md": short_table}


def with_table(page: Path) -> str:
    """A page with its table made anew."""
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{TABLES[page]()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(with_table(path))
