"""Pipeline parallelism: the model's blocks in stages, one a rank, and microbatches that pass through them.

`Stage` is what a rank keeps of a model; `Pipeline` walks its stage's list of a schedule (see `schedule.py`): receive,
compute, send. Activations go from stage to stage, gradients back, as (rows seq d_model), each under a label that says
which microbatch it is. Sends do not block, and a receive is posted one action ahead, so that it arrives while another
microbatch computes. (Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cs336_systems.comm import Mesh, Work, receive, send
from cs336_systems.data import Batch
from cs336_systems.dropout import DropoutKey
from cs336_systems.heads import BertOutput, Losses
from cs336_systems.model import TransformerLM
from cs336_systems.schedule import Action, blocks_of, receives_from, schedule, sends_to

Timer = Callable[[str], AbstractContextManager[Any]]


class Elsewhere(nn.Module):
    """In the place of what another stage has, so that names and numbers stay those of the whole model."""

    def forward(self, *inputs: Any) -> NoReturn:
        raise AssertionError("this layer is on another stage of the pipeline")


class Stage(nn.Module):
    """One stage's part of a model: its blocks, on the first stage the embedding, on the last what follows the blocks.

    With a tied head the last stage keeps the embedding's weight as well; the gradients of the two are to be added.
    `module(batch, hidden, chunk, key)` runs one chunk of its blocks: hidden (rows seq d_model) is what the chunk before
    gave, None for the first one. The last one returns `Losses`, or the logits of a batch without targets. The model is
    changed in place.

    Raises UserError if the blocks do not divide over all chunks of all stages.
    """

    def __init__(self, model: TransformerLM, stage: int, stages: int, chunks: int = 1) -> None:
        super().__init__()
        config = model.config
        self.model, self.stage, self.stages, self.chunks = model, stage, stages, chunks
        self.spans = [blocks_of(stage, chunk, stages, chunks, config.num_layers) for chunk in range(chunks)]
        self.has_first, self.has_last = stage == 0, stage == stages - 1
        mine = {block for span in self.spans for block in span}
        for number in set(range(config.num_layers)) - mine:
            model.blocks[number] = Elsewhere()
        if not self.has_first:
            tokens = model.embedding.tokens
            model.set_submodule("embedding", Elsewhere())
            if self.has_last and config.tied_head:
                model.embedding.tokens = tokens
        if not self.has_last:
            model.final_norm = Elsewhere()
            model.set_submodule("token_loss", Elsewhere())
            model.bert_heads = model.head = model.tied_head = None

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, chunk: int = 0, key: DropoutKey | None = None
    ) -> Tensor | BertOutput | Losses:
        model = self.model
        if hidden is None:
            hidden = model.embed(batch.tokens, batch.token_types, key)
        shared = model.shared_inputs(hidden, batch.tokens, batch.padding_mask)
        hidden = model.run_blocks(hidden, *shared, self.spans[chunk], key)
        if not (self.has_last and chunk == self.chunks - 1):
            return hidden
        return model.finish(hidden) if batch.targets is None else model.losses(hidden, batch)


class Pipeline:
    """Runs microbatches through the stages of a mesh's pp axis; with one stage it accumulates gradients.

    `module` is the stage or a wrapper of it. `sequence` is how many parts the sequence is split into between blocks.
    `timer` times each part under its name in Megatron-LM. Raises UserError for a schedule that cannot be.
    """

    def __init__(
        self,
        stage: Stage,
        module: nn.Module,
        mesh: Mesh,
        name: str = "1f1b",
        sequence: int = 1,
        timer: Timer = lambda name: nullcontext(),
    ) -> None:
        self.stage, self.module, self.mesh = stage, module, mesh
        self.name, self.sequence, self.timer = name, sequence, timer

    def run(
        self,
        microbatches: Sequence[Batch],
        loss: Callable[[Losses], Tensor] | None,
        keys: Sequence[DropoutKey] | None = None,
        accumulate: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Losses]:
        """Forward and backward of all microbatches; on the last stage returns each one's losses, in order, detached.

        `loss` makes of them the scalar that backward begins with; None runs forward only, without gradients.
        `accumulate` is around every backward but the last, after which gradients may be reduced.
        """
        lists = schedule(self.name, self.stage.stages, len(microbatches), self.stage.chunks)
        run = _Run(self, microbatches, loss, keys, lists)
        actions = [each for each in lists[self.stage.stage] if loss is not None or each.kind == "forward"]
        # With several chunks each has a last backward of its own, and they are not the last actions.
        final = actions[-1] if self.stage.chunks == 1 else None
        with torch.set_grad_enabled(loss is not None):
            for number, action in enumerate(actions):
                before = actions[number - 1].kind if number else ""
                after = actions[number + 1] if number + 1 < len(actions) else None
                received = run.take(action, before, after)
                if action.kind == "forward":
                    result = run.forward(action, received)
                else:
                    with nullcontext() if action is final else accumulate():
                        result = run.backward(action, received)
                run.give(action, result, after)
        run.finish()
        return run.losses


class _Run:
    """One pass of microbatches through this stage: what is alive, and what is under way."""

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: Sequence[Batch],
        loss: Callable[[Losses], Tensor] | None,
        keys: Sequence[DropoutKey] | None,
        lists: Sequence[Sequence[Action]],
    ) -> None:
        self.stage, self.module, self.mesh = pipeline.stage, pipeline.module, pipeline.mesh
        self.timer, self.lists = pipeline.timer, lists
        self.microbatches, self.loss, self.keys = microbatches, loss, keys
        config = self.stage.model.config
        rows, seq = microbatches[0].tokens.shape
        self.shape = rows, seq // pipeline.sequence, config.d_model
        self.like = next(self.stage.parameters())
        self.live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # inputs and outputs that await a backward
        self.posted: dict[Action, tuple[Work, Tensor]] = {}
        self.sent: list[tuple[int, int, Work]] = []  # to which stage, for which number in its list
        self.losses: list[Losses] = []

    def take(self, action: Action, before: str, after: Action | None) -> Tensor | None:
        """What another stage sends for the action, None for the batch and the loss; the next receive is posted, too."""
        self._post(action)
        if after is not None:
            self._post(after)
        if action not in self.posted:
            return None
        work, tensor = self.posted.pop(action)
        other = "backward" if action.kind == "forward" else "forward"
        with self.timer(f"{other}-send-{action.kind}-recv" if before == other else f"{action.kind}-recv"):
            work.wait()
        self._let_go(action)
        return tensor

    def _let_go(self, action: Action) -> None:
        """Drop what was sent and has arrived: a stage that sends has done all that stands before it in its list."""
        source = receives_from(self.stage.stage, action, self.stage.stages, self.stage.chunks)
        assert source is not None
        stage, done = source[0], self.lists[source[0]].index(source[1])
        for to, number, work in self.sent:
            if to == stage and number < done:
                work.wait()
        self.sent = [each for each in self.sent if each[0] != stage or each[1] >= done]

    def _post(self, action: Action) -> None:
        source = receives_from(self.stage.stage, action, self.stage.stages, self.stage.chunks)
        if source is None or action in self.posted:
            return
        tensor = torch.empty(self.shape, dtype=self.like.dtype, device=self.like.device)
        group = self.mesh.channel(action.kind, source[0], self.stage.stage)
        self.posted[action] = receive(tensor, source[0], group, str(action)), tensor

    def give(self, action: Action, result: Tensor | None, after: Action | None) -> None:
        """Send the action's result to the stage that waits for it. The tensor is kept until it has left."""
        target = sends_to(self.stage.stage, action, self.stage.stages, self.stage.chunks)
        if target is None:
            return
        assert result is not None
        result = result.detach().contiguous()
        other = "backward" if action.kind == "forward" else "forward"
        turns = after is not None and after.kind == other
        with self.timer(f"{action.kind}-send-{other}-recv" if turns else f"{action.kind}-send"):
            group = self.mesh.channel(action.kind, self.stage.stage, target[0])
            number = self.lists[target[0]].index(target[1])
            self.sent.append((target[0], number, send(result, target[0], group, str(target[1]))))

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        """The chunk's output, or None and its losses noted where it is the last."""
        microbatch, chunk = action.microbatch, action.chunk
        if hidden is not None and self.loss is not None:
            hidden.requires_grad_()
        key = self.keys[microbatch] if self.keys else None
        with self.timer("forward-compute"):
            output = self.module(self.microbatches[microbatch], hidden, chunk, key)
            if isinstance(output, Losses):
                pair = None if output.pair is None else output.pair.detach()
                self.losses.append(Losses(output.tokens.detach(), pair))
                output, result = output.tokens if self.loss is None else self.loss(output), None
            else:
                result = output
        if self.loss is not None:
            self.live[microbatch, chunk] = hidden, output
        return result

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the chunk's input, None for the first one."""
        hidden, output = self.live.pop((action.microbatch, action.chunk))
        with self.timer("backward-compute"):
            torch.autograd.backward(output, gradient)
        return None if hidden is None else hidden.grad

    def finish(self) -> None:
        """Wait until everything has left."""
        for _, _, work in self.sent:
            work.wait()
