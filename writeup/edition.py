"""Chapters of the write-up in order, and editions of it: chosen chapters alone, and a version without solutions."""

import re
from collections.abc import Sequence

from cs336_systems.errors import UserError

PARTS = {
    "": ("introduction",),
    "What it rests on": ("equality", "gallery"),
    "One device": ("step", "norms", "flash-attention", "memory"),
    "Many devices": ("all-reduce", "ddp", "sharding", "model-parallelism", "moe", "long-context"),
    "Conclusions": ("predicting", "plausibility", "choosing"),
    "Appendix": ("course-map", "sources"),
}
CHAPTERS = tuple(name for names in PARTS.values() for name in names)


SAID = (
    "*Edition without solutions: questions, figures and tables as measured; answers, derivations, titles that tell a "
    "finding, changes of code and names of files with solutions are left out.*"
)
FENCED = re.compile(r"^::: answer\n.*?^:::\n|^~~~~ diff\n.*?^~~~~\n", re.M | re.S)
CODE = re.compile(r"\*?\bCode(?: \([^)]*\))?:(?:(?!\n:::).)*", re.S)  # to the end of a paragraph
FOUND = re.compile(r"!\[\*\*.*?\*\* ?", re.S)  # the finding that is a figure's title
FILES = re.compile(r"^ *- code: .*\n|[ ,]*`(?:cs336_systems|kernels)/[\w/]+\.py`†?:?", re.M)
FORMULA = re.compile(r"(?<!\\)\$[^$\n]")
HEADING = re.compile(r"^(#{2,4}) .*\n\n(?=#{2,4} |\Z)", re.M)  # of a section that is empty now
LINK = re.compile(r"\[([^\]]*)\]\(#([\w-]+)\)")


def parts(chapters: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The parts with the chapters that were asked for, in their order; all if none was. Raises UserError for a chapter
    that does not exist."""
    if unknown := [name for name in chapters if name not in CHAPTERS]:
        raise UserError(f"there is no chapter {unknown[0]!r}: choose from {', '.join(CHAPTERS)}")
    wanted = {part: tuple(name for name in names if name in (chapters or CHAPTERS)) for part, names in PARTS.items()}
    return {part: names for part, names in wanted.items() if names}


def without_solutions(text: str) -> str:
    """A chapter's Markdown without answers, derivations, findings in titles, changes of code and files of solutions."""
    text = FILES.sub("", FOUND.sub("![", FENCED.sub("", text)))
    blocks = re.split(r"(\n{2,})", text)
    for place, block in enumerate(blocks):
        if FORMULA.search(block) and not block.startswith(("|", "#", ":::", "![")):
            blocks[place] = "\n".join(line for line in block.splitlines() if line.startswith(":::"))
        elif "Code" in block and not block.startswith("|"):
            blocks[place] = CODE.sub("", block).rstrip()
    return HEADING.sub("", re.sub(r"\n{3,}", "\n\n", "".join(blocks)))


def unlinked(text: str) -> str:
    """Replace links to chapters that are left out by plain words."""
    there = set(re.findall(r"\{#([\w-]+)", text))
    return LINK.sub(lambda link: link[0] if link[2] in there else link[1] or "another chapter", text)
