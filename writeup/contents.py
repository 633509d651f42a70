"""The chapters of the write-up, in order: first those of the course, then the three other systems, then the proof."""

PARTS = {
    "": ("introduction",),
    "One device": (
        "benchmarking",
        "function-calls",
        "flame-graph",
        "mixed-precision",
        "layernorm",
        "rmsnorm",
        "compile",
        "flash-attention",
        "memory",
        "activation-checkpointing",
    ),
    "Many devices": ("all-reduce", "ddp", "buckets", "optimizer-sharding", "fsdp", "arithmetic"),
    "Three other systems": ("megatron", "moe", "roofline"),
    "What it rests on": ("checkpoints", "equality", "gallery", "plausibility", "course-map"),
    "Appendix": ("tests", "sources"),
}
CHAPTERS = tuple(name for names in PARTS.values() for name in names)
