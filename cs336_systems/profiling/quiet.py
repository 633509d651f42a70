"""Keeps torch.profiler's own notes of its start and stop (`USDT:... profiler_start`) off the terminal."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """What the C++ library writes to stderr inside the block is passed on, except lines that begin with USDT."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught.read().splitlines(keepends=True):
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
