"""Output of a command line: readable numbers, progress with the time left, one line for the user's errors; options."""

import atexit
import errno
import gc
import math
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from io import TextIOWrapper
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table

from cs336_systems.errors import UserError
from cs336_systems.host.narrow import fitting
from cs336_systems.host.text import printable

PLAIN_WIDTH = 140  # columns of a table in a file or a pipe
PLAIN_SECONDS = 5.0  # seconds between two lines of progress there
PATIENCE = click.FloatRange(0.001, 1e6)  # seconds to wait; clocks count milliseconds in 32 bits


class LiteralConsole(Console):
    """Console of rich that prints text literally: square brackets are no markup, and control characters are escaped.
    Tables are not cut, and a progress bar disappears while something is printed."""

    bars: ClassVar[list[Progress]] = []  # the progress bar of this process, if it shows one

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """See rich."""
        others = [bar for bar in self.bars if bar.console is not self]
        for bar in others:
            bar.stop()
        super().print(*objects, **settings)
        for bar in others:
            bar.start()

    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process: `run_command` ends it, or a rank reports to its parent process."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich; all output passes here."""
        if isinstance(renderable, Table) and renderable.columns and renderable.show_header:
            renderable = fitting(renderable, self, options or self.options)
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """Make a console: stdout for tables and results, stderr for progress and notes; if `quiet`, it prints nothing."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return LiteralConsole(stderr=stderr, width=None if terminal else PLAIN_WIDTH, quiet=quiet)


def run_command(command: click.Command, arguments: list[str] | None = None) -> int:
    """Run a command line. A user's error becomes one line on stderr, and so does a warning, without its line of code.
    Control characters in them, and those that the terminal or pipe cannot encode, are escaped as in Python. Returns the
    exit status: 0, 2, 130 for ^C, or 1 without a message if nobody reads stdout any more (`| head`). Without
    `arguments` the process is this command's alone, and garbage is not searched for among what it has imported."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if arguments is None:
        gc.freeze()
        atexit.register(gc.freeze)
    format_of_python = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: "note: " + printable(f"{message}\n", keep="\n")
    try:
        command.main(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # click handles those inside the command
        if not is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return 1
    except (click.ClickException, UserError) as error:
        usage = " ".join(error.format_message().split()) if isinstance(error, click.ClickException) else None
        print("error:", printable(usage or str(error), keep="\n"), file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = format_of_python
    return 0


def is_unread() -> bool:
    """True if the output is a pipe that nobody reads any more."""
    look = select.poll()
    with suppress(OSError, ValueError):  # the output of a test may have no descriptor
        look.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in look.poll(0))


@contextmanager
def os_errors(doing: str, advice: str = "") -> Iterator[None]:
    """Raise UserError for an OSError inside the block: `cannot write FILE: No space left on device`, and advice."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread():  # raised by output, not by the block's files
            raise
        raise UserError(f"cannot {doing}: {error.strerror or error}{advice and f'; {advice}'}") from None


def format_bytes(count: float) -> str:
    """Format 1536 as `1.5 KiB`: binary units, as for memory."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: float, billion: str = "G") -> str:
    """Format 92700000 as `92.7 M`; billions are `B` for parameters, else `G`."""
    for unit in ("", " k", " M", f" {billion}", " T"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def format_seconds(seconds: float) -> str:
    """Format 0.0012 as `1.2 ms`, 75 as `1 min 15 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if not seconds < 48 * 3600 - 0.5:  # also NaN
        days = seconds / 86400
        return f"{days:.1f} days" if days < 730 else f"{days / 365.25:,.1f} years"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class _TimeLeft:
    """Text of the time left for equal steps: estimated first, later from the duration of the steps taken."""

    def __init__(self, steps: int, expected_seconds: float) -> None:
        self.steps, self.done, self.seconds, self.start = steps, 0, expected_seconds, time.monotonic()

    def advance(self) -> None:
        self.done += 1
        self.seconds = (time.monotonic() - self.start) / self.done * self.steps

    def __str__(self) -> str:
        return f"{format_seconds(max(0.0, self.start + self.seconds - time.monotonic()))} left"


@contextmanager
def progress(
    label: str, total: int, expected_seconds: float = 0.0, quiet: bool = False, done: int = 0
) -> Iterator[Callable[[str], None]]:
    """Show a progress bar with the time left; in a file or a pipe, a line every few seconds. Yields `advance(note)`, to
    call after each of `total` steps. Some may be `done` already; `expected_seconds` is the time for the rest."""
    left, out = _TimeLeft(total - done, expected_seconds), console(stderr=True)
    words, notes = (TextColumn(name, markup=False) for name in ("{task.description}", "{task.fields[note]}"))
    time_left = TextColumn("{task.fields[left]}", style="cyan", markup=False)
    columns = (words, BarColumn(bar_width=24), MofNCompleteColumn(), time_left, notes)
    next_line = time.monotonic() + PLAIN_SECONDS / 2
    with Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal) as bar:
        task = bar.add_task(label, total=total, completed=done, note="", left=left)
        LiteralConsole.bars[:] = [] if bar.disable else [bar]

        def advance(note: str = "") -> None:
            nonlocal next_line
            left.advance()
            bar.update(task, advance=1, note=note)
            ended = left.done == left.steps
            if bar.disable and not quiet and (time.monotonic() >= next_line or ended):
                next_line = time.monotonic() + PLAIN_SECONDS
                line = f"{label} {done + left.done}/{total}{'' if ended else f', {left}'}  {note}"
                print(printable(line.rstrip()), file=sys.stderr, flush=True)

        try:
            yield advance
        finally:
            LiteralConsole.bars.clear()


def flag(name: str) -> str:
    """Convert a name to its option: `micro_batch_size` to `--micro-batch-size`."""
    return "--" + name.replace("_", "-")


def setting(default: Any, help: str, type: Any = None, **option: Any) -> Any:
    """Define a dataclass field that `options` turns into an option of the command line. `type` is click's type, if the
    annotation is not enough; `also` are other names, `off` the opposite of a flag. The rest goes to click."""
    return field(default=default, metadata={"option": {"help": help, **({"type": type} if type else {}), **option}})


def finite(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return an option's value. Raises click.BadParameter for inf and NaN, which click takes for numbers in range."""
    if isinstance(value, float) and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, option)
    return value


def options(*settings: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that gives a click command one option for each `setting` of dataclasses, typed by its annotation: a
    bool becomes a flag, a Literal a choice, a tuple an option that may be repeated; `X | None` defaults to None."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = {name: hint for kind in settings for name, hint in get_type_hints(kind).items()}
        listed = [each for kind in settings for each in fields(kind) if "option" in each.metadata]
        own = {name for kind in settings for name in kind.__annotations__}
        listed.sort(key=lambda each: each.name not in own)  # inherited fields come last
        for each in reversed(listed):
            hint = hints[each.name]
            if type(None) in get_args(hint):
                hint = next(kind for kind in get_args(hint) if kind is not type(None))
            choice = click.Choice([str(choice) for choice in get_args(hint)])
            kinds: dict[Any, Any] = {bool: {"is_flag": True}, tuple: {"multiple": True}, Literal: {"type": choice}}
            extra = kinds.get(get_origin(hint) or hint, {"type": hint, "callback": finite}) | each.metadata["option"]
            show = each.default not in (None, ()) and hint is not bool and "[default: " not in extra["help"]
            flags = [flag(each.name), *extra.pop("also", ())]
            flags[-1] += f"/{extra.pop('off')}" if "off" in extra else ""
            function = click.option(*flags, each.name, default=each.default, show_default=show, **extra)(function)
        return function

    return decorate
