"""Records of several ranks, by run: the candidates that took turns on the same ranks, model and link."""

import re
from dataclasses import replace
from typing import NamedTuple

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from cs336_systems.traffic import sent
from writeup.book import Citation, metric
from writeup.cells import median_ms
from writeup.line_fit import Line, fit

MODEL = "--d-model 512 --layers 8 --batch-size 1 --context 32"
DDP = f"python -m benchmarks.ddp {MODEL}"
ZERO = f"python -m benchmarks.zero {MODEL}"
THROTTLED = (
    "python -m benchmarks.two_nodes --one-node --nproc 2 -- -m benchmarks.ddp --d-model 256 --layers 4 --context 64 "
    "--bucket-sizes '1 5 25'"
)
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


def line_of(records: list[Record]) -> Line | None:
    """Latency and bus bandwidth that the medians of one number of ranks give."""
    ranks = records[0].config["ranks"]
    return fit([(1, sent("all-reduce", ranks) * r.config["bytes"], median_ms(r) / 1e3) for r in records])
