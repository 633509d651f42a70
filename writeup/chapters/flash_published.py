"""Published times of attention and of the leaderboards, and the share of a GPU's peak that each means."""

from benchmarks.attention import LEADERBOARD, flops
from benchmarks.leaderboard import BATCH, FULL
from benchmarks.lib.kernel import BOTH
from cs336_systems.cost import forward_flops
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import ModelConfig
from writeup.book import Book
from writeup.ceilings import attention_flops, peak_share
from writeup.cells import NONE, quoted
from writeup.tables import Table

PASSES = 3  # of products with weights, in forward passes: one, and a backward of two
ATTENTION_PASSES = 3.5  # of attention: two products forward, five backward, as FlashAttention recomputes the scores


def step_flops(config: ModelConfig, batch: int, seq: int) -> float:
    """FLOPs of a training step that count: 6 for each parameter of a matrix and token, and 7 batch layers seq^2 width
    for causal attention, as the course chapter of cost counts them (`leaderboard-step`)."""
    parts = forward_flops(config, batch, seq)
    scores = parts["scores"]
    hidden = 0.5 if config.causal else 1.0
    return PASSES * (sum(parts.values()) - scores) + ATTENTION_PASSES * hidden * scores


def students(book: Book) -> Table:
    """Times of FlashAttention-2 that students published, with the share of their GPU's peak."""
    rows = []
    for (source, name), table in book.published.tables.items():
        if name != "flash attention" or table.problem != "flash_benchmarking":
            continue
        system = table.system or table.source.system
        for row in table.rows:
            found, keys = row.values["mean"], {**table.fixed, **row.keys}
            work = attention_flops(keys)
            shape = f"{keys['batch']} x {keys['seq']:,} x {keys['dim']} {keys['dtype']}"
            rows.append({
                "<who": markdown_text(source), "<hardware": markdown_text(table.hardware or table.source.hardware),
                "<kernel": str(keys["candidate"]), "<pass": str(keys["pass"]),
                "<heads x tokens x width": shape + ", causal" * bool(keys["causal"]),
                "published": quoted(book, found, "ms"),
                "least": format_seconds(work / system_preset(system).matmul_flops) if system else NONE,
                "of peak": f"{peak_share(found, work, system):.0%}" if system and keys["dtype"] == "bf16" else NONE,
            })  # fmt: skip
    return Table(book, rows)


def boards(book: Book) -> Table:
    """The two leaderboards, with the FLOPs that count and the share of the peak."""
    step = step_flops(FULL, BATCH, FULL.context_length)
    tasks = {
        "2025": ("leaderboard-2025", "flash attention", flops(LEADERBOARD[0], BOTH), 1),
        "2026": ("leaderboard-2026", "step", step, 2),
    }
    rows, notes = [], []
    for year, (source, name, work, processors) in tasks.items():
        table = book.published.table(source, name)
        system = table.system or table.source.system
        floor = work / (processors * system_preset(system).matmul_flops)
        notes.append(f"{year}: {markdown_text(table.note)}; on {markdown_text(table.hardware)}.")
        for row in table.rows:
            found = row.values["time"]
            rows.append({
                "<board": year, "<place": str(row.keys["place"]), "published": quoted(book, found, "ms"),
                "least": format_seconds(floor), "rate": f"{format_count(work / found.value)}FLOP/s",
                "of peak": f"{peak_share(found, work, system, processors):.0%}",
            })  # fmt: skip
    return Table(book, rows, notes=notes)
