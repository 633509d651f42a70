"""Pipeline parallelism: the model's blocks in stages, one per rank, and microbatches that pass through them.

`Stage` is a rank's part of a model. `Pipeline` walks its stage's list of a schedule (`schedule/lists.py`): receive,
compute, send. Activations go to the next stage and gradients to the one before, (rows seq d_model) each, under a label
that names the microbatch; where a chunk feeds another of the same stage, they stay. Sends do not block, and a receive
is posted one action ahead, so that it arrives while another microbatch computes. (Huang et al., GPipe,
arXiv:1811.06965; Narayanan et al., arXiv:2104.04473.)"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cs336_systems.comm import Mesh, Work, receive, send
from cs336_systems.data.corpus import Batch
from cs336_systems.errors import UserError
from cs336_systems.model.heads import BertOutput, Losses
from cs336_systems.model.split_backward import SplitBackward
from cs336_systems.model.transformer import TransformerLM, require_transformer
from cs336_systems.schedule import Action, schedule
from cs336_systems.schedule.lists import SPLIT, TURNING, at_place, blocks_of, receives_from, sends_to

Timer = Callable[[str], AbstractContextManager[Any]]


class OtherStage(nn.Module):
    """Placeholder for a layer of another stage: parameters keep the names and numbers of the whole model."""

    def forward(self, *inputs: Any) -> NoReturn:
        raise AssertionError("this layer is on another stage of the pipeline")


class Stage(nn.Module):
    """One stage of a model, which is changed in place: some blocks, on the first stage the embedding, on the last the
    head and the loss. With a tied head the last stage has the embedding's weight, too; the gradients of the two copies
    are to be added. With `turn` chunks lie in a V, and stage 0 is the first and the last. `stage(batch, hidden, chunk,
    key)` runs a chunk of its blocks. hidden (rows seq d_model) is the output of the chunk before, None for the first;
    the last chunk returns `Losses`, or logits for a batch without targets. Raises UserError if blocks do not divide."""

    def __init__(self, model: TransformerLM, stage: int, stages: int, chunks: int = 1, turn: bool = False) -> None:
        super().__init__()
        config = require_transformer(model).config
        self.model, self.stage, self.stages, self.chunks, self.turn = model, stage, stages, chunks, turn
        self.spans = [blocks_of(stage, chunk, stages, chunks, config.num_layers, turn) for chunk in range(chunks)]
        self.has_first, self.has_last = stage == 0, stage == at_place(stages * chunks - 1, stages, turn)[0]
        mine = {block for span in self.spans for block in span}
        for number in set(range(config.num_layers)) - mine:
            model.blocks[number] = OtherStage()
        if not self.has_first:
            tokens = model.embedding.tokens
            model.set_submodule("embedding", OtherStage())
            if self.has_last and config.tied_head:
                model.embedding.tokens = tokens
        if not self.has_last:
            model.final_norm = OtherStage()
            model.set_submodule("token_loss", OtherStage())
            model.bert_heads = model.head = model.tied_head = None

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, chunk: int = 0, key: Tensor | None = None
    ) -> Tensor | BertOutput | Losses:
        hidden = self.model.run_blocks(batch, hidden, key, self.spans[chunk])
        if not (self.has_last and chunk == self.chunks - 1):
            return hidden
        return self.model.finish(hidden) if batch.targets is None else self.model.losses(hidden, batch)


@dataclass
class Pipeline:
    """Runs microbatches through the stages of a mesh's pp axis; one stage alone accumulates gradients. `module` is the
    stage or its data-parallel wrapper. Between blocks the sequence is split into `sequence` parts (by sequence
    parallelism). `timer` times each part under its name in Megatron-LM."""

    stage: Stage
    module: nn.Module
    mesh: Mesh
    name: str = "1f1b"
    sequence: int = 1
    timer: Timer = lambda name: nullcontext()

    def run(
        self, microbatches: Sequence[Batch], loss: Callable[[Losses], Tensor] | None,
        keys: Sequence[Tensor] | None = None,
        accumulate: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Losses]:  # fmt: skip
        """Forward and backward of all microbatches; the last stage returns their losses in order, detached. `loss` maps
        losses to the scalar that backward starts from; None runs forward only, without gradients. `accumulate`
        surrounds every backward but the last, after which gradients may be reduced. Raises UserError for a schedule
        that does not exist for these stages, chunks and microbatches, and if the last stage lacks targets."""
        stage = self.stage
        if stage.has_last and any(batch.targets is None for batch in microbatches):
            raise UserError("a pipeline computes losses, and a microbatch has no targets")
        lists = schedule(self.name, stage.stages, len(microbatches), stage.chunks)
        if stage.turn != (self.name in TURNING):
            raise UserError(f"schedule {self.name} does not go with a stage that has turn={stage.turn}")
        execution = _Execution(self, microbatches, loss, keys, lists)
        actions = [each for each in lists[stage.stage] if loss is not None or each.kind == "forward"]
        moving = [each for each in actions if each.kind != "weights"]  # those that receive or send
        around = dict(zip(moving, zip([None, *moving], [*moving[1:], None], strict=False), strict=True))
        # With chunks, and where backward is split, gradients end at several actions, so none may be reduced early.
        final = actions[-1] if stage.chunks == 1 and len(moving) == len(actions) else None
        with torch.set_grad_enabled(loss is not None):
            for action in actions:
                if action.kind == "weights":  # whose gradients a split backward has postponed
                    with accumulate(), self.timer("backward-compute"):
                        execution.split.pop((action.microbatch, action.chunk)).finish()
                    continue
                before, after = around[action]
                received = execution.recv_next(action, before, after)
                if action.kind == "forward":
                    result = execution.forward(action, received)
                else:
                    with nullcontext() if action is final else accumulate():
                        result = execution.backward(action, received)
                execution.send(action, result, after)
        for _, _, work in execution.sent:
            work.wait()
        return execution.losses


@dataclass
class _Execution:
    """Execution of one stage's list: the activations that await a backward, and the messages in flight."""

    pipeline: Pipeline
    microbatches: Sequence[Batch]
    loss: Callable[[Losses], Tensor] | None
    keys: Sequence[Tensor] | None
    lists: Sequence[Sequence[Action]]
    live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # (microbatch, chunk)
    posted: dict[Action, tuple[tuple[int, Action], Work, Tensor]] = field(default_factory=dict)
    sent: list[tuple[int, int, Work]] = field(default_factory=list)  # (receiving stage, place in its list, send)
    at_home: dict[Action, Tensor] = field(default_factory=dict)  # inputs that another chunk of this stage made
    losses: list[Losses] = field(default_factory=list)
    split: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)  # (microbatch, chunk)

    def recv_next(self, action: Action, before: Action | None, after: Action | None) -> Tensor | None:
        """Receive the action's input, None for the batch or the loss, and post the receive of the action after it."""
        for each in (action, after):
            if each is not None and each not in self.posted:
                self.post_recv(each)
        if action not in self.posted:
            return self.at_home.pop(action, None)
        (stage, awaited), work, tensor = self.posted.pop(action)
        sends = f"{before.kind}-send-" if before is not None and before.kind != action.kind else ""
        with self.pipeline.timer(f"{sends}{action.kind}-recv"):
            work.wait()
        done, sent, self.sent = self.lists[stage].index(awaited), self.sent, []
        for to, place, message in sent:  # messages for that stage's earlier actions have arrived
            if to == stage and place < done:
                message.wait()
            else:
                self.sent.append((to, place, message))
        return tensor

    def post_recv(self, action: Action) -> None:
        """Start to receive the action's input (rows seq d_model), if another stage sends it."""
        stage, (rows, seq) = self.pipeline.stage, self.microbatches[action.microbatch].tokens.shape
        source = receives_from(stage.stage, action, stage.stages, stage.chunks, stage.turn)
        if source is not None and source[0] != stage.stage:
            shape = rows, seq // self.pipeline.sequence, stage.model.config.d_model
            tensor = next(stage.parameters()).new_empty(shape)
            group = self.pipeline.mesh.channel(action.kind, source[0], stage.stage)
            self.posted[action] = source, receive(tensor, source[0], group, str(action)), tensor

    def send(self, action: Action, result: Tensor | None, after: Action | None) -> None:
        """Send the action's result to the stage that needs it, and keep the tensor until it has left."""
        stage = self.pipeline.stage
        target = sends_to(stage.stage, action, stage.stages, stage.chunks, stage.turn)
        if target is None or result is None:
            return
        if target[0] == stage.stage:
            self.at_home[target[1]] = result.detach()
            return
        receives = f"-{after.kind}-recv" if after is not None and after.kind != action.kind else ""
        with self.pipeline.timer(f"{action.kind}-send{receives}"):
            group = self.pipeline.mesh.channel(action.kind, stage.stage, target[0])
            work = send(result.detach().contiguous(), target[0], group, str(target[1]))
            self.sent.append((target[0], self.lists[target[0]].index(target[1]), work))

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        """Forward of a chunk: its output or, after the last chunk, None, with the losses kept."""
        microbatch, chunk = action.microbatch, action.chunk
        if hidden is not None and self.loss is not None:
            hidden.requires_grad_()
        key = self.keys[microbatch] if self.keys else None
        splits: AbstractContextManager[Any] = nullcontext()
        if self.loss is not None and self.pipeline.name in SPLIT:
            splits = self.split[microbatch, chunk] = SplitBackward()
        with self.pipeline.timer("forward-compute"):
            with splits:
                result = output = self.pipeline.module(self.microbatches[microbatch], hidden, chunk, key)
            if isinstance(output, Losses):
                pair = None if output.pair is None else output.pair.detach()
                self.losses.append(Losses(output.tokens.detach(), pair))
                result, output = None, output.tokens if self.loss is None else self.loss(output)
        if self.loss is not None:
            self.live[microbatch, chunk] = hidden, output
        return result

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Backward of a chunk: the gradient of its input, None for the first chunk."""
        hidden, output = self.live.pop((action.microbatch, action.chunk))
        with self.pipeline.timer("backward-compute"):
            if gradient is None or output.requires_grad:  # else all before it is frozen
                torch.autograd.backward(output, gradient)
        return None if hidden is None else hidden.grad
