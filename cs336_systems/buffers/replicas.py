"""Comparison of what must be equal on all ranks: replicated parameters, and options of the optimizers that step them.

Each rank adds a checksum to the all-reduce that ends a synchronisation: of the options of all steps since the last, of
how often each parameter was written to, and of the buffers' shapes. If the sum is not N times a rank's own, the N ranks
differ, and they compare options, shapes of buffers, and weights through the store.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems.comm import Group, agree, global_rank, is_fake
from cs336_systems.errors import UserError


def require_equal(what: str, lines: Sequence[str], group: Group, advice: str = "") -> None:
    """Raises UserError on every rank, with the first difference, unless all ranks have equal lines. They compare
    through the store: a collective over tensors that differ in size aborts the process on gloo."""
    digests = agree(what, hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(each) for each in agree(f"all {what}", json.dumps(lines, allow_nan=False), group)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = enumerate(zip_longest(everyone[0], everyone[other], fillvalue="nothing more"))
    entry, (a, b) = next((entry, (a, b)) for entry, (a, b) in pairs if a != b)
    raise UserError(
        f"the ranks' {what} differ, first in entry {entry}: rank {global_rank(0, group)} has {a}, "
        f"rank {global_rank(other, group)} has {b}{advice}"
    )


def buffer_lines(module: nn.Module) -> list[str]:
    """Name, shape and dtype of each buffer of a module, one a line, for the ranks to compare."""
    return [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


class Question(NamedTuple):
    """Checksum that a rank added in a synchronisation, the lines behind it, and the sum as it arrives."""

    checksum: int
    options: list[str]
    buffers: list[str]
    total: Tensor
    arrival: torch.cuda.Event | None


class Replicas:
    """The replicated parameters of a wrapped module, with their names, and the options of steps since the last
    comparison. `doubted`: weights were changed while gradients were each rank's own, so compare them in any case."""

    def __init__(self, names: Mapping[nn.Parameter, str], group: Group, module: nn.Module) -> None:
        self.names, self.group = {p: name for p, name in names.items() if not p.is_inference()}, group
        self.versions = [p._version for p in self.names]  # when the values were last known to be equal
        self.options: dict[str, None] = {}
        self.noted: dict[tuple[str, int], tuple[object, dict[str, None]]] = {}  # options of a group, and their lines
        self.asked: Question | None = None
        self.module, self.buffers, self.doubted = module, list[str](), False

    def note(self, optimizer: torch.optim.Optimizer, groups: Iterable[int]) -> None:
        """Note the options with which an optimizer is about to step some of its groups, those of the wrapper."""
        kind = type(optimizer).__name__
        for place, group in enumerate(groups):
            options = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
            before, lines = self.noted.get((kind, place), (None, {}))
            if options != before:  # seldom, since a thousand groups have ten thousand options
                shown = {key: plain(value) for key, value in options.items()}
                lines = {f"{kind}, group {place}, {key} = {each}": None for key, each in shown.items() if each}
                writable = any(isinstance(value, Tensor | list) for value in options.values())
                self.noted[kind, place] = None if writable else options, lines
            self.options |= lines

    def checksum(self) -> int:
        """Of all that must be equal on all ranks, small enough for an exact sum in float64."""
        self.read()
        writes = [p._version - version for p, version in zip(self.names, self.versions, strict=True)]
        self.buffers = buffer_lines(self.module)
        lines = "\n".join((*self.options, *self.buffers))
        doubt, self.doubted = self.doubted and self.group.rank() == 0, False  # so that one rank differs
        return zlib.crc32(array("q", writes), zlib.crc32(lines.encode())) + doubt

    def compare(self, checksum: int, total: Tensor) -> None:
        """Compare this rank's checksum with the sum of all; a GPU's sum is read at the next synchronisation, when it
        has long been there. Raises UserError on every rank if options, buffers or values differ."""
        options, self.options = list(self.options), {}
        if not is_fake(self.group):
            self.asked = Question(checksum, options, self.buffers, *_to_host(total))
            if self.asked.arrival is None:
                self.read()

    def read(self) -> None:
        """Compare this rank's checksum of the last synchronisation with the sum, once it is on the host."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        if asked.arrival is not None:
            asked.arrival.synchronize()
        if asked.total.item() != asked.checksum * self.group.size():
            require_equal("hyper-parameters", asked.options, self.group, ": give every rank the same")
            require_equal("buffers", asked.buffers, self.group, ": change buffers on every rank")
            self.compare_values()  # writes alone are no error: averaged weights may be swapped in, and out

    def compare_values(self, buffers: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Raises UserError on every rank, naming the first that differs, unless all ranks have equal values."""
        if is_fake(self.group):
            return
        named = chain(((name, p) for p, name in self.names.items()), buffers)
        advice = (
            ": change weights on every rank, or before the module is wrapped; by gradients, after "
            "finish_gradient_synchronization()"
        )
        require_equal("weights", [f"{name} with hash {_hash(tensor)}" for name, tensor in named], self.group, advice)
        self.versions = [p._version for p in self.names]


def plain(option: object) -> str | None:
    """An option as text; None for what is not compared, as a tensor on a GPU, for which a step would have to wait."""
    if isinstance(option, tuple | list):
        each = [plain(value) for value in option]
        return None if None in each else f"({', '.join(map(str, each))})"
    if type(option) is Tensor and option.dim() == 0 and option.device.type == "cpu":
        return repr(option.item())
    return repr(option) if option is None or isinstance(option, bool | int | float | str) else None


def _to_host(number: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A number in the host's memory, and what tells that it has come there from a GPU."""
    if not number.is_cuda:
        return number, None
    host, arrival = torch.empty_like(number, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(number, non_blocking=True)
    arrival.record(torch.cuda.current_stream(number.device))
    return host, arrival


def _hash(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]
