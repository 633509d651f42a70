"""A machine of made-up speed and models of one layer, as real ones take seconds; and memory that forks cheaply."""

import ctypes
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from cs336_systems.cost import Hardware

MADV_COLLAPSE = 25  # of linux/mman.h
FAST = Hardware("fast", 1e12, 1e11, "made up")


def seed_cpus_alone() -> None:
    """Let torch.manual_seed seed CPUs alone where torch has no other device: for each kind that it lacks it keeps a
    stack trace, which takes half a millisecond."""
    if torch.version.cuda is None and torch.version.hip is None and not torch.xpu.is_available():
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            kind.manual_seed_all = lambda seed: None


def use_huge_pages() -> None:
    """Move this process's heap to pages of 2 MB, where Linux (from 6.1) can: a fork copies an entry for each page, and
    then takes 10 ms instead of 40."""
    with suppress(OSError):  # no /proc: another system
        collapse, page = ctypes.CDLL(None).madvise, 2**21
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, *_, name = f"{line} ".split(" ", 5)
            begin, end = (int(each, 16) // page * page for each in span.split("-"))
            if access == "rw-p" and name.strip() in ("", "[heap]") and begin + page < end:
                collapse(ctypes.c_void_p(begin + page), ctypes.c_size_t(end - begin - page), MADV_COLLAPSE)


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
