"""Tests of `python -m tests.readme`, which runs the README's commands, and of claims on the project's pages."""

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.tables import BEGIN, END
from cs336_systems.comm import fake_ranks, record
from cs336_systems.ddp import FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.errors import UserError
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.traffic import sent
from cs336_systems.train.observation import observe_traffic
from cs336_systems.train.recipe import Recipe
from cs336_systems.zero import zero
from tests.readme import EXEMPT, HUNG, Command, in_order, processes, read_page, run
from tests.support.command_lines import problem_of

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SAMPLE = f"""
Type `make help`, or `python`; `y = python x` is no command, and neither is `--help`.

```sh
make demo   # one
  # a remark
. .venv/bin/activate
```

| to time | type |
| --- | --- |
| it | `python -m a.b --c "d e"`, or `torchrun x.py`; `make demo` |

```text
make love
```

{BEGIN}

`make war`

{END}

```python
import this
```

```python yours.py
import that
```
"""


def test_commands_are_found_in_order_and_once():
    page = read_page(SAMPLE)
    start = SAMPLE.splitlines().index("import this") + 1
    assert [command.text for command in page.commands] == [
        "make help",
        "make demo",
        ". .venv/bin/activate",
        'python -m a.b --c "d e"',
        "torchrun x.py",
        f"python block_of_line_{start}.py",
    ]
    assert [SAMPLE.splitlines()[line - 1].split()[0] for _, line in page.commands[:4]] == ["Type", "make", ".", "|"]
    assert page.files == {f"block_of_line_{start}.py": "import this\n", "yours.py": "import that\n"}


def test_a_block_that_might_hide_a_command_is_refused_and_one_folder_is_used_in_turn():
    for block, message in (
        ("x\n```\nmake demo\n```", "line 2: a block of no language"),
        ("```console\nmake demo\n```", "line 1: a block of console"),
        ("```sh\nmake demo\n", "line 1: this block does not end"),
    ):
        with pytest.raises(UserError, match=message):
            read_page(block)
    first, second, third, fourth = (Command(text, 1) for text in ("a runs/x", "b --in runs/x", "c runs/xy", "d"))
    assert in_order([first, second, third, fourth]) == [(first, []), (third, []), (fourth, []), (second, [first])]


def test_every_command_of_the_readme_could_run():
    page = read_page(README)
    texts = [command.text for command in page.commands]
    assert {"make demo", "make test", "make writeup"} <= set(texts)
    assert set(EXEMPT) <= set(texts)
    for name in page.files:
        assert any(name in text.split() for text in texts), f"{name} is written and not run"
    for text in texts:
        if text != ". .venv/bin/activate" and text.split()[-1] not in page.files:
            assert (wrong := problem_of(text)) is None, f"{text}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_pages_could_run_and_every_link_leads_somewhere(page):
    # A span may be broken over two lines of prose.
    starts = r"(?:python -m |torchrun --|torchrun benchmarks|make [a-z]|sbatch )"
    text = re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(rf"`({starts}[^`]+)`", text)]
    lines = [line for line in text.splitlines() if re.match(starts, line)]
    for command in dict.fromkeys(spans + lines):
        if not command.endswith(("yours.py", "again.py", "--standalone")):
            assert (wrong := problem_of(command)) is None, f"{command}: {wrong}"
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@cache
def anchors(page: Path) -> set[str]:
    """The names that headings have as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


SMALL_TRANSFERS = ("used parameters", "expert counts", "gradient norm", "norms")


def sent_by(wrap: Callable[[nn.Module], Any], ranks: int) -> float:
    """Bytes that a rank sends in a step of a wrapper of four layers, alone with one optimizer, over those of P."""
    with fake_ranks(0, ranks):
        module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        whole = sum(parameter.nbytes for parameter in module.parameters())
        wrapped = wrap(module)
        model, optimizer = wrapped if isinstance(wrapped, tuple) else (wrapped, None)
        with record() as events:
            model(torch.ones(1, 64)).sum().backward()
            model.finish_gradient_synchronization()
            if optimizer is not None:
                optimizer.step()
    return sum(event.bytes_sent for event in events if event.label not in SMALL_TRANSFERS) / whole


def sent_in(config: ModelConfig, layout: Layout, axis: str, rank: int = 0) -> float:
    """Bytes that a rank sends along an axis of the mesh in a step of the trainer's parts."""
    found = observe_traffic(Recipe.of(context=32), config, layout, rank).items()
    wanted = ((each, n) for each, n in found if each.axis == axis and each.what not in SMALL_TRANSFERS)
    return sum(n * each.nbytes * sent(each.verb, each.ranks) for each, n in wanted)


