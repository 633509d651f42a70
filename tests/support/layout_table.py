"""The table of layouts that the proof runs: every factorisation of the ranks, and all options in pairs."""

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache

from cs336_systems.train.recipe import Recipe

BATCH, SEQ, VOCABULARY, STEPS = 16, 8, 261, 2  # 261 words are padded to 264: the last rank has rows that are no words
# A decoder whose head is the embedding, one with rotary positions, gates, grouped queries and a head of its own, BERT.
MODELS = {
    "gpt": {"d_model": 16, "num_heads": 8},
    "llama": {"size": "llama-8b", "d_model": 32, "num_heads": 16},
    "bert": {"size": "bert-345m", "d_model": 16, "num_heads": 8},
}
# Epsilon is as large as a gradient: then an update is a smooth function of it. With 1e-8 the update is nearly the sign,
# which amplifies the rounding of gradients that are mathematically zero (a bias of the keys) a millionfold.
COMMON = {
    "data": ("text",),
    "split": "8,1,1",
    "batch_size": BATCH,
    "context": SEQ,
    "vocab_size": VOCABULARY,
    "pad_vocabulary": 8,
    "recompute_every": 2,
    "steps": STEPS,
    "warmup_steps": 2,
    "decay_steps": 10,
    "lr": 1e-2,
    "adam_eps": 1e-2,
    "clip": 0.25,
    "device": "cpu",
}


@dataclass(frozen=True)
class Layout:
    """A place of the model on the ranks, and the options that are covered in pairs."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    model: str = "gpt"
    dropout: float = 0.0
    recompute: str = "none"
    accumulate: bool = False
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = False
    cp: int = 1
    cp_type: str = "ring"
    pack: bool = False

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", self.model, f"recompute-{self.recompute}"]
        parts += [f"micro{self.microbatches}", f"zero{self.zero}"]
        parts += [f"{self.schedule}-{self.chunks}"] * (self.pp > 1)
        parts += ["dropout"] * (self.dropout > 0) + ["sequence"] * self.sequence_parallel
        parts += [f"cp{self.cp}-{self.cp_type}"] * (self.cp > 1) + ["pack"] * self.pack
        return "-".join(parts)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def chunks(self) -> int:
        return 2 if self.schedule in ("interleaved", "zbv") else 1

    @property
    def layers(self) -> int:
        return max(2, self.pp * self.chunks)

    @property
    def microbatches(self) -> int:
        """Of a rank: one, or several, which interleaving wants to be a multiple of the stages."""
        return {1: 2, 2: 4, 4: 4, 8: 8}[self.pp] if self.accumulate else 1

    @property
    def reference(self) -> str:
        """The name of what one process makes of the same model."""
        return f"{self.model}-{self.layers}-{self.dropout}" + "-pack" * self.pack

    def exists(self) -> bool:
        """True if the options can be combined."""
        if self.ranks not in (2, 4, 8) or (self.sequence_parallel and self.tp == 1):
            return False
        if self.schedule == "interleaved" and (not self.accumulate or self.zero == 3):
            return False
        return self.pp > 1 or self.schedule == "1f1b"

    def recipe(self, folder: str, **changes: object) -> Recipe:
        settings = {
            **COMMON,
            **MODELS[self.model],
            "data": (f"{folder}/{'words' if self.pack else 'text'}",),
            "pack": self.pack,
            "cp": self.cp,
            "cp_type": self.cp_type,
            "num_layers": self.layers,
            "dropout": self.dropout,
            "recompute": self.recompute,
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "micro_batch_size": BATCH // self.dp // self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks,
            "zero": self.zero,
            "sequence_parallel": self.sequence_parallel,
        }
        return Recipe.of(**settings | changes)


CHOICES = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 4, 8),
    "model": tuple(MODELS),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "segments", "attention", "nested"),
    "accumulate": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
}


@cache
def pairs_of(layout: Layout) -> frozenset[tuple]:
    """Every two of the settings in CHOICES that a layout has together."""
    return frozenset(itertools.combinations(((name, getattr(layout, name)) for name in CHOICES), 2))


@cache
def existing() -> tuple[Layout, ...]:
    meshes = (mesh for mesh in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(mesh) in (2, 4, 8))
    options = list(itertools.product(*list(CHOICES.values())[3:]))
    every = (Layout(*mesh, *each) for mesh in meshes for each in options)
    return tuple(layout for layout in every if layout.exists())


# What pairs do not promise: backwards and forwards in turn under ZeRO 3, and a shared embedding that is cut twice.
WRITTEN = (
    Layout(pp=2, dp=2, model="gpt", accumulate=True, zero=3),
    Layout(pp=4, dp=2, model="bert", accumulate=True, zero=3, recompute="segments"),
    Layout(tp=2, pp=2, dp=2, model="bert", dropout=0.1, accumulate=True, zero=3, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, model="gpt", accumulate=True, schedule="interleaved", zero=2, sequence_parallel=True),
)


@cache
def table() -> tuple[Layout, ...]:
    """Layouts of every factorisation until every pair of settings that exists has been met: in turn for each
    factorisation, of some drawn at random, the one that has the most new pairs. The same table in every run."""
    draw, chosen = random.Random(0), list(WRITTEN)
    meshes: dict[tuple, list[Layout]] = {}
    for layout in existing():
        meshes.setdefault((layout.ranks, layout.tp, layout.pp), []).append(layout)
    missing = set().union(*map(pairs_of, existing())).difference(*map(pairs_of, chosen))
    turns = enumerate(itertools.cycle(sorted(meshes)))
    while missing:
        turn, mesh = next(turns)
        best = max(draw.sample(meshes[mesh], 150), key=lambda each: len(pairs_of(each) & missing))
        if pairs_of(best) & missing or turn < len(meshes):
            chosen.append(best)
            missing -= pairs_of(best)
    return tuple(sorted(chosen, key=lambda each: (each.ranks, str(each))))
