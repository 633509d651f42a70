"""Trainer: optimizer steps of a model that is laid out over ranks (`Assembly`), with equal results in all layouts."""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.comm import Mesh, all_reduce, at_step
from cs336_systems.context_parallel import split_sequence
from cs336_systems.data.corpus import count_targets
from cs336_systems.errors import UserError
from cs336_systems.host.machine import choose_device
from cs336_systems.model.heads import Losses
from cs336_systems.model.moe import set_balance_scale
from cs336_systems.model.precision import set_matmul_precision
from cs336_systems.optim.grad_norm import clip_by_norm
from cs336_systems.optim.master_weights import MasterAdamW
from cs336_systems.pipeline import Timer
from cs336_systems.train.assembly import Assembly
from cs336_systems.train.batches import make_batches
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.timers import Timers

# A step's timers as a report lists them, on every stage.
ORDER = """
batch-generator forward-recv forward-compute forward-send forward-send-backward-recv backward-recv backward-compute
backward-send backward-send-forward-recv backward-params-all-reduce-wait backward-params-all-reduce
backward-embedding-all-reduce-wait backward-embedding-all-reduce optimizer-unscale-and-check-inf
optimizer-copy-to-main-grad optimizer-clip-main-grad optimizer-inner-step optimizer-copy-main-to-model-params optimizer
"""
MOST_OVERFLOWS = 10  # skipped steps in a row, at the lowest loss scale, after which a run is given up


class Step(NamedTuple):
    """Outcome of an optimizer step."""

    losses: Tensor  # (2,) this rank's share of the losses of tokens and of sentence pairs, which add up over all ranks
    norm: Tensor  # of the gradient before clipping
    rate: float
    skipped: bool  # True if the norm was not finite, so that no update was made


