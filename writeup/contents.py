"""The chapters of the write-up, in order: introduction and proof, one device, many devices, conclusions."""

PARTS = {
    "": ("introduction",),
    "What it rests on": ("equality", "gallery"),
    "One device": ("step", "norms", "flash-attention", "memory"),
    "Many devices": ("all-reduce", "ddp", "sharding", "model-parallelism", "moe", "long-context"),
    "Conclusions": ("predicting", "plausibility", "choosing"),
    "Appendix": ("course-map", "sources"),
}
CHAPTERS = tuple(name for names in PARTS.values() for name in names)
