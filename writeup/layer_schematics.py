"""Explanatory pictures of split layers, observed on one of two imitated ranks: when FSDP has a weight whole, where a
tensor-parallel block communicates, and how a sort brings tokens to their experts."""

from typing import Any

import torch
from torch import nn

from cs336_systems.comm import fake_ranks, record
from cs336_systems.fsdp import FSDP
from cs336_systems.model.routing import gate
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import Mixture, model_preset
from cs336_systems.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from cs336_systems.tensor_parallel.plan import tensor_parallel
from writeup.figures import COLOURS, Figure, draw
from writeup.schematics import BLUE, GREEN, LAYERS, RED, YELLOW, draw_boxes, name_colours, name_lanes

Moment = tuple[str, int, list[int]]  # what computes, in which layer, and the layers whose weights are whole then
CHOICES = ((2, 0), (0, 3), (2, 1), (1, 2), (2, 0), (3, 2))  # first and second expert of each token
SLOTS = 3
KINDS: dict[type[nn.Module], str] = {ColumnParallelLinear: BLUE, RowParallelLinear: GREEN}
EXPERTS = (BLUE, GREEN, YELLOW, COLOURS[3])


def moments() -> list[Moment]:
    """A forward and a backward of FSDP, observed whenever a layer begins to compute."""
    found: list[Moment] = []
    with fake_ranks(0, 2):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
        wrapped = FSDP(model)

        def note(pass_: str, layer: int) -> None:
            found.append(
                (pass_, layer, [i for i, w in enumerate(wrapped.sharded) if w.flat.untyped_storage().nbytes()])
            )

        for number, layer in enumerate(model):  # hooks behind FSDP's own
            layer.register_forward_pre_hook(lambda *_, number=number: note("forward", number))
            layer.register_forward_hook(
                lambda _, args, y, number=number: y.register_hook(lambda _: note("backward", number)) and None
            )
        wrapped(torch.ones(1, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
    return found


def gather_ahead() -> Figure:
    """Weights that are whole while FSDP goes forward and back through eight layers."""
    seen = moments()
    most = max(len(whole) for _, _, whole in seen)

    def into(axes: Any) -> None:
        for place, (name, layer, whole) in enumerate(seen):
            for each in whole:
                colour = {"forward": BLUE, "backward": RED}[name] if each == layer else "#cccccc"
                axes.barh(each, 0.94, left=place, height=0.85, color=colour)
        name_colours(axes, {"forward": BLUE, "backward": RED, "whole, but not in use": "#cccccc"})
        name_lanes(axes, [f"layer {layer}" for layer in range(LAYERS)])
        axes.set_xlabel("order of events")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "schematic-gather", f"**FSDP has at most {most} of {LAYERS} weights whole at once: the one in use and those "
        "gathered ahead.** Observed on one of two ranks whenever a layer begins to compute.",
        "A grid of layers over time; each column marks the layers whose weights are whole", into, height=2.4,
    )  # fmt: skip


def block_order(sequence: bool) -> list[tuple[str, str]]:
    """(word, colour) of a block's layers and collectives, in the order in which one of two ranks begins them."""
    with fake_ranks(0, 2) as group, record() as events:
        model = TransformerLM(model_preset("tiny").override(num_layers=1, context_length=8))
        tensor_parallel(model, group, sequence)
        order: list[tuple[int, str, str]] = []
        for name, layer in model.blocks[0].named_modules():
            kind = next((each for each in KINDS if isinstance(layer, each)), None)
            colour = KINDS[kind] if kind else YELLOW if name.endswith("_norm") else ""
            word = "norm" if colour == YELLOW else name.rpartition(".")[2]
            if colour:
                layer.register_forward_pre_hook(
                    lambda *_, word=word, colour=colour: order.append((len(events), word, colour))
                )
        block: list[int] = []
        model.blocks[0].register_forward_pre_hook(lambda *_: block.append(len(events)))
        model.blocks[0].register_forward_hook(lambda *_: block.append(len(events)))
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long))
        sent = [(place, event.verb) for place, event in enumerate(events) if block[0] <= place < block[1]]
    found = []
    for place, word, colour in order:
        while sent and sent[0][0] < place:
            found.append((sent.pop(0)[1], RED))
        found.append((word, colour))
    return found + [(verb, RED) for _, verb in sent]


def split_block() -> Figure:
    """Layers and collectives of a tensor-parallel block, without and with sequence parallelism."""

    def into(axes: Any) -> None:
        for row, sequence in enumerate((False, True)):
            left = 0.0
            for word, colour in block_order(sequence):
                width = 1.9 if colour == RED else 0.95
                draw_boxes(axes, row, [(left, width, word, colour)], 7)
                left += width + 0.05
        names = {"split by outputs": BLUE, "split by inputs": GREEN, "collective": RED}
        name_colours(axes, names | {"whole, or of a part of the sequence": YELLOW})
        name_lanes(axes, ["tensor parallel", "and sequence parallel"])
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)

    return draw(
        "schematic-block", "**Tensor parallelism all-reduces twice in a block's forward; sequence parallelism splits "
        "each all-reduce in two:** a reduce-scatter behind `out` and `down`, an all-gather before the next matrices. "
        "Observed on one of two ranks.",
        "Two rows of boxes: layers and collectives of a transformer block in their order", into, height=1.9, width=8.0,
    )  # fmt: skip


def sorted_choices() -> list[tuple[int, int, bool]]:
    """(token, expert, whether it found a slot) of every choice, sorted by expert."""
    logits = torch.zeros(len(CHOICES), len(EXPERTS))
    for token, (first, second) in enumerate(CHOICES):
        logits[token, first], logits[token, second] = 2.0, 1.0
    routing = gate(logits, Mixture())
    experts = torch.arange(len(EXPERTS)).repeat_interleave(routing.counts)
    kept = routing.slots < SLOTS
    return list(zip(routing.tokens.tolist(), experts.tolist(), kept.tolist(), strict=True))


def sorted_experts() -> Figure:
    """Choices of six tokens before and after the sort, of which each expert has slots for three."""
    made = [(token, pair[turn], True) for turn in range(2) for token, pair in enumerate(CHOICES)]

    def into(axes: Any) -> None:
        for row, line in enumerate((made, sorted_choices())):
            for place, (token, expert, kept) in enumerate(line):
                draw_boxes(axes, row, [(place, 0.95, str(token), EXPERTS[expert] if kept else "#bbbbbb")])
        experts = {f"expert {expert}": colour for expert, colour in enumerate(EXPERTS)}
        name_colours(axes, experts | {"dropped": "#bbbbbb"})
        name_lanes(axes, ["first choices, then second", "sorted by expert"])
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)

    return draw(
        "schematic-experts", "**One stable sort groups the choices by expert, first choices before second ones.** "
        f"The numbers are tokens; an expert drops what comes after its {SLOTS} slots. Sorted by `model/routing.py`.",
        "Two rows of boxes: choices of tokens in their order, and sorted by expert", into, height=1.8,
    )  # fmt: skip
