"""A process, or several ranks, for a piece of work whose answer comes back as JSON."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.comm import CommError, Place
from cs336_systems.comm.launch import run_ranks
from cs336_systems.errors import UserError

Answer = dict[str, Any]  # values that JSON can hold


def _into_file(place: Place, path: Path, work: Callable[..., Answer], arguments: Any, options: Any) -> None:
    answer = work(place, *arguments, **options)
    if place.rank == 0:
        path.write_text(json.dumps(answer, allow_nan=False))


class Launcher:
    """Runs work on as many ranks as it needs, and returns the result.

    Under torchrun the ranks are there already: `here` is this one's place, and work for one rank is done by each of
    them alone. Otherwise CPU ranks are forked, even a single one, so that this process runs no tensor code.
    """

    def __init__(self, here: Place, device: str) -> None:
        self.here, self.device = here, device

    def run(self, ranks: int, work: Callable[..., Answer], *arguments: Any, **options: Any) -> Answer:
        """`work(place, *arguments, **options)`. Raises UserError for what cannot be done, and for ranks that part."""
        here = self.here
        try:
            if here.world_size > 1 or (self.device == "cuda" and ranks == 1):
                place = here if ranks > 1 else Place(local_rank=here.local_rank)
                return work(place, *arguments, **options)
            with tempfile.TemporaryDirectory(prefix="answer-") as folder:
                path = Path(folder, "answer.json")
                run_ranks(_into_file, ranks, self.device, path, work, arguments, options)
                answer: Answer = json.loads(path.read_text())
                return answer
        except CommError as error:
            raise UserError(str(error)) from None
