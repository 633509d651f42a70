"""The course's accounting computed another way; docs/accounting.md: `python -m tests.cost.test_course` writes it."""

import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness import saved_storages
from benchmarks.lib.residuals import strategy
from cs336_systems.cost.closed_forms import exposed_seconds
from cs336_systems.cost.course import ANSWERS, QUESTIONS, Answer, parse_numbers, question
from cs336_systems.cost.course.arithmetic import accumulate
from cs336_systems.cost.course.communication import (
    EGRESS,
    SPEED,
    alternate_ring_seconds,
    best_count,
    overhead,
    ring_seconds,
    tree_seconds,
)
from cs336_systems.cost.course.memory import segments_peak, tensors_of
from cs336_systems.cost.flops import count_parameters, forward_flops
from cs336_systems.cost.observed import observe_passes
from cs336_systems.errors import UserError
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import ModelConfig, model_preset
from kernels.tiled_attention import TiledAttentionFunction

PAGE = Path(__file__).resolve().parents[2] / "docs/accounting.md"
BEGIN, END = "<!-- accounting: begin (python -m tests.cost.test_course writes this) -->", "<!-- accounting: end -->"


@cache
def answer(name: str) -> Answer:
    """With the question's own numbers; some run a model, on tensors without numbers."""
    return question(name)


def with_answers(text: str) -> str:
    """The page with a list of all questions, each with a link to its answer, and all answers."""
    listed = (f"- [{each.title}](#{anchor(each.title)}) (`{each.id}`)" for each in QUESTIONS.values())
    answers = (answer(name).markdown() for name in ANSWERS)
    before, rest = text.split(BEGIN)
    return "\n\n".join((f"{before}{BEGIN}", "\n".join(listed), *answers, f"{END}{rest.split(END)[1]}"))


