"""docs/check.md: its table states what the tests prove, its list of properties is complete, and its examples do what
it says."""

import re

import pytest

from cs336_systems.check.__main__ import main
from cs336_systems.check.candidates import load_file
from cs336_systems.check.cases import CASES
from cs336_systems.check.diagnosis import CAUSES
from cs336_systems.check.targets import EXERCISES
from cs336_systems.host import console
from tests.check.table import ROOT, TABLES, with_table
from tests.test_readme import anchors

BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*arguments: str) -> int:
    """Exit code of the command line."""
    try:
        return console.run_command(main, list(arguments))
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_the_page_says_what_is_proven(page):
    assert with_table(page) == page.read_text(), "run python -m tests.check.table and commit"


def test_every_property_is_explained():
    rows = [line.split(" | ") for line in (ROOT / "docs/check.md").read_text().splitlines() if line.startswith("| ")]
    found = {row[0][2:]: row[-1] for row in rows if len(row) == 3}
    for case in CASES:
        assert found[f"{case.name} ({', '.join(case.kinds)})"] == ("yes |" if case.must else " |"), case.name


def test_every_cause_has_a_page():
    for cause in [*CAUSES.values(), *(each for each in EXERCISES.values() if "page" in each)]:
        page, _, anchor = cause["page"].partition("#")
        assert (ROOT / page).exists()
        assert not anchor or anchor in anchors(ROOT / page), cause


def test_the_examples_do_what_the_page_says(tmp_path, monkeypatch, capsys):
    """Files are written, commands are typed in the folder, and every line of text below a command is in its output."""
    monkeypatch.chdir(tmp_path)
    output, codes = "", []
    for language, name, body in BLOCK.findall((ROOT / "docs/check.md").read_text()):
        if language == "python":
            (tmp_path / name).write_text(body)
        elif language == "sh":
            for line in body.splitlines():
                words = [each.strip('"') for each in re.findall(r'"[^"]+"|\S+', line)]
                assert words[:3] == ["python", "-m", "cs336_systems.check"]
                codes.append(run(*words[3:], *([] if "--exercises" in words else ["--timeout", "2"])))
                output = capsys.readouterr().out
        else:
            assert body.strip("\n") in output
    assert codes == [1, 1, 0, 0, 1]
    tests = [value for name, value in vars(load_file(tmp_path / "test_mine.py")).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


WRONG = [  # mine.py, the command's words, and its one line
    ("", "nowhere.py", "cannot read nowhere.py: no such file"),
    ("", "torch:fsdp3", "neither a Python file nor one of torch:ddp"),
    ("", "ours:zero2 --ranks 1", "1 is not in the range 2<=x<=16"),
    ("", "ours:zero2 --as moe", "'moe' is not one of"),
    ("class A: ...\nclass B: ...\n", "mine.py", "has 2 classes or functions (A, B); name one"),
    ("x = 1\n", "mine.py", "has 0 classes or functions (none)"),
    ("x = 1\n", "mine.py:x", "has no class or function x"),
    ("import no_such_thing\n", "mine.py", "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
    ("", "", "nothing to check"),
    ("", "--exercise zero-4", "'zero-4' is not one of"),
    ("", "mine.py --tests mine.py", "--tests needs --exercise NAME and TARGET"),
    ("", "--exercise ring --tests mine.py", "--tests needs --exercise NAME and TARGET"),
    ("", "--exercise ring mine.py --only training --as ddp", "an exercise says what is checked: drop --as and --only"),
]


@pytest.mark.parametrize(("text", "words", "said"), WRONG)
def test_a_wrong_command_is_answered_in_one_line(text, words, said, in_tmp, capsys):
    (in_tmp / "mine.py").write_text(text)
    assert run(*words.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
