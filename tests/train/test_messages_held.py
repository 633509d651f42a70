"""Messages are kept until they have arrived, and no longer: 1F1B's memory must not grow with microbatches."""

from dataclasses import replace

import pytest

from cs336_systems import pipeline
from cs336_systems.comm import Mesh
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.pipeline import Pipeline, Stage
from tests.support import ranks
from tests.support.parallel_models import CONFIGS, combine, make_batch


def held_case(group, name: str, chunks: int) -> list[int]:
    """The most messages that this stage held in a pass of 4 and of 12 microbatches."""
    config, most = replace(next(iter(CONFIGS.values())), num_layers=4), []
    mesh = Mesh(pp=group.size())
    stage = Stage(TransformerLM(config), group.rank(), group.size(), chunks, name == "zbv")

    class Watched(pipeline._Execution):
        def send(self, *arguments) -> None:
            super().send(*arguments)
            most[-1] = max(most[-1], len(self.sent))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(pipeline, "_Execution", Watched)
        for count in (4, 12):
            most.append(0)
            Pipeline(stage, stage, mesh, name).run(make_batch(config, count).split(1), combine)
    return most


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_more_microbatches_hold_no_more_messages(name, chunks):
    for stage, (few, many) in enumerate(ranks.run(held_case, 2, name=name, chunks=chunks)):
        assert 0 < many <= few + 1, f"stage {stage}"
