"""Broken variants of the library, as data: the change, its visible effect, and the test that must fail.

`gallery.toml` has them; tests/test_gallery.py plants each in forked ranks and runs the test that is named.
"""

import ast
import tomllib
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path

from cs336_systems.errors import UserError

GALLERY = Path(__file__).resolve().with_name("gallery.toml")
ROOT = GALLERY.parents[1]


@dataclass(frozen=True)
class Variant:
    """A mistake: source lines (old, new) of a file, and the node id of an existing test that then fails.

    `wrong` says what happens, `seen` what a user who trains would notice. With `slow_network`, collectives start only
    when they are waited for, so that a missing wait always shows. A variant that `may_hang` may end with a timeout
    error; for the others, such an error proves nothing.
    """

    name: str
    title: str
    file: str
    test: str
    wrong: str
    seen: str
    changes: tuple[tuple[str, str], ...] = field(default=())
    slow_network: bool = False
    may_hang: bool = False

    def sources(self, root: Path = ROOT) -> tuple[str, str]:
        """Return the file's text, and the variant's.

        Raises UserError if the old lines are not there, or more than once: the file has changed, and the variant must.
        """
        before = after = (root / self.file).read_text(encoding="utf-8")
        for old, new in self.changes:
            if (found := before.count(old)) != 1:
                line = old.strip().splitlines()[0].strip()
                raise UserError(
                    f"variant {self.name}: its lines from {line!r} on are {found} times in {self.file}, not once; "
                    "change the variant in writeup/gallery.toml as the file was"
                )
            after = after.replace(old, new)
        return before, after

    def diff(self, root: Path = ROOT) -> str:
        """The change as `diff -u` shows it with two lines of context, and the function instead of line numbers."""
        before, after = self.sources(root)
        lines = list(unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm=""))[2:]
        tree = ast.parse(after)
        return "\n".join(_headed(line, tree) if line.startswith("@@") else line for line in lines)


def _headed(line: str, tree: ast.Module) -> str:
    """`@@ GradBucket.finish @@` of `@@ -173,6 +173,5 @@`: the function that the middle of the lines is in."""
    first, count = map(int, line.split("+")[1].split(" ")[0].split(","))
    middle, names, inside = first + count // 2, [], list(ast.iter_child_nodes(tree))
    for node in inside:  # grows meanwhile
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= middle <= (node.end_lineno or 0):
            names.append(node.name)
            inside += ast.iter_child_nodes(node)
    return f"@@ {'.'.join(names)} @@"


def variants(path: Path = GALLERY) -> tuple[Variant, ...]:
    """All of them, in the order of the file. Raises UserError for one that is not whole."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["variant"]
        changes = [tuple((change["old"], change["new"]) for change in entry.pop("change")) for entry in entries]
        found = tuple(Variant(**entry, changes=each) for entry, each in zip(entries, changes, strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from None
    if len({each.name for each in found}) < len(found):
        raise UserError(f"{path.name}: two variants have one name")
    return found
