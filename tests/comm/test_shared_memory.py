"""Collectives in shared memory: sums in the order of the ranks to the last bit, whatever the size, buffer, wrapper and
ZeRO stage; ranks that wait in different orders; ranks that die, stop or leave; and nothing that stays behind."""

import errno
import gc
import os
import warnings
from itertools import product
from pathlib import Path
from time import sleep

import pytest
import torch
from torch import nn

from cs336_systems.comm import (
    CommError,
    Place,
    agree,
    all_gather,
    all_reduce,
    all_to_all,
    backend_of,
    broadcast,
    distributed,
    receive,
    reduce_scatter,
    send,
    shared_memory,
)
from cs336_systems.comm.blocks import SLOTS, Pool
from cs336_systems.comm.flight_recorder import recorder
from cs336_systems.comm.shared_memory import transport
from cs336_systems.comm.shared_verbs import ONE_SHOT, shared_empty
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.zero import zero
from tests.support import ranks

HALVES = torch.float16, torch.bfloat16
ROUNDED = ["float32", "bfloat16"]  # whose sums show the order of addition
OTHERS = ["float64", "float16", "int64", "int32", "uint8", "complex64"]
FLOATING = [*ROUNDED, "float64", "float16", "complex64"]


def values(rank: int, numel: int, dtype: torch.dtype, whole: bool = False) -> torch.Tensor:
    """Random numbers of a rank, or small whole ones, whose sums every dtype holds exactly."""
    if whole:
        return ((torch.arange(numel) % 7 - 2) * (rank + 1)).to(dtype)
    draw = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, dtype=dtype if dtype not in HALVES else torch.float32, generator=draw).to(dtype)
    return torch.randint(0, 9, (numel,), dtype=dtype, generator=draw)


