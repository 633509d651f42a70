"""End of a synchronisation: one small all-reduce of used parameters, and of a checksum of what must be equal on all.

The checksum is of the wrapper's number, the options of all optimizer steps since the last synchronisation, how often
each replicated parameter was written to, and the buffers' shapes. If the sum is not N times a rank's own, the N ranks
differ, and they compare options, shapes of buffers, and weights through the store.
"""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor, nn

from cs336_systems.buffers.bucket import GradBucket, Sharded
from cs336_systems.comm import Group, agree, all_reduce, global_rank, is_fake
from cs336_systems.errors import UserError


def require_equal(what: str, lines: Sequence[str], group: Group, advice: str = "") -> None:
    """Raises UserError on every rank, with the first difference, unless all ranks have equal lines. They compare
    through the store: a collective over tensors that differ in size aborts the process on gloo."""
    digests = agree(what, hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    everyone = agree(f"all {what}", lines, group)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip_longest(everyone[0], everyone[other], fillvalue="nothing more")
    a, b = next((a, b) for a, b in pairs if a != b)
    raise UserError(
        f"the ranks' {what} differ: rank {global_rank(0, group)} has {a}, "
        f"rank {global_rank(other, group)} has {b}{advice}"
    )


def buffer_lines(module: nn.Module) -> list[str]:
    """Name, shape and dtype of each buffer of a module, one per line, for the ranks to compare."""
    return [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


class Replicas:
    """The replicated parameters of a wrapped module, with their names, and the options of steps since the last
    comparison. `doubted`: weights were changed while gradients were each rank's own, so compare them in any case."""

    def __init__(self, names: Mapping[nn.Parameter, str], group: Group, module: nn.Module, number: int) -> None:
        self.names, self.group = {p: name for p, name in names.items() if not p.is_inference()}, group
        self.versions = [p._version for p in self.names]  # when the values were last known to be equal
        self.options: dict[str, None] = {}
        self.noted: dict[tuple[str, int, int], tuple[object, dict[str, None]]] = {}  # options, and their lines
        self.module, self.number, self.doubted = module, number, False
        self.own, self.lines = 0, (list[str](), list[str]())  # the last checksum; options and buffers that are in it
        self.total: tuple[Tensor, torch.cuda.Event | None] | None = None  # its sum; event of the copy to the host

    def note(self, optimizer: torch.optim.Optimizer, groups: Mapping[int, int]) -> None:
        """Note the options with which an optimizer will step groups of the wrapper, and their parameters' hash."""
        kind = type(optimizer).__name__
        for place, (group, parameters) in enumerate(groups.items()):
            options = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
            options["hash of the parameters' names"] = parameters
            before, lines = self.noted.get((kind, place, parameters), (None, {}))
            if options != before:  # rarely, since a thousand groups have ten thousand options
                shown = {key: plain(value) for key, value in options.items()}
                lines = {f"{kind}, group {place}, {key} = {each}": None for key, each in shown.items() if each}
                writable = any(isinstance(value, Tensor | list) for value in options.values())
                self.noted[kind, place, parameters] = None if writable else options, lines
            self.options |= lines

    def checksum(self) -> int:
        """Checksum of all that must be equal on all ranks, small enough for an exact sum in float64."""
        self.read()
        writes = [p._version - version for p, version in zip(self.names, self.versions, strict=True)]
        options = [f"a synchronisation of wrapper {self.number}", *self.options]
        self.lines, self.options = (options, buffer_lines(self.module)), {}
        doubt, self.doubted = self.doubted and self.group.rank() == 0, False  # so that one rank differs
        self.own = zlib.crc32(array("q", writes), zlib.crc32("\n".join(chain(*self.lines)).encode())) + doubt
        return self.own

    def compare(self, total: Tensor) -> None:
        """Compare this rank's checksum with the sum of all; a GPU's sum is read at the next synchronisation, when it
        has long been there. Raises UserError on every rank if options, buffers or values differ."""
        if not is_fake(self.group):
            self.total = _to_host(total)
            if self.total[1] is None:
                self.read()

    def read(self) -> None:
        """Compare this rank's checksum of the last synchronisation with the sum, once it is on the host."""
        if self.total is None:
            return
        (total, arrival), self.total = self.total, None
        if arrival is not None:
            arrival.synchronize()
        if total.item() != self.own * self.group.size():
            require_equal("hyper-parameters", self.lines[0], self.group, ": give every rank the same")
            require_equal("buffers", self.lines[1], self.group, ": change buffers on every rank")
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
        data = ((name, t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data) for name, t in named)
        lines = [f"{name} with hash {hashlib.sha256(each).hexdigest()[:16]}" for name, each in data]
        require_equal("weights", lines, self.group, advice)
        self.versions = [p._version for p in self.names]


@torch.no_grad()
def finish_all(buckets: Sequence[GradBucket], replicas: Replicas) -> None:
    """Finish all reductions, and tell every rank by one small all-reduce which parameters any rank used (others have no
    gradient), if all shards of gradients are finite (else all shards, and one whole gradient, get a NaN, since
    one rank alone would skip its step), and if the ranks' replicas are still equal."""
    sharded = [bucket for bucket in buckets if isinstance(bucket.placement, Sharded)]
    for bucket in sharded:
        bucket.finish()
    shards = [bucket.shard for bucket in sharded if bucket.shard is not None and bucket.shard.numel()]
    bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
    flags = [float(parameter in bucket.used) for parameter, bucket in bucket_of.items()]
    device = buckets[0].parameters[0].device if buckets else torch.device("cpu")
    sums = torch.tensor([*flags, replicas.checksum(), 0.0], dtype=torch.float64, pin_memory=device.type == "cuda")
    sums = sums.to(device, non_blocking=True)  # from pinned memory, else the host would wait for it, behind backward
    real = (torch.view_as_real(shard) if shard.is_complex() else shard for shard in shards)
    if extremes := [extreme for shard in real for extreme in torch.aminmax(shard)]:
        sums[-1] = (0 * torch.stack(extremes)).sum()  # 0, or NaN if an element is infinite or NaN; without waiting
    work = all_reduce(sums, replicas.group, "used parameters", "sum")
    for bucket in buckets:
        bucket.finish()
    work.wait()
    whole = [p.grad for b in buckets if sharded and b.shard is None for p in b.parameters if p.grad is not None]
    for gradient in (*shards, *whole[:1]):
        gradient.view(-1)[:1] += sums[-1]
    if not all(flags):  # else nobody reads the answer, which on a GPU waits for the device
        for (parameter, bucket), elsewhere in zip(bucket_of.items(), sums.tolist(), strict=False):
            if elsewhere and parameter not in bucket.used:
                bucket.used.add(parameter)
                if bucket.flat is None:  # a shard has its mean gradient already
                    parameter.grad = bucket.stand_in(parameter)
                else:
                    parameter.grad = bucket.view(parameter)
                    bucket.lies_here.add(parameter)
    for bucket in buckets:
        if bucket.shard is not None:
            bucket.hold_pieces()
            continue
        bucket.used = set()
        for p in bucket.parameters:  # torch's fused optimizers pair elements by address
            plain = p.is_contiguous() and (p.grad is None or p.grad.is_contiguous())  # strides of axes of 1 may differ
            if p.grad is not None and not plain and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
        if len(bucket.parameters) == 1:  # the buffer is the gradient itself, which zero_grad must be able to free
            bucket.flat = None
    replicas.compare(sums[-2])


def plain(option: object) -> str | None:
    """An option as text; None if it is not compared, such as a tensor on a GPU, for which the host would wait."""
    if isinstance(option, tuple | list):
        each = [plain(value) for value in option]
        return None if None in each else f"({', '.join(map(str, each))})"
    if type(option) is Tensor and option.dim() == 0 and option.device.type == "cpu":
        return repr(option.item())
    return repr(option) if option is None or isinstance(option, bool | int | float | str) else None


def _to_host(number: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy a number to the host without waiting; returns it with the event that marks its arrival from a GPU."""
    if not number.is_cuda:
        return number, None
    host, arrival = number.to("cpu", non_blocking=True), torch.cuda.Event()  # in pinned memory
    arrival.record(torch.cuda.current_stream(number.device))
    return host, arrival
