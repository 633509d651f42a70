"""Explanatory pictures, each from the code that it explains: reductions, schedules, ZeRO, tiles, rings."""

from functools import partial
from typing import Any

import torch
from torch import nn

from cs336_systems.comm import fake_ranks, record
from cs336_systems.cost.closed_forms import zero_memory
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.schedule import schedule, simulate
from writeup.figures import COLOURS, Figure, draw

LAYERS, STAGES, MICROBATCHES, RANKS = 8, 4, 8, 4
BLUE, RED, GREEN, _, YELLOW = COLOURS[:5]


def wrapper_order(wrap: Any) -> str:
    """`g7 R g6 R ... |`: gradients ready, reductions launched and the end of backward, observed on one of two ranks."""
    with fake_ranks(0, 2), record() as events:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
        order: list[tuple[int, str]] = []
        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, name=f"g{index}": order.append((len(events), name)))
        wrapped = wrap(model)
        events.clear()
        wrapped(torch.ones(1, 4)).sum().backward()
        order.append((len(events), "|"))
        wrapped.finish_gradient_synchronization()
        reductions = [place for place, event in enumerate(events) if event.verb == "all-reduce" and event.numel >= 16]
    words = []
    for before, name in order:
        while reductions and reductions[0] < before:
            words.append("R")
            reductions.pop(0)
        words.append(name)
    return " ".join([*words, *["R"] * len(reductions)])


def draw_boxes(axes: Any, row: float, boxes: list[tuple[float, float, str, str]], size: float = 8) -> None:
    """Boxes (left, width, text, colour) in one lane."""
    for left, width, text, colour in boxes:
        axes.barh(row, width, left=left, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
        axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=size, color="white")


