"""Records of several ranks, by run and link, and the time of a transfer as a line over its bytes, fitted to them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from cs336_systems.traffic import sent
from writeup.book import Citation, metric
from writeup.cells import median_ms

MODEL = "--d-model 512 --layers 8 --batch-size 1 --context 32"
DDP = f"python -m benchmarks.ddp {MODEL}"
ZERO = f"python -m benchmarks.zero {MODEL}"
THROTTLED = (
    "python -m benchmarks.two_nodes --one-node --nproc 2 -- -m benchmarks.ddp --d-model 256 --layers 4 --context 64 "
    "--bucket-sizes '1 5 25'"
)
ALONE = "no communication"  # the candidate that sends nothing
PLACES = {"cpu": "CPU", "cuda": "GPU"}
SHAPED = re.compile(r"(?P<where>.*), (?P<number>\d+(\.\d+)?)(?P<unit>[kmg])bit tbf")  # by benchmarks.two_nodes


class Group(NamedTuple):
    """Participants of a collective: the backend, where its tensors are, and how many ranks."""

    backend: str
    device: str
    ranks: int

    def __str__(self) -> str:
        return self.words.replace(" ranks", "")

    @property
    def words(self) -> str:
        """`2 ranks (gloo, CPU)`, as Markdown."""
        return markdown_text(f"{self.ranks} ranks ({self.backend}, {PLACES.get(self.device, self.device)})")


def group_of(record: Record) -> Group:
    """The ranks of one record."""
    config = record.config
    return Group(str(config["backend"]), str(config["device"]), int(config["ranks"]))


def link_words(record: Record) -> str:
    """`loopback of one node, a link of 1 Gbit/s (a token bucket)`; plain text, empty for the machine's own links."""
    link = str(record.config["link"])
    if not (shaped := SHAPED.fullmatch(link)):
        return link
    return f"{shaped['where']}, a link of {_speed(shaped)} (a token bucket)"


def link_title(record: Record) -> str:
    """A link in few words, for a picture."""
    shaped = SHAPED.fullmatch(str(record.config["link"]))
    return f"a link of {_speed(shaped)}" if shaped else str(record.config["link"]) or "the machine's own link"


def _speed(shaped: re.Match[str]) -> str:
    return f"{shaped['number']} {shaped['unit'].replace('m', 'M').replace('g', 'G')}bit/s"


def runs_of(cited: Citation) -> list[Citation]:
    """Measurements run by run, the widest model first."""
    found: dict[str, list[Record]] = {}
    for record in cited.measured:
        key = str([value for name, value in record.config.items() if name != "candidate"])
        found.setdefault(key, []).append(record)
    runs = [replace(cited, records=tuple(records)) for records in found.values()]
    return sorted(runs, key=lambda run: -int(run.records[0].config["d_model"]))


def model_of(run: Citation) -> str:
    """`2 ranks over gloo: width 512, 8 blocks, 1 x 32 tokens a rank`."""
    config = run.records[0].config
    tokens = f"{config['batch_size']} x {config['context']} tokens a rank"
    words = f"{config['ranks']} ranks over {config['backend']}: width {config['d_model']}, {config['layers']} blocks, "
    return markdown_text(words + tokens)


def title(run: Citation) -> str:
    """`2 ranks over gloo: width 512, 8 blocks, 1 x 32 tokens a rank; ...; 0.42 ms + bytes / (2,060 MB/s)`."""
    first = run.records[0]
    link = f"{metric(first, 'latency_ms'):.2g} ms + bytes / ({metric(first, 'link_bytes_per_s') / 1e6:,.0f} MB/s)"
    named = markdown_text(f"{link_words(first)}: ") if first.config["link"] else "a transfer takes "
    sent = next((record.metrics["bytes_sent"] for record in run if "bytes_sent" in record.metrics), None)
    each = f"; each sends {format_bytes(sent)} a step" if sent else ""
    return f"{model_of(run)}{each}; {named}{link}"


@dataclass(frozen=True)
class Line:
    """Seconds per call, bytes/s, and the error of the line: the root mean square of (fitted - measured)/measured."""

    overhead: float
    bandwidth: float
    residual: float


def fit(points: Sequence[tuple[float, float, float]]) -> Line | None:
    """The line through (calls, bytes, seconds), by least squares of relative errors, since sizes span decades.

    None if the points do not determine it: fewer than three, all of one shape, or a call or byte that takes no time in
    the fit. A bandwidth is of the bytes as given: those of the tensor give the algorithm's, bytes sent the bus's.
    """
    if len(points) < 3:
        return None
    rows = np.array([[calls / seconds, nbytes / seconds] for calls, nbytes, seconds in points])
    scale = rows.max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    overhead, inverse = (float(value) for value in solution / scale)
    if rank < 2 or overhead <= 0 or inverse <= 0:
        return None
    errors = rows @ np.array([overhead, inverse]) - 1
    return Line(overhead, 1 / inverse, sqrt(float(np.mean(errors**2))))


def line_of(records: list[Record]) -> Line | None:
    """Latency and bus bandwidth that the medians of one number of ranks give."""
    ranks = records[0].config["ranks"]
    return fit([(1, sent("all-reduce", ranks) * r.config["bytes"], median_ms(r) / 1e3) for r in records])
