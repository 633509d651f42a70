"""Store of the ranks for text, with a time limit for every answer.

Rank 0 may hold the store. If it is stopped, its machine keeps the connection open and no answer comes, for which
torch's TCPStore has no time limit. So a thread asks one question after the other, and the caller waits for it until
the limit.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch._C._distributed_c10d import Store

from cs336_systems.host.text import printable

LONE = "surrogatepass"  # a file name that is not Unicode holds lone surrogates, which must survive the way


class StoreLostError(RuntimeError):
    """The store is gone, or did not answer in time; the message says which."""


class TimedStore:
    """A store whose answers come within `limit`. Every method raises StoreLostError otherwise."""

    def __init__(self, store: Store, limit: timedelta) -> None:
        self.store, self.limit = store, limit

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set."""
        return bool(ask(self.limit, self.store.check, keys))

    def get(self, key: str) -> str:
        """Text of a key that is set."""
        return bytes(ask(self.limit, self.store.get, key)).decode(errors=LONE)

    def set(self, key: str, text: str) -> None:
        """Set a key to any text."""
        ask(self.limit, self.store.set, key, text.encode(errors=LONE))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at zero; returns the sum."""
        return int(ask(self.limit, self.store.add, key, amount))

    def set_first(self, key: str, text: str) -> str:
        """Set a key unless it is set; returns its text."""
        return bytes(ask(self.limit, self.store.compare_set, key, "", text)).decode()


class _Asker:
    """Thread that asks the store. A question that exceeded its limit keeps it busy until the store answers."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self.late: Future[Any] | None = None
        self.thread = Thread(target=self._run, name="asks the store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            _answer(*self.questions.get())  # a function, so that no reference keeps the store alive


def _answer(answer: "Future[Any]", call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer.set_result(call(*arguments))
    except BaseException as error:
        answer.set_exception(error)


_asker: _Asker | None = None


def ask(limit: timedelta, call: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `call(*arguments)`, which asks or opens a store. Raises StoreLostError."""
    global _asker
    if _asker is None or not _asker.thread.is_alive():  # no thread survives a fork
        _asker = _Asker()
    asker, answer = _asker, Future[Any]()
    if asker.late and not asker.late.done():
        raise StoreLostError("the store of the ranks does not answer")
    asker.questions.put((answer, call, arguments))
    try:
        return answer.result(limit.total_seconds())
    except TimeoutError:
        asker.late = answer
        raise StoreLostError(f"the store of the ranks did not answer within {limit.total_seconds():g} s") from None
    except RuntimeError as error:
        raise StoreLostError(f"the store of the ranks is gone: {printable(first_line(error))}") from error


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Poll `done` until it is true, at most for some seconds."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not done() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def first_line(error: Exception) -> str:
    """First line of an error of torch, without the file and line of its code."""
    return re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])[:120]