class Trainer:
    """This rank's part of a model, its optimizer and its data. Every rank must construct it and call its methods.
    Raises UserError for a recipe that does not divide over the ranks; the caller checks that memory suffices."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.device = recipe, choose_device(recipe.launch.device)
        parallel = recipe.parallel
        if recipe.launch.backend == "gloo" and self.device.type == "cuda":
            if parallel.pp > 1:
                raise UserError("gloo sends messages between stages from CPUs only; use --backend nccl, or --pp 1")
            if parallel.cp > 1 and parallel.cp_type == "ring":
                raise UserError("gloo sends messages of a ring from CPUs only; use --backend nccl, or --cp-type gather")
        self.mesh = mesh = Mesh(parallel.tp, parallel.pp, parallel.ep, parallel.cp, parallel.dp)
        self.data_rank = mesh.rows.rank(), mesh.rows.size()  # position and number of ranks with different rows
        layout = recipe.layout(mesh.world.size())
        self.batch, self.micro_batch = layout.global_batch, layout.micro_batch
        self.batches = make_batches(recipe, self.batch, mesh.world)
        self.config = recipe.model_config(self.batches.vocab_size)
        self.seq = recipe.seq(self.config)
        set_matmul_precision(self.device, recipe.model.precision)

        self.part = Assembly(recipe, self.config, layout, mesh, self.device)
        self.stage = self.part.stage
        self.timers = Timers(self.device, mesh.world, ORDER.split())
        self.timers_shown = recipe.run.timers or ("max" if recipe.model.is_bert or mesh.model.size() > 1 else "none")
        # Timers that are never read would pile up events on a GPU.
        self.timer: Timer = self.timers if self.timers_shown != "none" else lambda name: nullcontext()
        for optimizer in self.part.inner_optimizers:
            if isinstance(optimizer, MasterAdamW):
                optimizer.timer = self.timer
        self.pipeline = self.part.pipeline(self.timer)
        self.evaluation = self.part.pipeline(lambda name: nullcontext())
        self.scaler = recipe.loss_scaler()
        self.skipped = self.overflows = 0  # steps; overflows in a row at the lowest loss scale

    def step(self, step: int) -> Step:
        """Take one optimizer step, the first is 0, on this rank's rows of the global batch."""
        at_step(step + 1)
        part = self.part
        with self.timer("batch-generator"):
            batch = split_sequence(self.batches.batch(step, *self.data_rank).to(self.device), self.mesh.cp)
            if self.batches.targets is not None:
                counted = torch.tensor(float(self.batches.targets), device=self.device)
            else:  # varies, so it is counted in the global batch
                counted = count_targets(batch).float()
                all_reduce(counted.view(1), self.mesh.data, "targets", "sum").wait()
                counted.clamp_(min=1.0)  # a batch without any target learns nothing
            microbatches = batch.split(self.micro_batch)
            keys = part.dropout_keys(self.recipe.run.seed, step, microbatches)
        set_balance_scale(self.stage, self.scaler.scale / len(microbatches))
        # The wrapper takes the mean over data-parallel ranks, but the losses must be added up.
        weight = self.mesh.data.size() * self.scaler.scale

        def loss(losses: Losses) -> Tensor:
            return weight * self._share(losses, counted).sum()

        losses_of_each = self.pipeline.run(microbatches, loss, keys, part.no_sync)
        collective = self.timers.collective if self.timers_shown == "waits" else self.timer
        with collective("backward-params-all-reduce"):
            part.finish_gradient_synchronization()
        with collective("backward-embedding-all-reduce"):
            part.add_shared()
        rate = self.recipe.optimizer.learning_rate(step - self.skipped)
        with self.timer("optimizer"):
            norm, skipped = self._update(rate)
        part.zero_grad()
        total = torch.zeros(2, device=self.device)
        if losses_of_each and not self.mesh.tp.rank():  # the other tp ranks have the same
            total = torch.stack([self._share(losses, counted) for losses in losses_of_each]).sum(0)
        return Step(total, norm, rate, skipped)

    def _update(self, rate: float) -> tuple[Tensor, bool]:
        """Clip gradients and update, unless the step must be skipped; returns (norm, True if skipped)."""
        fp16, options = self.recipe.model.precision == "fp16", self.recipe.optimizer
        scale = self.scaler.scale  # of these gradients; the update below may change it for the next
        with self.timer("optimizer-unscale-and-check-inf"):
            norm = self.part.norm() / scale
            # The norm covers all gradients of all ranks. Overflows are usual in fp16 only, where the host's wait pays.
            overflow = (fp16 or options.on_nonfinite == "skip") and not math.isfinite(norm.item())
        # Overflows above the lowest scale are normal: they lower it from its first value to a suitable one.
        self.overflows = self.overflows + 1 if overflow and self.scaler.at_floor else 0
        self.scaler.update(overflow)
        if overflow:
            self.skipped += 1
            if self.overflows == MOST_OVERFLOWS:
                cure = "--loss-scale" if options.loss_scale else f"--lr (now {options.lr:g})"
                where = f" at a loss scale of {scale:g}" if fp16 else ""
                raise UserError(f"the gradients were inf or NaN {self.overflows} times in a row{where}; lower {cure}")
            return norm, True
        settings: dict[str, Any] = {}
        if self.recipe.model.half:
            settings = {"multiplier": (options.clip / norm).clamp(max=1.0) / scale}
        else:
            with self.timer("optimizer-clip-main-grad"):
                clip_by_norm([each.gradient for each in self.part.kept().values()], norm, options.clip)
        for optimizer in self.part.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step(**settings)
        return norm, False

    def routing(self) -> dict[str, float]:
        """Balancing loss of the last microbatch (1 if balanced), averaged over expert layers and ranks, and the share
        of choices that were dropped (not known with einsum); empty without experts."""
        if not self.config.num_experts:
            return {}
        total = torch.zeros(4, dtype=torch.float64, device=self.device)
        for layer in self.part.experts.layers():
            if layer.balance is not None:
                total[:2] += torch.stack((layer.balance.double(), total.new_ones(())))
            if layer.load is not None:
                total[2:] += torch.stack((layer.load.kept.sum(), layer.load.wanted.sum()))
        all_reduce(total, self.mesh.world, "balance", "sum").wait()
        balance, count, kept, wanted = total.tolist()
        return ({"balance": balance / count} if count else {}) | ({"dropped": 1 - kept / wanted} if wanted else {})

    def _share(self, losses: Losses, counted: Tensor) -> Tensor:
        """Contribution of some rows to the global batch's mean losses (2,), of targets and of sentence pairs."""
        pair = torch.zeros_like(losses.tokens) if losses.pair is None else losses.pair / self.batch
        return torch.stack((losses.tokens / counted, pair))

    def mean_losses(self, steps: list[Step]) -> list[float]:
        """Mean over steps of the global losses of tokens and pairs; NaN without steps. Waits for the device."""
        losses = torch.stack([each.losses for each in steps]) if steps else torch.empty((0, 2), device=self.device)
        total = losses.mean(0).double()
        all_reduce(total, self.mesh.world, "losses", "sum").wait()
        return total.tolist()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Losses on the evaluation text, without dropout: nats per target, nats per pair. Empty without a text."""
        if (rows_of := self.batches.validation) is None:
            return {}
        self.stage.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for number in range(self.recipe.run.eval_iters):
            batch = split_sequence(rows_of(number, *self.data_rank).to(self.device), self.mesh.cp)
            for losses in self.evaluation.run(batch.split(self.micro_batch), None):
                sums[0] += losses.tokens
                sums[1] += 0.0 if losses.pair is None else losses.pair
            if self.stage.has_last:
                sums[2] += count_targets(batch)
        if self.mesh.tp.rank():
            sums.zero_()
        all_reduce(sums, self.mesh.world, "validation losses", "sum").wait()
        self.stage.train()
        tokens, pairs, counted = sums.tolist()
        pair = {"validation_sop_loss": pairs / (self.recipe.run.eval_iters * self.batch)}
        if not counted:
            raise UserError("no target is left in the text for evaluation: use a longer --context, or leave --pack out")
        return {"validation_loss": tokens / counted} | (pair if self.recipe.model.is_bert else {})