def in_order(terms: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """What one process makes of the ranks' tensors, from the first to the last."""
    if reduction == "max":
        return torch.stack(terms).amax(0)
    dtype = terms[0].dtype
    total = terms[0].float() if dtype in HALVES else terms[0].clone()
    for term in terms[1:]:
        total += term
    return (total / len(terms) if reduction == "mean" else total).to(dtype)


def buffers(mine: torch.Tensor, group) -> list[torch.Tensor]:
    """The tensor in memory of this rank alone, and in memory that the ranks share."""
    if not transport.on:
        return [mine.clone()]
    return [mine.clone(), shared_empty(mine.numel(), mine.dtype, mine.device, group).copy_(mine)]


def verbs_case(group, dtypes: list[str], shared: bool) -> None:
    warnings.simplefilter("error")  # torch's names change; ours must follow without a word
    assert transport.on == shared
    for dtype in (getattr(torch, name) for name in dtypes):
        check_sums(group, dtype)
        check_copies(group, dtype)


def check_sums(group, dtype: torch.dtype) -> None:
    size, me, large = group.size(), group.rank(), ONE_SHOT // dtype.itemsize + 5
    reductions = ["sum"] + ["mean"] * (dtype.is_floating_point or dtype.is_complex) + ["max"] * (not dtype.is_complex)
    for reduction, numel in product(reductions, (0, 1, 7, large)):
        rounded = reduction == "mean" and (dtype.is_complex or not transport.on)
        bounds = {} if rounded else {"rtol": 0, "atol": 0}
        terms = [values(rank, numel, dtype, not transport.on) for rank in range(size)]
        for flat in buffers(terms[me], group):
            work = all_reduce(flat, group, f"{numel}", reduction)
            work.wait()
            work.wait()  # waiting twice is waiting once
            torch.testing.assert_close(flat, in_order(terms, reduction), **bounds)
        if reduction == "max":
            continue
        # Of 8 ranks, more than the blocks that are kept hold.
        rows, whole = numel if size == 8 else numel // size, not transport.on and dtype != torch.float32
        terms = [values(rank, size * rows, dtype, whole) for rank in range(size)]
        for flat in buffers(terms[me], group):
            reduce_scatter(flat, group, f"{numel}", reduction).wait()
            torch.testing.assert_close(flat.chunk(size)[me], in_order(terms, reduction).chunk(size)[me], **bounds)


def check_copies(group, dtype: torch.dtype) -> None:
    size, me, large = group.size(), group.rank(), ONE_SHOT // dtype.itemsize + 5
    for numel in (0, 1, 7, large):
        terms = [values(rank, numel, dtype) for rank in range(size)]
        for flat in buffers(terms[me], group):
            broadcast(flat, size - 1, group, f"{numel}").wait()
            assert torch.equal(flat, terms[-1])
        rows = numel if size == 8 else numel // size
        for flat in buffers(torch.cat([terms[me][:rows]] * size), group):
            all_gather(flat, group, f"{rows}").wait()
            assert torch.equal(flat, torch.cat([term[:rows] for term in terms]))
    grid = values(me, 12, dtype).view(3, 4).T  # not contiguous
    broadcast(grid, 0, group).wait()
    assert torch.equal(grid, values(0, 12, dtype).view(3, 4).T)
    # From rank i to rank j go (i + 2 j) % 4 rows of three numbers.
    counts = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    rows = [values(rank, 3 * sum(counts[rank]), dtype).view(-1, 3) for rank in range(size)]
    taken = [counts[i][me] for i in range(size)]
    output = torch.empty(sum(taken), 3, dtype=dtype)
    all_to_all(output, rows[me], taken, counts[me], group, "rows").wait()
    assert torch.equal(output, torch.cat([rows[i].split(counts[i])[me] for i in range(size)]))
    if size > 1:
        sent, came = values(me, large, dtype), torch.empty(large, dtype=dtype)
        works = [send(sent, (me + 1) % size, group, "on"), receive(came, (me - 1) % size, group, "on")]
        for work in works:
            work.wait()
        assert torch.equal(came, values((me - 1) % size, large, dtype))


@pytest.mark.parametrize(("world", "dtypes"), [(2, ROUNDED), (3, ROUNDED + OTHERS), (8, ROUNDED)])
def test_every_verb_has_the_bits_of_one_process(world, dtypes):
    ranks.run(verbs_case, world, dtypes=dtypes, shared=True)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_verbs_on_gloo(world):
    """Sums of whole numbers, since gloo's all-reduce adds in an order of its own."""
    ranks.run_on_gloo(verbs_case, world, dtypes=FLOATING, shared=False)


def model_of(dtype: torch.dtype) -> nn.Module:
    """A small model whose products have the same shapes on a rank and in one process that takes its rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 300), nn.LayerNorm(300), nn.GELU(), nn.Linear(300, 500)).to(dtype)


def rows_of(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def alone(world: int, dtype: torch.dtype, steps: int) -> tuple[list[dict], dict]:
    """Mean gradients of each step, and the parameters after AdamW, in one process that adds the ranks' gradients."""
    model = model_of(dtype)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(steps):
        gradients = []
        for rank in range(world):
            loss_of(model, rows_of(rank, step, dtype)).backward()
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = in_order(each, "mean")
        found.append({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.named_parameters())


TRAINED = [*product(["float32"], [1, 2, 3, 8]), ("bfloat16", 8)]
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": lambda module: BucketedDDP(module, bucket_size_mb=0.4),
    "one bucket": lambda module: BucketedDDP(module, bucket_size_mb=None),
}


def wanted(group, folder: str, dtype: torch.dtype, steps: int) -> tuple[list[dict], dict]:
    """What `alone` finds, computed once for all ranks."""
    path = Path(folder, "alone")
    if group.rank() == 0:
        torch.save(alone(group.size(), dtype, steps), path)
    agree("computed", "", group)
    return torch.load(path)


def wrappers_case(group, folder: str, dtype: str) -> None:
    dtype = getattr(torch, dtype)
    gradients, _ = wanted(group, folder, dtype, 1)
    for name, wrap in WRAPPERS.items():
        model = wrap(model_of(dtype))
        loss_of(model, rows_of(group.rank(), 0, dtype)).backward()
        model.finish_gradient_synchronization()
        differ = [key for key, p in model.module.named_parameters() if not torch.equal(p.grad, gradients[0][key])]
        assert not differ, (name, differ)


def stages_case(group, folder: str, dtype: str) -> None:
    dtype, steps = getattr(torch, dtype), 2
    _, parameters = wanted(group, folder, dtype, steps)
    for stage in range(4):
        model, optimizer = zero(model_of(dtype), torch.optim.AdamW, stage, lr=0.01)
        for step in range(steps):
            loss_of(model, rows_of(group.rank(), step, dtype)).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        found = model.gather_full_params() if isinstance(model, FSDP) else dict(model.module.named_parameters())
        differ = [name for name, want in parameters.items() if not torch.equal(found[name], want)]
        assert not differ, (stage, differ)


@pytest.mark.parametrize(("dtype", "world"), TRAINED)
def test_every_wrapper_has_the_gradients_of_one_process_to_the_last_bit(tmp_path, dtype, world):
    ranks.run(wrappers_case, world, folder=str(tmp_path), dtype=dtype)


@pytest.mark.parametrize(("dtype", "world"), TRAINED)
def test_every_stage_has_the_parameters_of_one_process_to_the_last_bit(tmp_path, dtype, world):
    ranks.run(stages_case, world, folder=str(tmp_path), dtype=dtype)


def orders_case(group) -> None:
    """Each rank waits in another order, asks the others something in between, and has more under way than a table."""
    me, size = group.rank(), group.size()
    flats = [torch.ones(ONE_SHOT) for _ in range(4)]
    works = [all_reduce(flat, group, f"{i}", "sum") for i, flat in enumerate(flats)]
    works[me % 4].wait()
    agree("in between", str(me), group)
    for work in works[:: 1 if me % 2 else -1]:
        work.wait()
    small = [torch.ones(3) for _ in range(SLOTS + 50)]
    for work in [all_reduce(each, group, "small", "sum") for each in small]:
        work.wait()
    assert all(each.eq(size).all() for each in [*flats, *small])
    transport.progress()
    assert len(transport.pending) <= SLOTS


def reversed_case(group) -> None:
    """Collectives with tags, and those without, may pass each other; agreements as well."""
    scattered, reduced, first = torch.ones(2 * group.size()), torch.ones(3), group.rank() == 0
    calls = [lambda: reduce_scatter(scattered, group, "a", "sum"), lambda: all_reduce(reduced, group, "b", "sum")]
    for work in [call() for call in (calls if first else calls[::-1])]:
        work.wait()
    if first:
        agree("first", "", group)
    work = all_reduce(reduced, group, "c", "sum")
    if not first:
        agree("first", "", group)
    work.wait()
    assert reduced.eq(group.size() ** 2).all()


def slow_case(group) -> None:
    """A rank that never waits for the others, since it comes last each time, gives back the blocks that it holds."""
    for _ in range(60):
        flat = torch.ones(2 * ONE_SHOT)
        agree("together", "", group)
        if group.rank() == 1:
            sleep(0.005)
        all_gather(flat, group, "flat").wait()
    assert len(transport.pending) <= 4


def dropped_case(group) -> None:
    """A buffer is dropped while its reduction is under way, and another taken, which nobody may write to."""
    flat = shared_empty(2 * ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(1)
    agree("before", "", group)
    if group.rank() == 0:
        work = all_reduce(flat, group, "dropped", "sum")
        del flat
        other = shared_empty(2 * ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(7)
        agree("launched", "", group)
        work.wait()
        assert other.eq(7).all()
    else:
        agree("launched", "", group)
        all_reduce(flat, group, "dropped", "sum").wait()
        assert flat.eq(2).all()


def moved_case(group, folder: str) -> None:
    """Rank 0 leaves, and has a file of its own where its memory was."""
    flat, mine, ready, over = torch.ones(2**20), *(Path(folder, name) for name in ("mine", "ready", "over"))
    if group.rank() == 0:
        work = all_reduce(flat, group, "flat", "sum")
        transport.close()
        del flat, work
        gc.collect()
        mine.write_bytes(bytes(2**23))
        files = [open(mine, "r+b") for _ in range(40)]  # noqa: SIM115, they stay open
        ready.touch()
        while not over.exists():
            sleep(0.01)
        assert not any(mine.read_bytes()), files
        raise ValueError("left")
    while not ready.exists():
        sleep(0.01)
    try:
        all_reduce(flat, group, "flat", "sum").wait()
    finally:
        over.touch()


def test_no_other_file_of_a_rank_that_left_is_written_to(tmp_path):
    _, (kind, message) = ranks.run_failing(moved_case, 2, 10.0, folder=str(tmp_path))
    assert kind == CommError.__name__
    assert "another rank has left" in message or "has left the group" in message


def misuse_case(group) -> None:
    """Rows that do not add up are refused, and strides are right."""
    buffer = shared_empty(ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(1)
    with pytest.raises(CommError, match="rows leave"):
        all_to_all(torch.empty(4), torch.ones(8), [2, 2], [2, 2], group, "rows")
    for strided in (buffer[:9:2], buffer[1::2]):
        all_reduce(strided, group, "strided", "sum").wait()
    assert buffer[1::2].eq(group.size()).all()
    assert buffer[:12:2].tolist() == [group.size()] * 5 + [1]


def reuse_case(group) -> None:
    """A buffer that is freed is used again, and by nobody before the others are done with it."""
    places, total = set(), sum(range(group.size()))
    for turn in range(20):
        flat = shared_empty(ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(turn + group.rank())
        places.add(flat.data_ptr())
        reduce_scatter(flat, group, "turn", "sum").wait()
        assert flat.chunk(group.size())[group.rank()].eq(turn * group.size() + total).all()
        del flat
    assert len(places) <= 2


CASES = {
    "ranks may wait in different orders": orders_case,
    "what has a tag passes what has none": reversed_case,
    "a slow rank frees what the others are done with": slow_case,
    "a buffer under way is nobody else's": dropped_case,
    "rows that do not add up, and strides": misuse_case,
    "a freed buffer is used again": reuse_case,
}


@pytest.mark.parametrize("name", CASES)
def test_memory_of_two_ranks(name):
    ranks.run(CASES[name], 2)


def test_small_blocks_take_few_files_and_no_more_memory_than_they_have():
    pool = Pool()
    spans = [pool.take(100).span(100) for _ in range(5000)]
    assert len({(span.serial, span.offset) for span in spans}) == 5000
    assert len({span.serial for span in spans}) == 3  # of 2,048 blocks each
    assert os.fstat(Pool().take(100).memory.file).st_blocks * 512 <= 2**21  # one huge page


def test_memory_that_ends_in_a_file_is_a_users_error_and_loses_no_block(monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = Pool()
    first = pool.take(100)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(UserError, match="no 4,096 bytes of memory for ranks to share: No space left on device"):
            pool.take(100)
    assert (pool.take(100).memory, first.offset) == (first.memory, 0)
    assert pool.take(100).offset == 2 * 4096


def leftovers() -> list[bool]:
    """Whether this process has open files of blocks or of rings, which have no name outside of /proc, and whether it
    has mapped any."""
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    return [name in text for name in ("memfd:transfers", "flight of rank") for text in ("".join(files), maps)]


def left_case(rank: int, world: int, folder: str) -> list[bool]:
    with distributed(place=Place(rank, world, rank, world, f"{folder}/store"), timeout=20.0) as group:
        for flat in buffers(torch.ones(ONE_SHOT), group):
            all_reduce(flat, group, "sum", "sum").wait()
        assert all(leftovers())
        assert sorted(recorder.others) == [each for each in range(world) if each != rank]
        assert recorder.lost() == set()
        agree("looked", "", group)
    del flat
    return leftovers()


def test_nothing_is_left():
    assert ranks.run_alone(left_case, 2) == [[False] * 4] * 2


def chosen_case(rank: int, world: int, folder: str, backend: str | None, blind: bool) -> str:
    if blind and rank == 1:  # as in another container
        shared_memory.recorder.attach = lambda *arguments: None
    try:
        with distributed("cpu", backend, 20.0, Place(rank, world, rank, world, f"{folder}/store")) as group:
            flat = torch.ones(5)
            all_reduce(flat, group, "sum", "sum").wait()
            assert flat.eq(world).all()
            return backend_of(group)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("backend", "blind", "chosen"),
    [
        (None, False, "shm"),
        ("gloo", False, "gloo"),
        (None, True, "gloo"),
        ("shm", True, "--backend shm: the ranks cannot map each other's memory"),
    ],
)
def test_what_is_chosen(backend, blind, chosen):
    assert all(each.startswith(chosen) for each in ranks.run_alone(chosen_case, 2, backend=backend, blind=blind))
