"""Collectives in shared memory: sums in the order of the ranks to the last bit, whatever the size, buffer, wrapper and
ZeRO stage; ranks that wait in different orders; ranks that die, stop or leave; and nothing that stays behind."""

import errno
import gc
import os
import signal
from contextlib import suppress
from itertools import product
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch.nn.functional as F
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
from cs336_systems.comm.blocks import Pool
from cs336_systems.comm.shared_memory import transport
from cs336_systems.comm.shared_verbs import ONE_SHOT, shared_empty
from cs336_systems.comm.tables import SLOTS
from cs336_systems.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.zero import zero
from tests.support import ranks

HALVES = torch.float16, torch.bfloat16
ROUNDED = ["float32", "bfloat16"]  # whose sums show the order of addition
OTHERS = ["float64", "float16", "int64", "int32", "uint8", "complex64"]
WORLDS = 2, 3, 4, 8


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
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
    shared = shared_empty(mine.numel(), mine.dtype, mine.device, group)
    return [mine.clone(), shared.copy_(mine)]


def verbs_case(group, dtype: str) -> int:
    dtype, size, me = getattr(torch, dtype), group.size(), group.rank()
    large = ONE_SHOT // dtype.itemsize + 5
    assert transport.on
    compared = 0
    for numel in (0, 1, 7, large):
        terms = [values(rank, numel, dtype) for rank in range(size)]
        for reduction in ("sum", "mean", "max"):
            if (reduction == "mean" and not dtype.is_floating_point) or (reduction == "max" and dtype.is_complex):
                continue
            for flat in buffers(terms[me], group):
                all_reduce(flat, group, f"{numel}", reduction).wait()
                assert torch.equal(flat, in_order(terms, reduction)), (numel, reduction)
                compared += 1
        for flat in buffers(terms[me], group):
            broadcast(flat, size - 1, group, f"{numel}").wait()
            assert torch.equal(flat, terms[-1])
    for rows in (0, 1, large if size == 8 else large // size):  # of 8 ranks, more than the blocks that are kept hold
        terms = [values(rank, size * rows, dtype) for rank in range(size)]
        for flat in buffers(terms[me], group):
            reduce_scatter(flat, group, f"{rows}", "sum").wait()
            assert torch.equal(flat.chunk(size)[me], in_order(terms, "sum").chunk(size)[me]) or not rows
        for flat in buffers(terms[me], group):
            all_gather(flat, group, f"{rows}").wait()
            assert torch.equal(flat, torch.cat([term[i * rows : (i + 1) * rows] for i, term in enumerate(terms)]))
    # From rank i to rank j go (i + 2 j) % 4 rows of three numbers.
    counts = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    rows = [values(rank, 3 * sum(counts[rank]), dtype).view(-1, 3) for rank in range(size)]
    taken = [counts[i][me] for i in range(size)]
    output = torch.empty(sum(taken), 3, dtype=dtype)
    all_to_all(output, rows[me], taken, counts[me], group, "rows").wait()
    assert torch.equal(output, torch.cat([rows[i].split(counts[i])[me] for i in range(size)]))
    sent, came = values(me, large, dtype), torch.empty(large, dtype=dtype)
    works = [send(sent, (me + 1) % size, group, "on"), receive(came, (me - 1) % size, group, "on")]
    for work in works:
        work.wait()
    assert torch.equal(came, values((me - 1) % size, large, dtype))
    return compared


@pytest.mark.parametrize(("dtype", "world"), [*product(ROUNDED, (2, 3, 8)), *product(OTHERS, (3,))])
def test_every_verb_has_the_bits_of_one_process(dtype, world):
    assert min(ranks.run(verbs_case, world, dtype=dtype)) >= 8


class Model(nn.Module):
    """A small model whose products have the same shapes on a rank and in one process that takes its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 300), nn.LayerNorm(300), nn.Linear(300, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def model_of(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


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
            gradients.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad()
        found.append({name: in_order([each[name] for each in gradients], "mean") for name in gradients[0]})
        for name, parameter in model.named_parameters():
            parameter.grad = found[-1][name]
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.named_parameters())


TRAINED = [*product(["float32"], [1, *WORLDS]), ("bfloat16", 8)]
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
    me, ones = group.rank(), torch.ones(ONE_SHOT)
    flats = [ones.clone() for _ in range(4)]
    works = [all_reduce(flat, group, f"{i}", "sum") for i, flat in enumerate(flats)]
    works[me % 4].wait()
    agree("in between", str(me), group)
    for work in works[:: 1 if me % 2 else -1]:
        work.wait()
    assert all(flat.eq(group.size()).all() for flat in flats)
    small = [torch.ones(3) for _ in range(SLOTS + 50)]
    for work in [all_reduce(each, group, "small", "sum") for each in small]:
        work.wait()
    assert all(each.eq(group.size()).all() for each in small)
    transport.progress()
    assert len(transport.pending) <= SLOTS


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_wait_in_different_orders(world):
    ranks.run(orders_case, world)


def reversed_case(group) -> None:
    """Collectives with tags, and those without, may pass each other; agreements as well."""
    scattered, reduced = torch.ones(2 * group.size()), torch.ones(3)
    first = group.rank() == 0
    calls = [lambda: reduce_scatter(scattered, group, "a", "sum"), lambda: all_reduce(reduced, group, "b", "sum")]
    works = [call() for call in (calls if first else calls[::-1])]
    for work in works:
        work.wait()
    if first:
        agree("first", "", group)
    work = all_reduce(reduced, group, "c", "sum")
    if not first:
        agree("first", "", group)
    work.wait()
    assert reduced.eq(group.size() ** 2).all()


def test_what_has_a_tag_passes_what_has_none():
    ranks.run(reversed_case, 2)


def slow_case(group) -> int:
    """Blocks that a rank holds which never waits for the others, since it comes last each time."""
    for _ in range(60):
        flat = torch.ones(2 * ONE_SHOT)
        agree("together", "", group)
        if group.rank() == 1:
            sleep(0.005)
        all_gather(flat, group, "flat").wait()
    return len(transport.pending)


def test_a_slow_rank_frees_what_the_others_are_done_with():
    assert max(ranks.run(slow_case, 2)) <= 4


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


def test_a_buffer_under_way_is_nobody_elses():
    ranks.run(dropped_case, 2)


def moved_case(group, folder: str) -> None:
    """Rank 0 leaves, and has a file of its own where its memory was."""
    flat = torch.ones(2**20)
    if group.rank() == 0:
        work = all_reduce(flat, group, "flat", "sum")
        transport.close()
        del flat, work
        gc.collect()
        Path(folder, "mine").write_bytes(bytes(2**23))
        files = [open(f"{folder}/mine", "r+b") for _ in range(40)]  # noqa: SIM115, they stay open
        Path(folder, "ready").touch()
        while not Path(folder, "over").exists():
            sleep(0.01)
        assert not any(Path(folder, "mine").read_bytes()), files
        raise ValueError("left")
    while not Path(folder, "ready").exists():
        sleep(0.01)
    try:
        all_reduce(flat, group, "flat", "sum").wait()
    finally:
        Path(folder, "over").touch()


def test_no_other_file_of_a_rank_that_left_is_written_to(tmp_path):
    _, (kind, message) = ranks.run_failing(moved_case, 2, 10.0, folder=str(tmp_path))
    assert kind == CommError.__name__
    assert "another rank has left" in message or "has left the group" in message


def misuse_case(group) -> list[str]:
    buffer = shared_empty(ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(1)
    reduce_scatter(buffer[:0], group, "empty", "sum").wait()
    found = []
    with pytest.raises(CommError, match="rows leave") as error:
        all_to_all(torch.empty(4), torch.ones(8), [2, 2], [2, 2], group, "rows")
    found.append(str(error.value))
    for strided in (buffer[:9:2], buffer[1::2]):
        all_reduce(strided, group, "strided", "sum").wait()
    assert buffer[1::2].eq(group.size()).all()
    assert buffer[:12:2].tolist() == [group.size()] * 5 + [1]
    return found


def test_rows_that_do_not_add_up_are_refused_and_strides_are_right():
    assert all(found for found in ranks.run(misuse_case, 2))


def reuse_case(group) -> None:
    """A buffer that is freed is used again, and by nobody before the others are done with it."""
    places = set()
    for turn in range(20):
        flat = shared_empty(ONE_SHOT, torch.float32, torch.device("cpu"), group).fill_(turn + group.rank())
        places.add(flat.data_ptr())
        reduce_scatter(flat, group, "turn", "sum").wait()
        assert flat.chunk(group.size())[group.rank()].eq(turn * group.size() + sum(range(group.size()))).all()
        del flat
    assert len(places) <= 2


def test_a_freed_buffer_is_used_again():
    ranks.run(reuse_case, 2)


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


def ends_case(group, how: str) -> None:
    flat = torch.ones(ONE_SHOT)
    if group.rank() == 1:
        all_reduce(flat, group, "before", "sum")  # under way when the rank ends
        if how == "leaves":
            raise ValueError("enough")
        os.kill(os.getpid(), signal.SIGKILL)
    start = monotonic()
    try:
        all_reduce(flat, group, "before", "sum").wait()
        all_reduce(flat, group, "after", "sum").wait()
    finally:
        assert monotonic() - start < 15  # ranks wait for each other for 20 seconds or more


@pytest.mark.parametrize(("how", "said"), [("dies", "died"), ("leaves", "ValueError: enough")])
def test_who_ends_in_the_middle_is_named_at_once(how, said):
    errors = ranks.run_failing(ends_case, 3, 20.0, how=how)
    for rank in (0, 2):
        kind, message = errors[rank]
        assert kind == CommError.__name__
        assert f"rank 1 {said}" in message or f"rank 1 failed: {said}" in message


def leftovers() -> tuple[int, int]:
    """Open files of blocks, and mappings of such files, of this process."""
    files = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            files.append(os.readlink(each))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:transfers" in each for each in files), sum("memfd:transfers" in each for each in maps)


def left_case(rank: int, world: int, folder: str) -> list[int]:
    with distributed(place=Place(rank, world, rank, world, f"{folder}/store"), timeout=20.0) as group:
        for flat in buffers(torch.ones(ONE_SHOT), group):
            all_reduce(flat, group, "sum", "sum").wait()
        assert transport.on
        assert leftovers()[0] >= 1
    del flat
    return [*leftovers()]


def test_nothing_is_left():
    assert ranks.run_alone(left_case, 2) == [[0, 0]] * 2


def chosen_case(rank: int, world: int, folder: str, backend: str | None, blind: bool) -> list[str]:
    if blind and rank == 1:  # as in another container
        shared_memory.recorder.attach = lambda *arguments: None
    try:
        with distributed("cpu", backend, 20.0, Place(rank, world, rank, world, f"{folder}/store")) as group:
            flat = torch.ones(5)
            all_reduce(flat, group, "sum", "sum").wait()
            assert flat.eq(world).all()
            return [backend_of(group), ""]
    except Exception as error:
        return ["", str(error)]


@pytest.mark.parametrize(
    ("backend", "blind", "chosen"),
    [(None, False, "shm"), ("gloo", False, "gloo"), ("shm", False, "shm"), (None, True, "gloo")],
)
def test_what_is_chosen(backend, blind, chosen):
    assert ranks.run_alone(chosen_case, 2, backend=backend, blind=blind) == [[chosen, ""]] * 2


def test_memory_that_cannot_be_shared_is_refused_where_it_was_asked_for():
    for name, message in ranks.run_alone(chosen_case, 2, backend="shm", blind=True):
        assert not name
        assert message.startswith("--backend shm: the ranks cannot map each other's memory")
