"""The table of layouts that the proof runs: all options in pairs, on 2, 4 and 8 ranks."""

from dataclasses import dataclass

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


# Every two options that can be combined, and each with every axis, are in a layout together; higher degrees are in one.
TABLE = (
    Layout(dp=2, model="gpt", dropout=0.1, recompute="nested"),
    Layout(dp=2, model="llama", dropout=0.1, recompute="segments", accumulate=True, zero=3),
    Layout(pp=2, model="bert", dropout=0.1, recompute="nested", accumulate=True, schedule="interleaved"),
    Layout(pp=2, model="gpt", dropout=0.1, recompute="attention", accumulate=True, schedule="gpipe", zero=3),
    Layout(pp=2, model="gpt", recompute="segments", accumulate=True, schedule="interleaved", zero=1),
    Layout(tp=2, model="bert", dropout=0.1, recompute="attention", sequence_parallel=True),
    Layout(tp=2, model="bert", recompute="segments", accumulate=True, sequence_parallel=True),
    Layout(dp=4, model="bert", dropout=0.1, recompute="attention", accumulate=True, zero=2),
    Layout(pp=2, dp=2, model="bert", recompute="attention", accumulate=True, schedule="gpipe", zero=1),
    Layout(pp=2, dp=2, model="gpt", accumulate=True, zero=3),  # backwards and forwards in turn under ZeRO 3
    Layout(pp=4, model="bert", dropout=0.1, accumulate=True, schedule="gpipe"),
    Layout(tp=2, pp=2, model="bert", dropout=0.1, recompute="nested", schedule="gpipe", zero=3, sequence_parallel=True),
    Layout(
        tp=2, pp=2, model="llama", recompute="attention", accumulate=True, schedule="interleaved",
        sequence_parallel=True,
    ),
    Layout(tp=4, model="llama", dropout=0.1, recompute="nested", accumulate=True, zero=2),
    Layout(dp=8, model="llama", dropout=0.1, zero=1),
    Layout(pp=8, model="llama", dropout=0.1, recompute="segments", schedule="gpipe", zero=2),
    Layout(tp=8, model="bert", recompute="nested", zero=1, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, model="bert", dropout=0.1, accumulate=True, zero=3, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, accumulate=True, schedule="interleaved", zero=2, sequence_parallel=True),  # tied and cut
)  # fmt: skip
