"""Every command of the README, typed as it is printed: `python -m tests.readme`; `--list` only shows them.

Commands are what stands in blocks of sh, one a line, and what is marked as code elsewhere and begins with a program's
name. They run two at a time in the order of the page, in a clean copy of the project: what they write is no part of
yours. A command that names a folder under runs/ waits for those before it that name the same. Python blocks run, too,
those with a file's name (```python yours.py) by the command that names it. What stands between the marks of
`make readme` is a result, and no command.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import click
from rich.table import Table

from benchmarks.tables import BEGIN, END
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds

ROOT = Path(__file__).resolve().parents[1]
EXEMPT = dict.fromkeys(("make test", "make proof", "make test-all"), "a part of `make test-all`, which .ci/run types")
EXEMPT["make writeup"] = "tests/writeup/test_page.py builds it"
for each in ("ours:ddp-bucketed", "torch:ddp"):
    EXEMPT[f"python -m cs336_systems.check {each}"] = "tests/check/test_check.py checks the same"
PROGRAMS = (".", "bash", "cd", "git", "make", "pip", "python", "sbatch", "torchrun")  # what a command begins with
LIMIT = 300.0  # seconds of one command; each should take less than 60 on two cores
EXPECTED = 12.0  # seconds of a command, until the first ones tell
LAST_LINES = 30  # of a failed command's output
HUNG = "hung"
MARK = "CS336_README_RUN"  # in the environment of all that a command starts
AT_A_TIME = 2  # most use one core while they start
PATIENCE = 10.0  # seconds that what was killed gets to be gone


class Command(NamedTuple):
    """A command, and its line of the README."""

    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """Commands of a README, in order and each once, and the files that it has its readers write."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, line: int) -> None:
        """A command without the remark after it, unless it is there."""
        text = re.sub(r"\s+# .*", "", text.strip())
        if text not in [command.text for command in self.commands]:
            self.commands.append(Command(text, line))


class Outcome(NamedTuple):
    """Outcome of a command: its exit code, or why there is none, and its output."""

    command: Command
    seconds: float
    code: int | str
    output: str


def read_page(text: str) -> Page:
    """The commands and files of a README. Raises UserError for a block in a language that is not known here."""
    page, lines, number = Page(), text.splitlines(), 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line == BEGIN and END in lines[number:]:
            number = lines.index(END, number)
        elif line.lstrip().startswith("```"):
            start = number
            if "```" not in (rest := [each.strip() for each in lines[number:]]):
                raise UserError(f"line {start}: this block does not end")
            number += rest.index("```") + 1
            _take_block(page, line.strip()[3:].split(), lines[start : number - 1], start + 1)
        else:
            for span in re.findall(r"`([^`]+)`", line):
                if " " in span and span.split()[0] in PROGRAMS:
                    page.add(span, number)
    return page


def _take_block(page: Page, info: list[str], lines: list[str], start: int) -> None:
    """The lines between two fences; the first is line `start` of the page."""
    language, names = (info or ["no language"])[0], info[1:]
    if language == "sh":
        for number, line in enumerate(lines, start):
            if line.strip() and not line.lstrip().startswith("#"):
                page.add(line, number)
    elif language == "python":
        name = names[0] if names else f"block_of_line_{start}.py"
        page.files[name] = "\n".join([*lines, ""])
        if not names:
            page.add(f"python {name}", start)
    elif language != "text":
        raise UserError(f"line {start - 1}: a block of {language}; write sh, python, or text for what is not typed")


