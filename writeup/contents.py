"""The chapters of the write-up, in order: how to find what, the course, three other systems, and the proof."""

PARTS = {
    "": ("introduction", "course-map"),
    "One device": (
        "benchmarking",
        "function-calls",
        "flame-graph",
        "mixed-precision",
        "layernorm",
        "rmsnorm",
        "compile",
        "flash-attention",
        "fused",
        "memory",
        "activation-checkpointing",
    ),
    "Many devices": ("all-reduce", "ddp", "buckets", "optimizer-sharding", "fsdp", "arithmetic"),
    "Three other systems": ("megatron", "moe", "roofline"),
    "What it rests on": ("checkpoints", "equality", "gallery", "plausibility"),
    "Appendix": ("tests", "sources"),
}
CHAPTERS = tuple(name for names in PARTS.values() for name in names)