def name_lanes(axes: Any, names: list[str]) -> None:
    """Name the lanes, the first on top, and draw no other axes."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def name_colours(axes: Any, colours: dict[str, str]) -> None:
    """Put colours into the legend by name."""
    for name, colour in colours.items():
        axes.barh(0, 0, color=colour, label=name)


def wrappers() -> Figure:
    """Order of gradients and reductions under the four wrappers."""
    kinds = {
        "naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP,
        "bucketed": partial(BucketedDDP, bucket_size_mb=2 * 16 * 4 / 1e6),
    }  # fmt: skip

    def into(axes: Any) -> None:
        for row, wrap in enumerate(kinds.values()):
            words = wrapper_order(wrap).split()
            boxes = []
            for place, word in enumerate(words):
                if word == "|":
                    axes.plot([place + 0.5] * 2, [row - 0.45, row + 0.45], color="black", linewidth=2)
                else:
                    boxes.append((float(place), 1.0, word, RED if word == "R" else BLUE))
            draw_boxes(axes, row, boxes)
        name_lanes(axes, list(kinds))
        axes.set_xlabel("order of events; the stroke is the end of backward")

    return draw(
        "schematic-wrappers", "**Four wrappers differ in when a reduction (R) starts, not in what is computed.** "
        "Observed: gradients g7 to g0 of eight layers and the reductions that each wrapper launches.",
        "Four rows of boxes, gradients and reductions in the order in which each wrapper has them", into, height=1.8,
    )  # fmt: skip


def schedules() -> Figure:
    """Pipelines of four stages and eight microbatches: 1F1B, ZB-H1 and ZBV, simulated."""
    names = ("1f1b", "zb-h1", "zbv")
    colours = {"forward": BLUE, "backward": RED, "weights": GREEN}

    def into(panels: Any) -> None:
        for axes, name in zip(panels, names, strict=True):
            chunks = 2 if name == "zbv" else 1
            played = simulate(schedule(name, STAGES, MICROBATCHES, chunks), turn=name == "zbv")
            for row, actions in enumerate(played.timeline):
                for each in actions:
                    axes.barh(row, each.end - each.start, left=each.start, height=0.85, edgecolor="white",
                              linewidth=0.4 / chunks, color=colours[each.action.kind],
                              alpha=1 - 0.35 * each.action.chunk)  # fmt: skip
            axes.set_title(f"{name}: ends at {max(a.end for row in played.timeline for a in row):g}", fontsize=8)
            name_lanes(axes, [f"stage {row}" for row in range(STAGES)])
        words = {"backward": "backward, or of inputs alone"}
        name_colours(panels[0], {words.get(kind, kind): colour for kind, colour in colours.items()})
        panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)

    return draw(
        "schematic-schedules", "**Computing the weights' gradients apart fills a pipeline's bubble.** Four stages, "
        "eight microbatches, a backward of twice a forward's time; simulated by `cs336_systems/schedule`.",
        "Three pipeline timelines with forward, backward and weight gradients as boxes", into, columns=3, width=9.0,
        height=2.2,
    )  # fmt: skip


def resting() -> Figure:
    """Picture of the bytes per parameter on each rank at every ZeRO stage."""
    parts = {"parameters": BLUE, "gradients": YELLOW, "optimizer": RED}

    def into(axes: Any) -> None:
        for stage in range(4):
            found, left = zero_memory(1, 0, RANKS, stage), 0.0
            if stage == 0:
                found["optimizer"] = 8.0  # plain data parallelism
            boxes = []
            for name, colour in parts.items():
                boxes.append((left, found[name], f"{found[name]:g}" if found[name] >= 1 else "", colour))
                left += found[name]
            draw_boxes(axes, stage, boxes)
            axes.text(left + 0.2, stage, f"{left:g} bytes", va="center", fontsize=9)
        name_colours(axes, parts)
        name_lanes(axes, [f"stage {stage}" for stage in range(4)])
        axes.set_xlim(0, 19)
        axes.legend(loc="lower right")

    return draw(
        "schematic-zero", "**Each ZeRO stage divides one more part of the state.** Bytes per parameter on one of "
        f"{RANKS} ranks, in float32 with AdamW, by `closed_forms.zero_memory`.",
        "Stacked bars of bytes per parameter for ZeRO stages 0 to 3", into, height=2.0,
    )  # fmt: skip


def tiles() -> Figure:
    """Tiles of a causal attention: which are computed, masked in part, or never read."""
    count = 6

    def into(axes: Any) -> None:
        for query in range(count):
            for key in range(count):
                colour = "#eeeeee" if key > query else YELLOW if key == query else BLUE
                axes.barh(query, 0.94, left=key, height=0.9, color=colour)
        name_lanes(axes, [f"queries {query}" for query in range(count)])
        axes.annotate("", (3.9, 4), (0.1, 4), arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 2})
        name_colours(axes, {"computed": BLUE, "computed and masked": YELLOW, "never read": "#eeeeee"})
        axes.set_xlabel("tiles of keys, in the order in which a program reads them")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "schematic-tiles", "**A program owns one row of tiles and keeps three things: maximum, sum, output.** "
        "With a causal mask nearly half of the tiles are never read.",
        "A grid of tiles of queries and keys, of which the upper triangle is never read", into, height=2.4,
    )  # fmt: skip


def all_reduces() -> Figure:
    """Messages of the ring and of the two-shot all-reduce in shared memory, four ranks."""

    def into(panels: Any) -> None:
        for step in range(2 * (RANKS - 1)):
            for rank in range(RANKS):
                part = (rank - step) % RANKS if step < RANKS - 1 else (rank + 1 - step + RANKS - 1) % RANKS
                colour = RED if step < RANKS - 1 else BLUE
                draw_boxes(panels[0], rank, [(step, 0.95, f"{part} ▸ {(rank + 1) % RANKS}", colour)], 7)
        panels[0].set_title(f"ring: {2 * (RANKS - 1)} steps, part ▸ to rank", fontsize=8)
        for rank in range(RANKS):
            draw_boxes(panels[1], rank, [(0, 0.95, f"adds {rank} of all", RED), (1, 0.95, "reads all parts", BLUE)], 7)
        panels[1].set_title("two-shot, in shared memory: 2 steps", fontsize=8)
        for each in panels:
            name_lanes(each, [f"rank {rank}" for rank in range(RANKS)])

    return draw(
        "schematic-all-reduce", "**A ring sends 2 (N - 1)/N of the tensor in 2 (N - 1) steps; shared memory "
        "needs two.** Red: reducing, blue: gathering.",
        "Two grids of steps by rank: a ring all-reduce and a two-shot all-reduce", into, 2, 8.0, 2.2,
    )  # fmt: skip