def copy_project(folder: Path) -> None:
    """The project as it is here, changes included, without what git ignores."""
    git = partial(subprocess.check_output, cwd=ROOT, text=True)
    git(["git", "clone", "--quiet", ROOT, folder])
    for name in git(["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]).split("\0")[:-1]:
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # A file that git has just written would look newer to make than the environment.
    shutil.copystat(ROOT / "pyproject.toml", folder / "pyproject.toml")


def prepare(folder: Path, page: Page) -> dict[str, str]:
    """Copy the project, write the page's files, and return the environment of its commands."""
    project = folder / "project"
    copy_project(project)
    for name, text in page.files.items():
        (project / name).write_text(text)
    (folder / "tmp").mkdir()
    environment = dict(os.environ)
    if "VENV" in environment and not (project / ".venv").exists():  # as make would have made it
        (project / ".venv").symlink_to(Path(environment["VENV"]).resolve(), target_is_directory=True)
    environment["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{environment['PATH']}"
    # The environment has the project's original installed: torchrun puts a script's folder on sys.path, and no more.
    environment["PYTHONPATH"] = str(project)
    environment["TMPDIR"] = str(folder / "tmp")
    environment["OMP_NUM_THREADS"] = "1"  # two commands with two threads each would wait for each other's cores
    return environment


def run(command: Command, folder: Path, environment: dict[str, str], limit: float) -> Outcome:
    """Type one command and wait for its end, which is forced after `limit` seconds; nothing of it runs on."""
    mark, start = f"{folder}.{command.line}.", time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace", dir=folder) as output:
        words = ["bash", "-c", command.text]
        where = {"cwd": folder / "project", "env": environment | {MARK: mark}, "start_new_session": True}
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **where)
        code: int | str = HUNG
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            seconds = time.monotonic() - start
            left = end_what_is_left(mark)
            process.kill()
            process.wait()
        if left and code == 0:
            code = f"left {len(left)} running"
        output.seek(0)
        return Outcome(command, seconds, code, output.read())


def end_what_is_left(mark: str) -> dict[int, str]:
    """Kill what a command left running. Returns the command line of each by its number."""
    found, deadline = {}, time.monotonic() + PATIENCE
    while (left := processes(mark)) and time.monotonic() < deadline:
        found |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return found


def processes(mark: str) -> dict[int, str]:
    """The command line of every process, by its number, whose mark begins with this one. Only Linux tells."""
    found, sought = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if any(each.startswith(sought) for each in (folder / "environ").read_bytes().split(b"\0")):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def run_page(page: Page, limit: float) -> list[Outcome]:
    """Type every command of a page but the exempt ones, and show how far this is."""
    commands = [command for command in page.commands if command.text not in EXEMPT]
    with tempfile.TemporaryDirectory(prefix="readme-", ignore_cleanup_errors=True) as name:
        environment = prepare(Path(name), page)
        with console.progress("commands", len(commands), EXPECTED * len(commands) / AT_A_TIME) as advance:

            def take(command: Command, earlier: list[Future[Outcome]]) -> Outcome:
                wait(earlier)
                outcome = run(command, Path(name), environment, limit)
                advance(f"{command.text}{'' if outcome.code == 0 else f' ({outcome.code})'}")
                return outcome

            with ThreadPoolExecutor(AT_A_TIME) as pool:
                try:
                    begun: dict[Command, Future[Outcome]] = {}
                    for command, earlier in in_order(commands):
                        begun[command] = pool.submit(take, command, [begun[each] for each in earlier])
                    return [begun[command].result() for command in commands]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    end_what_is_left(Path(name).name)
                    raise


def in_order(commands: list[Command]) -> list[tuple[Command, list[Command]]]:
    """Each command with those before it that name the same folder under runs/; those that wait for others come last."""
    folders = [set(re.findall(r"\bruns/[\w-]+", command.text)) for command in commands]
    found = []
    for number, command in enumerate(commands):
        found.append((command, [commands[i] for i in range(number) if folders[i] & folders[number]]))
    return sorted(found, key=lambda each: bool(each[1]))


def show(outcomes: list[Outcome], together: float) -> None:
    """A table, and the end of what each failed command said."""
    screen = console.console()
    table = Table("line", "command", "seconds", "exit code", title=f"{len(outcomes)} commands of the README")
    for command, seconds, code, _ in outcomes:
        style = None if code == 0 else "red"
        table.add_row(str(command.line), command.text, f"{seconds:.1f}", str(code), style=style)
    screen.print(table)
    screen.print(f"{format_seconds(together)}, {AT_A_TIME} commands at a time")
    for text, reason in EXEMPT.items():
        screen.print(f"not run: {text} ({reason})")
    for outcome in outcomes:
        if outcome.code != 0:
            last = "\n".join(outcome.output.splitlines()[-LAST_LINES:])
            screen.print(f"\nline {outcome.command.line}, {outcome.command.text}: {outcome.code}\n{last}")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treat a signal that would end this process at once like ^C, so that what it started is ended, too."""
    raise KeyboardInterrupt


@click.command()
@click.option("--list", "only_list", is_flag=True, help="Print the commands and run none.")
@click.option("--only", metavar="WORDS", default="", help="Those that contain these words.")
@click.option("--limit", default=LIMIT, show_default=True, help="Seconds after which a command is ended.")
def main(only_list: bool, only: str, limit: float) -> None:
    """Run the README's commands as printed; exit code 1 if any fails, hangs or leaves a process behind."""
    page = read_page((ROOT / "README.md").read_text(encoding="utf-8"))
    page = Page([command for command in page.commands if only in command.text], page.files)
    if not page.commands:
        raise UserError(f"no command of the README has {only!r} in it")
    if only_list:
        for command in page.commands:
            reason = EXEMPT.get(command.text)
            print(f"{command.line:4}  {command.text}{f'  (not run: {reason})' if reason else ''}")
        return
    signal.signal(signal.SIGTERM, interrupt)
    start = time.monotonic()
    outcomes = run_page(page, limit)
    show(outcomes, time.monotonic() - start)
    if any(outcome.code != 0 for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