def anchor(heading: str) -> str:
    """Target of a link within the page, as GitHub writes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_page_is_what_is_computed():
    text = PAGE.read_text()
    assert with_answers(text) == text, "run python -m tests.cost.test_course and commit"
    for name, function in ANSWERS.items():
        assert set(function.__annotations__) - {"return"} <= set(QUESTIONS[name].fields)


# As published by students, or derived by hand before this code was written; digits as quoted there.
PUBLISHED = {
    "xxl-memory": {"parameters": 219.85e9, "state": 3.518e12, "gpus": 44, "saved_per_token": 17.55e6},
    "xxl-fsdp": {"state_over_memory": 37.03, "devices_state": 38},
    "xxl-batch": {"free_apart": 245, "given_overlapped": 319, "given_apart": 395},
    "accumulation": {"single_single": 10.0001, "half_half": 9.9531, "single_half": 10.0021},
    "fsdp-memory": {"saved": 12.691 * 2**30, "sharded_optimizer": 38.074 * 2**30, "fsdp": 25.383 * 2**30},
    "norm-roofline": {"fused_forward": 0.683e-3},
    "leaderboard-flash": {"total": 1.92e12, "reached": 359e12},
    "leaderboard-step": {"parameters": 8.125e9, "state": 121 * 2**30, "total": 5.04e15, "reached": 657e12},
}


def test_published_numbers():
    for name, published in PUBLISHED.items():
        rel = 3e-4 if name in ("xxl-memory", "xxl-fsdp", "accumulation") else 3e-3  # the last digit rounded or cut
        numbers = question(name).numbers
        assert {key: numbers[key] for key in published} == pytest.approx(published, rel=rel), name


def test_published_measurements():
    accounting = question("optimizer-memory", size="xl", year=2024).numbers
    assert [round(accounting[key] / 2**30, 2) for key in ("initialized", "moments")] == [5.55, 11.11]
    passes = answer("pass-memory").numbers
    assert (passes["stream"], passes["matrix"]) == (20 * 2**20, 100 * 2**20)
    assert passes["scores"] * (passes["scores_from"] / 128) ** 2 == pytest.approx(passes["matrix"])
    measured = {"forward_fp32": 10.07, "forward_bf16": 14.63, "step_fp32": 38.56, "step_bf16": 43.30}
    for key, gibibytes in measured.items():
        assert passes[key] / 2**30 == pytest.approx(gibibytes, rel=0.07)
    # What autocast adds is the casts, less the halved workspace.
    assert 0.95 < (passes["forward_bf16"] - passes["forward_fp32"]) / passes["casts"] <= 1
    assert round(question("xxl-memory").numbers["state"] / 2**30) == 3276


def play_ring(ranks: int, size: float, bandwidth: float, latency: float, whole: bool) -> float:
    """Seconds of an all-reduce that is played message by message; checks that every device has the sum."""
    have = passed = np.random.default_rng(0).integers(1, 99, (ranks, 1 if whole else ranks))
    expected, steps = have.sum(0), (ranks - 1) * (1 if whole else 2)
    for step in range(steps):
        if whole:
            passed = np.roll(passed, 1, axis=0)
            have = have + passed
            continue
        sent = [(rank - step) % ranks for rank in range(ranks)]
        messages = have[range(ranks), sent]
        for rank in range(ranks):
            have[rank, sent[rank - 1]] = messages[rank - 1] + (have[rank, sent[rank - 1]] if step < ranks - 1 else 0)
    assert (have == expected).all()
    return steps * (latency + size / have.shape[1] / bandwidth)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_rings_message_by_message(ranks):
    numbers = question("rings", N=ranks, S=6e8, W=2e11, a=4e-6).numbers
    assert numbers["ring"] == pytest.approx(play_ring(ranks, 6e8, 2e11, 0.0, whole=False))
    assert numbers["ring_latency"] == pytest.approx(play_ring(ranks, 6e8, 2e11, 4e-6, whole=False))
    assert numbers["alternate"] == pytest.approx(play_ring(ranks, 6e8, 2e11, 0.0, whole=True))
    late = alternate_ring_seconds(ranks, 6e8, 2e11, 4e-6)
    assert late == pytest.approx(play_ring(ranks, 6e8, 2e11, 4e-6, whole=True))


def bisect(above, low: float, high: float) -> float:
    """Where a condition that is false at `low` and true at `high` turns."""
    while low < (middle := (low + high) / 2) < high and high - low > 1e-10 * high:
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


def extreme(value, low: float, high: float, pick=max) -> float:
    """The largest or smallest value in a range: a grid of the whole, then finer ones around the best point."""
    for _ in range(4):
        step = (high - low) / 24
        best = pick((low + step * place for place in range(25)), key=value)
        low, high = max(low, best - step), min(high, best + step)
    return value(best)


@pytest.mark.parametrize("ranks", [4, 64])
def test_where_latency_changes_the_winner(ranks):
    numbers, link = question("rings", N=ranks, W=1e11, a=5e-6).numbers, (1e11, 5e-6)
    turn = bisect(lambda size: alternate_ring_seconds(ranks, size, *link) > ring_seconds(ranks, size, *link), 0, 1e12)
    assert numbers["alternate_wins_below"] == pytest.approx(turn)
    turn = bisect(lambda size: tree_seconds(ranks, size, *link) > ring_seconds(ranks, size, *link), 0, 1e12)
    assert numbers["tree_wins_below"] == pytest.approx(turn)
    assert numbers["ring"] / numbers["both_directions"] == pytest.approx(2)
    assert numbers["least_bytes"] / numbers["ring"] == pytest.approx(1e11)  # bus bandwidth


def play_buckets(size: float, bandwidth: float, call: float, count: int, backward: float) -> float:
    """Seconds between the end of backward and the end of the last reduction, event by event."""
    link_free = 0.0
    for bucket in range(1, count + 1):
        link_free = max(link_free, bucket * backward / count) + call + size / count / bandwidth
    return link_free - backward


@pytest.mark.parametrize(("ratio", "call"), [(0.2, 2e-6), (1.0, 1e-4), (1.5, 2e-6), (4.0, 1e-4)])
def test_bucket_equation_and_optimum(ratio, call):
    size, bandwidth = 1e8, 3e11
    backward = ratio * size / bandwidth
    times = {n: play_buckets(size, bandwidth, call, n, backward) for n in range(1, 600)}
    for n in (1, 2, 7, 30, 599):
        assert overhead(size, bandwidth, call, n, backward) == pytest.approx(times[n])
        seconds = [call + size / n / bandwidth] * n
        assert exposed_seconds([size / n] * n, seconds, backward, True) == pytest.approx(times[n])
    assert times[best_count(size, bandwidth, call, backward)] == pytest.approx(min(times.values()), rel=1e-9)
    numbers = question("buckets", s=size, w=bandwidth, o=call, n=30, r=ratio).numbers
    assert numbers["general"] == pytest.approx(times[30])
    assert numbers["general_least"] == pytest.approx(min(times.values()))


def batch_times(b: float, D: int, F: int, X: float, Y: float, W: float, C: float, Mx: int, My: int) -> dict:
    """Seconds of one block's forward pass with b tokens a device on an X by Y mesh: compute, FSDP's gathers, TP's, all
    of numbers of two bytes."""
    tokens = b * X * Y
    return {
        "compute": 4 * tokens * D * F / (X * Y * C),
        "fsdp": 2 * 2 * D * F / (Y * W * Mx),
        "tp": 2 * 2 * tokens * D / (X * W * My),
    }


def test_xxl_readings_by_search():
    """The fewest tokens, by bisection over the times of the three kinds of work and a search over meshes."""
    numbers, chip = question("xxl-batch").numbers, {"W": 18e10, "C": 4.6e14, "Mx": 2, "My": 1}
    shape, join = {"D": 16_384, "F": 53_248}, {"overlapped": max, "apart": lambda a, b: a + b}

    def fewest(x: float, y: float, how: str) -> float:
        def hidden(tokens: float) -> bool:
            times = batch_times(tokens, **shape, X=x, Y=y, **chip)
            return join[how](times["fsdp"], times["tp"]) <= times["compute"]

        return bisect(hidden, 0, 1e6) if hidden(1e6) else inf

    for how in join:
        assert numbers[f"given_{how}"] == pytest.approx(fewest(16, 4, how))
        least = extreme(lambda power, how=how: fewest(64**power, 64 ** (1 - power), how), 0, 1, min)
        assert numbers[f"free_{how}"] == pytest.approx(least, rel=1e-4)
    assert fewest(numbers["best_x"], 64 / numbers["best_x"], "apart") == pytest.approx(numbers["free_apart"])
    times = batch_times(numbers["exact"], **shape, X=16, Y=4, **chip)
    assert times["fsdp"] * 15 / 16 == pytest.approx(times["compute"])
    assert numbers["batch"] == numbers["given_overlapped"] * 16 * 4
    assert "given_apart" not in question("xxl-batch", Y=32).numbers  # TP alone takes longer than compute
    assert question("xxl-batch", W=36e10).numbers["free_apart"] == pytest.approx(numbers["eight_bit"])


def test_xxl_state_fits_at_last():
    numbers = question("xxl-fsdp", T=2000).numbers
    state, half_kept = 16 * 2 * 126 * 16_384 * 53_248, 2000 * 126 * (16_384 + 53_248)
    for key, top, whole in (
        ("devices_state", state, 0),
        ("devices_half", state + half_kept, 0),
        ("devices_other_half_whole", state + half_kept, half_kept),
    ):
        assert numbers[key] == next(n for n in range(1, 1000) if top / n + whole < 95e9)
    assert "devices_other_half_whole" not in question("xxl-fsdp", T=20_000).numbers
    assert question("xxl-fsdp", T=int(numbers["tokens_most"])).numbers["half"] == pytest.approx(95e9, rel=1e-3)


def test_inequalities_turn_where_they_say():
    """The last whole number of devices that hides communication is the one below the bound."""
    given = {"B": 5100, "D": 640, "F": 3100, "C": 1e14, "W": 1e11}
    for name, way, key in (
        ("fsdp", "forward", "largest"), ("fsdp", "backward", "largest"), ("data-parallel", "backward", "largest"),
        ("tensor-parallel", "forward", "largest_forward"), ("tensor-parallel", "backward", "largest_backward"),
    ):  # fmt: skip
        largest = question(name, **given).numbers[key]
        assert 3 < largest < 60
        assert largest != int(largest)
        for count in range(1, 60):
            numbers = question(name, **given, N=count).numbers
            assert (numbers[f"{way}_communication"] <= numbers[f"{way}_compute"]) == (count <= largest)
    sharded = question("fsdp", **given).numbers
    seconds = sharded["forward_communication"] + sharded["backward_communication"]
    assert sharded["step_bytes"] == pytest.approx(seconds * given["W"])


def test_the_layers_own_counts():
    """FLOPs of the whole feed-forward and bytes of its weights, from the model of models."""
    config = ModelConfig(64, 256, 640, 3000, 1, 4, feed_forward="swiglu", positions="rotary")
    flops = forward_flops(config, 20, 250)["feed-forward"]
    for name, ranks in (("fsdp", 8), ("tensor-parallel", 4), ("fsdp-tensor-parallel", 32)):
        numbers = question(name, B=5000, D=640, F=3000).numbers
        assert numbers["forward_flops"] * ranks == pytest.approx(flops)
    assert question("data-parallel", B=5000, D=640, F=3000, N=8).numbers["backward_flops"] == pytest.approx(flops / 4)
    weights = 2 * count_parameters(config)["feed-forward"]
    assert question("data-parallel", D=640, F=3000).numbers["gradient_bytes"] == weights


@pytest.mark.parametrize("given", [{}, {"B": 4096, "F": 1000}, {"B": 900}])
def test_the_largest_grid_by_search(given):
    numbers = question("fsdp-tensor-parallel", **given).numbers
    a, b = numbers["a"], numbers["b"]
    usual = {"B": 32_768, "D": 2560, "F": 10_240} | given

    def grid_times(x: float, y: float) -> dict[str, float]:
        B, D, F = usual.values()
        gather, reduce = 6 * D * F / y * (x - 1) / (x * EGRESS), 4 * B / x * D * (y - 1) / (y * EGRESS)
        return {"compute": 6 * B * D * F / (x * y * SPEED), "fsdp": gather, "tp": reduce}

    def hidden(x: float, y: float, join) -> bool:
        times = grid_times(x, y)
        return join((times["fsdp"], times["tp"])) <= times["compute"] * (1 + 1e-9)

    def largest(join) -> float:
        return extreme(lambda x: x * bisect(lambda y: not hidden(x, y, join), 1.0, 2 + b), 1.0, 1 + a)

    assert numbers["largest_overlapped"] == pytest.approx(largest(max), rel=1e-4)
    assert numbers["largest_apart"] == pytest.approx(largest(sum), rel=1e-4)
    if min(numbers["best_x"], numbers["best_y"]) >= 1:
        assert hidden(numbers["best_x"], numbers["best_y"], sum)
        assert numbers["best_x"] * numbers["best_y"] == pytest.approx(numbers["largest_apart"])
    assert numbers["together"] == max(numbers["fsdp"], numbers["tp"])
    times = grid_times(8, 4)
    assert [numbers[key] for key in times] == pytest.approx(list(times.values()))


def test_tensor_parallel_backward_as_derived():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 6, 4, dtype=torch.float64)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 9), (4, 9), (9, 4))]
    leaves = [each.clone().requires_grad_() for each in (x, *weights)]
    ((torch.tanh(leaves[0] @ leaves[1]) * (leaves[0] @ leaves[2])) @ leaves[3]).backward(dy)
    parts, dx = [], torch.zeros_like(x)
    for one, two, three in zip(
        *(each.chunk(3, dim) for each, dim in zip(weights, (1, 1, 0), strict=True)), strict=True
    ):
        x_one, x_two = x @ one, x @ two
        dz, z = dy @ three.T, torch.tanh(x_one) * x_two
        dx_two, dx_one = dz * torch.tanh(x_one), dz * (1 - torch.tanh(x_one) ** 2) * x_two
        parts.append((x.T @ dx_one, x.T @ dx_two, z.T @ dy))
        dx += dx_one @ one.T + dx_two @ two.T
    split = [torch.cat(grads, dim) for grads, dim in zip(zip(*parts, strict=True), (1, 1, 0), strict=True)]
    for ours, leaf in zip([dx, *split], leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad)


def test_tensors_are_the_models():
    for year in (2024, 2025, 2026):
        config = replace(model_preset("small", year), num_layers=3)
        assert tensors_of(config) == len(list(TransformerLM(config, "meta").parameters()))


@pytest.mark.parametrize(("size", "seq", "attention"), [("xl", 2048, "naive"), ("small", 64, "sdpa")])
def test_segments(size, seq, attention):
    config = replace(model_preset(size, 2026), context_length=seq, attention=attention, recompute="segments")
    plain = replace(config, recompute="none")
    one, two = (observe_passes(replace(plain, num_layers=layers), 4, seq).kept for layers in (1, 2))
    stream, block, blocks = 4 * 4 * seq * config.d_model, two - one, config.num_layers

    def most(recompute: str, k: int = 1) -> int:
        found = strategy(config, 4, seq, recompute, k)
        return found.kept + found.recomputed - (one - block)  # without the token ids and the head

    peaks = {k: most("segments", k) for k in (1, 2, 3, 4, 6) if blocks % k == 0}
    assert peaks == {k: segments_peak(blocks, k, stream, block) for k in peaks}
    if attention == "naive":
        numbers = question("checkpointing", size=size, S=seq, k=4).numbers
        assert (numbers["segments"], numbers["best"]) == (peaks[4], min(peaks, key=lambda k: peaks[k]))
        assert most("nested") == numbers["nested"]


def test_attention_keeps_what_is_said():
    numbers = question("attention-memory", B=2, S=48, d=16).numbers

    def naive(q, k, v):
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v

    for function, name in ((naive, "kept_naive"), (TiledAttentionFunction.apply, "kept_flash")):
        with saved_storages() as saved:
            result = function(*(torch.randn(2, 48, 16, requires_grad=True) for _ in range(3)))
        assert sum(storage.nbytes() for storage in saved.values()) == numbers[name]
        assert result.requires_grad
    assert numbers["forward_naive"] == numbers["kept_naive"] + numbers["scores"]
    assert numbers["backward_naive"] == 5 * numbers["inputs"] / 3 + 3 * numbers["scores"]
    assert 3 * numbers["scores"] * (numbers["longest"] / 48) ** 2 == pytest.approx(80e9)


def test_sums_are_torchs():
    numbers = question("accumulation", x=0.03, n=700).numbers
    for key, total, term in (
        ("single_single", torch.float32, torch.float32),
        ("half_half", torch.float16, torch.float16),
        ("single_half", torch.float32, torch.float16),
    ):
        sum_of, addend = torch.tensor(0.0, dtype=total), torch.tensor(0.03, dtype=term)
        for _ in range(700):
            sum_of += addend
        assert numbers[key] == sum_of.item()
    small = question("accumulation", x=1e-7).texts
    assert (small["exact"], small["half_half"]) == ("0.0001", "0.0001192")
    assert accumulate(0.01, 100_000, np.float16) == question("accumulation").numbers["stops_at"]
    assert np.float16(numbers["half_half"] + numbers["spacing"]) == numbers["half_half"] + numbers["spacing"]
    assert np.float16(numbers["half_half"] + 0.99 * numbers["half_spacing"]) == numbers["half_half"]


def test_leaderboard_by_the_models_flops():
    config = ModelConfig(1000, 64, 128, 320, 5, 4, feed_forward="swiglu", positions="rotary", tied_head=False)
    parts = forward_flops(config, 2, 64)
    numbers = question("leaderboard-step", L=5, D=128, F=320, V=1000, S=64, B=2).numbers
    assert numbers["products"] == 3 * (parts["projections"] + parts["feed-forward"] + parts["head"])
    assert numbers["attention"] == 7 / 2 * parts["scores"] / 2
    assert numbers["parameters"] == sum(count_parameters(config).values())
    flash = question("leaderboard-flash", h=4, S=64, d=32).numbers
    assert flash["forward"] == parts["scores"] / 2 / 5 / 2


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("ring", {}, "no question 'ring'; choose from rings, buckets"),
        ("rings", {"M": 3}, "rings has no number 'M'; it has N=8, S="),
        ("rings", {"N": 2.5}, "N is counted, so it must be whole, not 2.5"),
        ("rings", {"S": "big"}, "S must be a number above 0 and up to 1e30, not big"),
        ("rings", {"S": "1GB/s"}, "S must be a number"),
        ("rings", {"N": 1}, "N must be at least 2"),
        ("rings", {"N": 8, "S": 4}, "4 bytes cannot be cut into N = 8 pieces"),
        ("buckets", {"n": 10, "s": 9}, "n = 10 must be at most s = 9"),
        ("data-parallel", {"N": 8, "B": 7}, "N must be at most B"),
        ("fsdp", {"W": 1e15}, "C must be at least 2 W"),
        ("tensor-parallel", {"N": 8, "F": 7}, "N must be at most F"),
        ("fsdp-tensor-parallel", {"Y": 8, "F": 7}, "Y must be at most F"),
        ("xxl-batch", {"X": 1}, "X = 1 and Y = 4 must be at least 2"),
        ("zero1-traffic", {"N": 1}, "N must be at least 2"),
        ("fsdp-memory", {"N": 1e15}, "N must not be more"),
        ("fsdp-memory", {"k": 1000}, "matrices"),
        ("attention-memory", {"e": 3}, "1, 2, 4 or 8 bytes, not 3"),
        ("checkpointing", {"k": 33}, "k must be at most 32"),
        ("leaderboard-flash", {"t": 1e-3}, "t must be at least 1.945 ms"),
        ("pass-memory", {"size": "huge"}, "no size 'huge' in 2024"),
        ("accumulation", {"x": 1e-9}, "x = 1e-9 must be from 6e-8"),
        ("accumulation", {"x": 60_000, "n": 3}, "3 times 60000 pass 65504"),
        ("accumulation", {"n": 2_000_000}, "n must be at most 1000000, not 2e6"),
        ("xxl-batch", {"W": 1e-300}, "W must be at least 1e-30, not 1e-300"),
    ],
)
def test_what_makes_no_sense_is_refused(name, numbers, words):
    with pytest.raises(UserError) as error:
        question(name, **numbers)
    assert words in str(error.value)


def test_numbers_of_a_command_line():
    assert parse_numbers(["N=16", "S=2e9", "size=xl"]) == {"N": 16.0, "S": 2e9, "size": "xl"}
    assert question("rings", **parse_numbers(["N=16"])).numbers["ratio"] == 8
    for wrong in ("N", "N=", "=3"):
        with pytest.raises(UserError, match="is not NAME=VALUE, such as N=16"):
            parse_numbers([wrong])
    with pytest.raises(UserError, match="N is given twice, as 16 and as 8"):
        parse_numbers(["N=16", "S=1e9", "N=8"])
    for text, size in (("1GB", 1e9), ("1GiB", 2**30), ("2.5 kB", 2500), ("1e3B", 1000), ("3TiB", 3 * 2**40)):
        assert question("rings", S=text).numbers["piece"] == size / 8
    assert question("rings", W="225GB/s").numbers["ring"] == 2 * question("rings", W="450GB").numbers["ring"]


def test_hidden_is_said_of_what_is_hidden():
    """Of every count of devices, what the bold line says against the seconds of the steps."""

    def both(name: str, **given: float) -> tuple[dict[str, float], str]:
        return (found := question(name, **given)).numbers, found.result

    for count in (1, 7, 8, 14, 15, 16, 64, 512):
        for name in ("data-parallel", "fsdp"):
            numbers, said = both(name, N=count)
            late = numbers["backward_communication"] > numbers["backward_compute"]
            assert ("not hidden" in said) == late
            assert f"up to {int(numbers['largest'])} devices" in said
        numbers, said = both("tensor-parallel", N=count)
        for way, words in zip(("forward", "backward"), said.split(" forward, ")[1].split(" backward, "), strict=True):
            late = numbers[f"{way}_communication"] > numbers[f"{way}_compute"]
            assert words.startswith("not hidden") == late
    for x, y in ((8, 4), (16, 4), (17, 4), (8, 7), (8, 8), (12, 4), (1, 1)):
        numbers, said = both("fsdp-tensor-parallel", X=x, Y=y)
        overlapped, apart = said.split("overlap, ")[1].split("if not, ")
        assert overlapped.startswith("not hidden") == (numbers["together"] > numbers["compute"])
        assert apart.startswith("not hidden") == (numbers["fsdp"] + numbers["tp"] > numbers["compute"])


@pytest.mark.parametrize("name", ANSWERS)
def test_ends_of_the_ranges(name):
    """One of everything, and a lot of it, has an answer or a clear refusal."""
    hints = ANSWERS[name].__annotations__
    for value in (1, 1e25) if name != "pass-memory" else (1e25,):  # which runs the model
        for key in (each for each in hints if hints[each] is not str and each not in ("return", "year", "n")):
            with suppress(UserError):
                assert "nan" not in question(name, **{key: value}).markdown()


if __name__ == "__main__":
    PAGE.write_text(with_answers(PAGE.read_text()))
