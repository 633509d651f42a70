"""Everything that follows from the traces in a folder: a merged trace, tables, pictures, and a page that shows them."""

from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from rich.console import Console

from cs336_systems.errors import UserError
from cs336_systems.host.console import LiteralConsole, os_errors
from cs336_systems.host.text import printable
from cs336_systems.profiling.memory import memory_markdown, memory_timeline
from cs336_systems.profiling.merge import CROSSING, merge
from cs336_systems.profiling.overlap import overlap_table
from cs336_systems.profiling.tables import render_markdown, show
from cs336_systems.profiling.trace import DEVICE, HOST, Trace, uncollected, write_json

MERGED, TABLES, OVERLAP, MEMORY, PAGE = "merged.trace.json.gz", "tables.md", "overlap.md", "memory.md", "index.html"
STYLE = "body{font-family:sans-serif;max-width:1440px;margin:1em auto;padding:0 1em}pre{overflow-x:auto}img{width:100%}"
# Rules for the browser: no scripts, nothing from elsewhere, only the page's own styles and the pictures beside it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' file:"
NO_TIMELINE = "no timeline.svg: the ranks have no step in common; profile all of them over the same steps"
NO_PICTURES = "no pictures: matplotlib is not installed; pip install -e '.[writeup]' and run the report again"


@uncollected()
def write_report(folder: Path, traces: list[Trace], console: Console) -> None:
    """Write all reports on all ranks' traces into a folder, and print the most important tables. Pictures of time and
    memory show the first rank. Raises UserError for a folder that cannot be written, and for traces without events."""
    if not any(span.category in (*HOST, *DEVICE) for trace in traces for span in trace.spans):
        kinds = ", ".join(sorted({repr(span.category) for trace in traces for span in trace.spans})[:5])
        why = f"neither operators nor kernels of torch.profiler, only {kinds}" if kinds else "no events; profile again"
        raise UserError(f"the traces in {folder} have {why}")
    if note := missing_ranks(traces):
        console.print(note, markup=False)
    with os_errors(f"write to {folder}"):
        write_json(merged := merge(traces, lazily=True), folder / MERGED)
        if crossing := merged["otherData"]["crossing"]:
            console.print(CROSSING.format(crossing), markup=False)
        (folder / TABLES).write_text(render_markdown(traces))
        overlap = overlap_table(traces)
        (folder / OVERLAP).write_text(overlap.markdown())
        (folder / MEMORY).write_text(memory_markdown(traces[0], memory_timeline(traces[0])))
        written = [folder / MEMORY]
        if find_spec("matplotlib") is None:
            console.print(NO_PICTURES, markup=False)
        else:
            from cs336_systems.profiling.pictures import write_flame_pictures, write_memory_picture
            from cs336_systems.profiling.timeline_picture import write_timeline

            written += write_flame_pictures(traces[0], folder)
            written += write_memory_picture(traces[0], folder / "memory.svg")
            written += (timeline := write_timeline(traces, folder / "timeline.svg"))
            if not timeline:
                console.print(NO_TIMELINE, markup=False)
        shown = LiteralConsole(record=True, file=StringIO(), width=250)
        for out in (shown, console):
            show(traces, out)
            if len(traces) > 1:
                out.print(overlap.table())
        tables = shown.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        (folder / PAGE).write_text(_page(traces, tables, written))
    names = ", ".join([PAGE, MERGED, TABLES, OVERLAP, *(path.name for path in written)])
    console.print(f"{folder}: {names}; open {PAGE} in a browser, {MERGED} at https://ui.perfetto.dev")


def missing_ranks(traces: list[Trace]) -> str:
    """Note about ranks whose traces are not there; empty if all are."""
    missing = sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces})
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:20]))}{more}"
    return f"note: {ranks} of {traces[0].world_size} missing" if missing else ""


def _page(traces: list[Trace], tables: str, written: list[Path]) -> str:
    """One HTML page with the pictures, and the tables as a terminal shows them; it needs only its folder."""
    described = [it for key in ("size", "wrapper", "device") if (it := str(traces[0].ours.get(key, "none"))) != "none"]
    what = ", ".join(described) or "a trace of torch.profiler"
    title = escape(printable(f"Profile of {len(traces)} rank{'s' * (len(traces) > 1)}: {what}"))
    note = f"<p>{missing_ranks(traces)}</p>" * bool(missing_ranks(traces))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head = f"<meta charset=utf-8>{policy}<title>{title}</title><style>{STYLE}</style>"
    parts = [f"<!DOCTYPE html><html lang=en>{head}<h1>{title}</h1>{note}"]
    for name in sorted(path.name for path in written if path.suffix == ".svg"):
        parts.append(f'<h2>{escape(Path(name).stem.capitalize())}</h2><p><a href="{name}"><img src="{name}"></a></p>')
    texts = [TABLES, OVERLAP, *sorted(path.name for path in written if path.suffix == ".md")]
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in texts)
    return "\n".join([*parts, f"<h2>Tables</h2><p>More in {links}.</p>{tables}", "</html>\n"])
