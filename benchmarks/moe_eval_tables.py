"""Tables of an evaluation: scores, the formulations side by side, calls beside the published ones, collectives."""

from collections.abc import Sequence
from typing import Any

from benchmarks.moe_eval_counts import OF_WORDS, PUBLISHED, expected, is_published_shape, words_reads
from benchmarks.moe_eval_model import DECODER, MOE, RUN
from benchmarks.moe_eval_options import DTYPES, MoEEvalSettings
from benchmarks.moe_eval_profile import Calls, calls, seconds, waiting
from benchmarks.moe_eval_rank import SEPARATOR, Outcome, Scorer, Tally
from benchmarks.moe_eval_record import bytes_each, predicted_bytes
from benchmarks.records import Record
from cs336_systems.cost import experts as cost
from cs336_systems.host.console import console, format_bytes, format_count, format_seconds
from cs336_systems.host.table import Table
from cs336_systems.host.text import printable
from cs336_systems.presets import Dispatch

COSTLY = 5  # words that are named
PUBLISHED_NOTE = (
    "Published: fairseq's eval_lm with 15B parameters on 4 GPUs. Of its reads of single numbers 40,955 are of words "
    "(--words slow, 2048 a block), and the rest its own. Here torch's one_hot reads 8 more a layer, on a CPU only, and "
    "experts are selected from stacked weights, which there are modules. Sorted, a grouped product on a CPU is a loop "
    "in C++ that reads where each expert's rows end; on a GPU it is one kernel."
)


def show(
    settings: MoEEvalSettings,
    scorer: Scorer,
    outcomes: Sequence[Outcome],
    found: dict[Dispatch, list[Calls]],
    records: Sequence[Record],
    tally: Tally,
) -> None:
    """Print everything but the profile's tables."""
    out = console()
    for outcome in outcomes:
        for line in score_lines(outcome, settings.words):
            print(line)
    print(balance_line(outcomes[-1]))
    if line := costly_words(tally):
        print(line)
    out.print(formulations(scorer, outcomes, found, DTYPES[settings.precision].itemsize).table())
    if len(records) > 1:
        print(ratio_line(records[1].metrics["ratios"]))
    if "einsum" in found:
        out.print(counted(settings, scorer, found).table())
    for outcome in outcomes:
        out.print(collectives(outcome).table())
    for outcome in outcomes:
        width = DTYPES[settings.precision].itemsize
        for line in diagnosis(scorer, outcome, found[outcome.dispatch], width, settings.words):
            print(line)
    for record in records:
        for flag in record.flags:
            print(printable(f"note: {record.config['moe']}: {flag}"))


def score_lines(outcome: Outcome, words: str) -> list[str]:
    """Loss, perplexity and speed, as eval_lm logs them."""
    least, most = outcome.seconds(words=False), outcome.seconds(words=True)
    without = f"; {outcome.tokens / least:,.0f} without reading words ({words})" if words != "none" else ""
    return [
        f"{outcome.dispatch}: evaluated {outcome.tokens:,} tokens in {format_seconds(most)} "
        f"({outcome.tokens / most:,.0f} tokens/s{without})",
        f"{outcome.dispatch}: loss (base 2) {outcome.loss:.6f}, perplexity {outcome.perplexity:,.2f}",
    ]


def balance_line(outcome: Outcome) -> str:
    """How evenly the router chose."""
    load = outcome.load
    if not load:
        return f"{outcome.dispatch}: which expert had how much is counted by --moe sort only"
    return (
        f"{outcome.dispatch}: {load['dropped']:.2%} of all choices dropped ({load['dropped_first']:.2%} of first "
        f"ones); the most loaded fifth of the experts has {load['most_loaded_share']:.1%} of the choices, the least "
        f"{load['least_loaded_share']:.1%}; {load['unused_experts']:.1f} experts of a layer unused"
    )


def costly_words(tally: Tally) -> str:
    """The words that make up most of this rank's loss."""
    if tally.words is None or not tally.words.words:
        return ""
    sums = tally.words.sums()[:, 1]
    order = sums.argsort()[:COSTLY]
    named = (f"{chr(word)!r} {sums[word] / sums.sum():.1%}" for word in order.tolist())
    return f"{len(tally.words.words):,} words read on rank 0; most of their loss is of {', '.join(named)}"


def formulations(scorer: Scorer, outcomes: Sequence[Outcome], found: dict[Dispatch, list[Calls]], width: int) -> Table:
    """Times and bytes of each formulation."""
    config, tokens = scorer.config, scorer.rows * scorer.blocks.context
    heads = ["formulation", "ms a batch", "CPU ms a batch", "CPU ms an expert layer", "bytes an all-to-all"]
    heads += ["predicted", "useful", "wait, least", "mean", "most", "linear calls"]
    rows = []
    for outcome, record in zip(outcomes, (found[outcome.dispatch] for outcome in outcomes), strict=True):
        sent, shares = bytes_each(outcome), waiting(record)
        sizes = ["-"] * 3
        if sent is not None:
            guess = predicted_bytes(config, outcome.dispatch, tokens, width)
            sizes = [format_bytes(size) for size in (sent, guess, predicted_bytes(config, "sort", tokens, width))]
        times = outcome.mean("scoring"), outcome.mean("cpu"), outcome.mean("layers_cpu") / max(1, config.expert_layers)
        waits = [f"{share:.1%}" for share in (min(shares), sum(shares) / len(shares), max(shares))]
        linear = f"{max(calls(record, 'aten::linear')):,}"
        rows.append([outcome.dispatch, *(f"{1e3 * time:,.1f}" for time in times), *sizes, *waits, linear])
    note = (
        "CPU time is of one process, all its threads, the mean over ranks. Predicted with a balanced router; useful is "
        "what experts then take. Wait: of the time under the profiler, what a rank stood in all-to-all."
    )
    return Table("Formulations, in turn on the same ranks", heads, rows, note, names=True)


