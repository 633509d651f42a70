"""The store of the ranks, asked for text, with a limit to how long an answer may take.

Rank 0 may hold the store. If it is stopped, its machine keeps the connection open and no answer ever comes, for which
torch's TCPStore has no time limit. So a thread of its own asks, one question after the other, and whoever wants the
answer waits for that thread, as long as the limit says.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch._C._distributed_c10d import Store

from cs336_systems.text import printable

LONE = "surrogatepass"  # a name of a file that is no Unicode holds lone surrogates, which come back as they were


class StoreLostError(RuntimeError):
    """The store is gone, or did not answer in time; the message says which."""


class TimedStore:
    """A store each of whose answers comes within `limit`. Every method raises StoreLostError if none does."""

    def __init__(self, store: Store, limit: timedelta) -> None:
        self.store, self.limit = store, limit

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(ask(self.limit, self.store.check, keys))

    def get(self, key: str) -> str:
        """The text of a key that is set."""
        return bytes(ask(self.limit, self.store.get, key)).decode(errors=LONE)

    def set(self, key: str, text: str) -> None:
        """Give a key its text, which may be any."""
        ask(self.limit, self.store.set, key, text.encode(errors=LONE))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins as zero; returns the sum."""
        return int(ask(self.limit, self.store.add, key, amount))

    def set_first(self, key: str, text: str) -> str:
        """Give a key its text if it has none; returns the one that it has."""
        return bytes(ask(self.limit, self.store.compare_set, key, "", text)).decode()


class _Asker:
    """A thread that asks. What it was asked when it had to be given up keeps it busy, until the store answers."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self.late: Future[Any] | None = None
        self.thread = Thread(target=self._run, name="asks the store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            _answer(*self.questions.get())  # a function of its own, which keeps no store alive when it has returned


def _answer(answer: "Future[Any]", call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer.set_result(call(*arguments))
    except BaseException as error:
        answer.set_exception(error)


_asker: _Asker | None = None


def ask(limit: timedelta, call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call(*arguments)`, which asks a store or opens one, returns. Raises StoreLostError."""
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
        cause = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])[:120]  # without torch's file and line
        raise StoreLostError(f"the store of the ranks is gone: {printable(cause)}") from error