def factors() -> dict[str, float]:
    """Bytes that a rank sends by strategy, over (N-1)/N and P, A or k A, on four ranks."""
    ranks, config, seq = 4, model_preset("tiny"), 32
    share = (ranks - 1) / ranks
    ladder = {"`NaiveDDP`": NaiveDDP, "`FlatDDP`": FlatDDP, "`OverlappedDDP`": OverlappedDDP}
    found = {name: sent_by(wrap, ranks) / share for name, wrap in ladder.items()}
    for stage, name in enumerate(("`BucketedDDP`, ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3 (`FSDP`)")):
        found[name] = sent_by(partial(zero, optimizer_cls=torch.optim.AdamW, stage=stage), ranks) / share
    stream = 2 * seq * config.d_model * 4

    def passes(layout: Layout, axis: str, **changes: int) -> float:
        deep, shallow = (sent_in(config.override(num_layers=n, **changes), layout, axis) for n in (2, 1))
        return (deep - shallow) / stream / share

    for name, sequence in (("tensor parallelism", False), ("with sequence parallelism", True)):
        found[name] = passes(Layout(tp=4, micro_batch=2, global_batch=2, sequence=sequence), "tp")
    gathered = Layout(cp=4, cp_type="gather", micro_batch=2, global_batch=2)
    found["context parallelism"] = passes(gathered, "cp")
    experts = passes(Layout(ep=4, micro_batch=2, global_batch=8), "ep", num_experts=8)
    found["expert parallelism"] = experts / config.override(num_experts=8).mixture.top_k
    pipe = sent_in(config, Layout(pp=4, micro_batch=2, global_batch=2), "pp", rank=1)
    return found | {"pipeline parallelism": pipe / stream}


def test_the_table_of_strategies_has_the_factors_that_are_counted():
    rows = re.findall(r"^\| (.+?) \| .+? \| (\d+) (?:P|A|k A)\b.* \| `(.+?)` \| `(.+?)` \|$", README, re.MULTILINE)
    assert {name: float(factor) for name, factor, _, _ in rows} == pytest.approx(factors(), rel=1e-12)
    for name, _, *files in rows:
        assert all((ROOT / file).is_file() for file in files), name


def test_the_trouble_that_is_quoted_is_what_the_code_says():
    page = re.sub(r"\s+", " ", (ROOT / "docs/troubleshooting.md").read_text())
    for file, words in {
        "cs336_systems/comm/store.py": "choose another with MASTER_PORT",
        "cs336_systems/comm/launch.py": "the other ranks were stopped",
        "cs336_systems/host/machine.py": "but torch finds no CUDA device here; use --device cpu",
        "cs336_systems/comm/startup.py": "moves tensors between GPUs, and there is none here; use --backend gloo",
        "cs336_systems/train/__main__.py": "out of memory although it was counted to fit; ",
        "kernels/launch.py": "kernels.reference computes instead, in plain torch",
        "cs336_systems/cost/capacity.py": "are usable; ",
        "benchmarks/harness.py": "noisy: standard deviation ",
        "Makefile": "error: Python 3.11 to 3.13 is needed, ",
    }.items():
        assert words in page, words
        assert words in (ROOT / file).read_text(), f"{file} says something else now"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was left running")
def test_what_becomes_of_a_command_is_said_and_nothing_runs_on(tmp_path):
    (tmp_path / "project").mkdir()
    for text, code in (("true", 0), ("echo said; false", 1), ("sleep 60", HUNG), ("sleep 60 & true", "left 1 running")):
        outcome = run(Command(text, 1), tmp_path, {"PATH": "/usr/bin:/bin"}, 0.3 if code == HUNG else 60)
        assert (outcome.code, outcome.output) == (code, "said\n" if "said" in text else "")
        assert not processes(str(tmp_path))
