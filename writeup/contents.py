"""The chapters of the write-up, in order: what proves it, one device, many devices, what to conclude."""

PARTS = {
    "": ("introduction",),
    "What it rests on": ("equality", "gallery"),
    "One device": ("step", "norms", "flash-attention", "memory"),
    "Many devices": ("all-reduce", "ddp", "sharding", "model-parallelism", "moe", "long-context"),
    "Conclusions": ("predicting", "plausibility", "choosing"),
    "Appendix": ("course-map", "sources"),
}
CHAPTERS = tuple(name for names in PARTS.values() for name in names)
