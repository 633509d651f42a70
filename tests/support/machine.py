"""A machine of made-up speed, and models of one layer: measuring or observing real ones takes seconds."""

from dataclasses import replace

import torch

from cs336_systems.cost import Hardware

FAST = Hardware("fast", 1e12, 1e11, "made up")


def seed_cpus_alone() -> None:
    """Let torch.manual_seed seed CPUs alone where torch has no other device: for each kind that it lacks it keeps a
    stack trace, which takes half a millisecond."""
    if torch.version.cuda is None and torch.version.hip is None and not torch.xpu.is_available():
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            kind.manual_seed_all = lambda seed: None


def made_up(*_: object, **__: object) -> Hardware:
    """In place of a probe."""
    return FAST


def one_layer_each(monkeypatch, options: type) -> None:
    """Every size that a benchmark's options name is one layer deep."""
    whole = options.case

    def shallow(self, *shape):
        case = whole(self, *shape)
        return replace(case, config=replace(case.config, num_layers=1))

    monkeypatch.setattr(options, "case", shallow)