def ratio_line(ratios: dict[str, Any]) -> str:
    """How many times less the sorted formulation needs."""
    words = {"cpu_per_layer": "CPU time of an expert layer", "cpu_per_batch": "CPU time of a batch"}
    words |= {"seconds": "wall time", "bytes_per_all_to_all": "bytes of an all-to-all"}
    return "einsum over sort: " + ", ".join(f"{words[name]} {value:.1f} x" for name, value in ratios.items())


def counted(settings: MoEEvalSettings, scorer: Scorer, found: dict[Dispatch, list[Calls]]) -> Table:
    """Calls of operators on the ranks beside what follows from the shape, and beside the published numbers."""
    config, sizes, ranks = scorer.config, scorer.mesh.sizes, found["einsum"]
    batches = calls(ranks, DECODER)[0]
    due = expected(config, sizes["ep"], batches) if sizes["tp"] == 1 else {}
    published = PUBLISHED | OF_WORDS
    if settings.words == "slow":
        due |= words_reads(batches, scorer.blocks.context)
    same = is_published_shape(config, sizes["ep"] * sizes["dp"], sizes["tp"], batches)
    rows = []
    for name, published_count in published.items():
        each = calls(ranks, name)
        mine = f"{each[0]:,}" if len(set(each)) == 1 else f"{min(each):,}-{max(each):,}"
        derived = due.get(name)
        verdict = "equal" if set(each) == {published_count} else f"{each[0] - published_count:+,}"
        cells = [name, mine, f"{derived.count:,}" if derived else "-", f"{published_count:,}", verdict if same else "-"]
        cells += [f"{max(calls(found['sort'], name)):,}"] if "sort" in found else []
        rows.append([*cells, derived.why if derived else "--words slow" if name in OF_WORDS else ""])
    heads = ["einsum calls", f"each of {len(ranks)} ranks", "derived", "published", "beside it"]
    heads += ["sort", "why"] if "sort" in found else ["why"]
    note = PUBLISHED_NOTE if same else f"{PUBLISHED_NOTE} Shape, ranks or batches are others here."
    return Table("Operators of the one-hot formulation", heads, rows, note, names=True)


def collectives(outcome: Outcome) -> Table:
    """Every collective of the evaluation by verb and label, on the rank with the fewest and with the most bytes."""
    names = dict.fromkeys(name for rank in outcome.ranks for name in rank["collectives"])
    rows = []
    for name in names:
        found = [rank["collectives"].get(name, [0, 0]) for rank in outcome.ranks]
        sizes = sorted(nbytes for _, nbytes in found)
        times = max(times for times, _ in found)
        mean = sum(sizes) / max(1, sum(times for times, _ in found))
        verb, label = name.split(SEPARATOR)
        rows.append([verb, label, str(times), format_bytes(sizes[0]), format_bytes(sizes[-1]), format_bytes(mean)])
    heads = ("verb", "label", "times", "bytes, least rank", "most", "mean of one")
    return Table(f"{outcome.dispatch}: collectives of each rank", heads, rows)


def diagnosis(scorer: Scorer, outcome: Outcome, ranks: list[Calls], width: int, words: str) -> list[str]:
    """Where the time went, one cause a line."""
    config, tokens, name = scorer.config, scorer.rows * scorer.blocks.context, outcome.dispatch
    lines = []
    if (sent := bytes_each(outcome)) is not None and name == "einsum":
        useful = predicted_bytes(config, "sort", tokens, width)
        lines.append(
            f"padding: an all-to-all has {format_bytes(sent)}, a balanced router's rows in use {format_bytes(useful)}: "
            f"{sent / useful:.2f} x"
        )
    if name == "einsum" and config.num_experts:
        extra, real = (
            cost.dispatch_flops(config, tokens, training=False),
            cost.kept_rows(config, tokens, training=False),
        )
        lines.append(
            f"one-hot products: {format_count(extra)}FLOPs a layer to move tokens, "
            f"{extra / cost.expert_flops(config, real):.1f} x what the experts need for the rows in use"
        )
    run, decoder, layers = (_mean(seconds(ranks, tag)) for tag in (RUN, DECODER, MOE))
    if run and decoder:
        outside, reads = 1 - decoder / run, _mean(calls(ranks, "aten::item"))
        batches = calls(ranks, DECODER)[0]
        of_words = words_reads(batches, scorer.blocks.context)["aten::item"].count if words == "slow" else 0
        lines.append(f"words: {outside:.1%} of the time is outside the decoder")
        lines.append(
            f"reads of single numbers, a rank: {of_words:,} of words, {max(0, reads - of_words):,.0f} others (on a CPU "
            "a grouped product reads where each expert's rows end, and torch's one_hot its least and largest)"
        )
        lines.append(f"experts: {layers / decoder:.1%} of the decoder is expert layers, {_mean(waiting(ranks)):.1%} of "
                     "everything is standing in all-to-all")  # fmt: skip
    return [f"{name}, {line}" for line in lines]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
