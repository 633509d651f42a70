"""The recipe at work: a model that is laid out over the ranks, and its optimizer steps.

In the order in which `Trainer` reads: the model's blocks are divided into pipeline stages, a stage's matrices are split
over tensor-parallel ranks, its experts over expert-parallel ones, and what is left is copied or sharded over
data-parallel ranks as the ZeRO stage says. The global batch is the same for every layout, and so is what is learned.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.comm import Mesh, all_reduce, at_step
from cs336_systems.cost.capacity import require_fit, require_layout_fits
from cs336_systems.data import Batch, count_targets
from cs336_systems.dropout import DropoutKey, dropout_key
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.expert_zero import expert_zero
from cs336_systems.feed import make_feed
from cs336_systems.grad_norm import clip_by_norm
from cs336_systems.heads import Losses
from cs336_systems.machine import choose_device, usable_memory
from cs336_systems.master_weights import MasterAdamW
from cs336_systems.model import TransformerLM
from cs336_systems.model_gradients import ModelGradients, tied_copy
from cs336_systems.moe import set_balance_scale
from cs336_systems.optim import AdamW, decay_groups
from cs336_systems.pipeline import Pipeline, Stage, Timer
from cs336_systems.precision import set_matmul_precision
from cs336_systems.presets import ModelConfig
from cs336_systems.recipe import Recipe
from cs336_systems.tensor_parallel import tensor_parallel
from cs336_systems.timers import Timers

ORDER = (  # of a step's timers in a report, on every stage
    *("batch-generator", "forward-recv", "forward-compute", "forward-send", "forward-send-backward-recv"),
    *("backward-recv", "backward-compute", "backward-send", "backward-send-forward-recv"),
    *("backward-params-all-reduce-wait", "backward-params-all-reduce", "backward-embedding-all-reduce-wait"),
    *("backward-embedding-all-reduce", "optimizer-unscale-and-check-inf", "optimizer-copy-to-main-grad"),
    *("optimizer-clip-main-grad", "optimizer-inner-step", "optimizer-copy-main-to-model-params", "optimizer"),
)
STUBBORN = 10  # steps in a row that were left out, at the lowest loss scale, after which a run is given up


class Step(NamedTuple):
    """What came of an optimizer step: this rank's share of the losses (2,), of tokens and of sentence pairs, which add
    up over all ranks; the gradient's norm before clipping; the learning rate; whether it was left out, since the
    gradient is not finite."""

    losses: Tensor
    norm: Tensor
    rate: float
    skipped: bool


class Trainer:
    """This rank's part of a model, its optimizer and its data. Every rank must construct it and call its methods.

    Raises UserError for a recipe that cannot be, before anything is built.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.device = recipe, choose_device(recipe.device)
        if recipe.backend == "gloo" and self.device.type == "cuda" and recipe.pp > 1:
            raise UserError("gloo sends messages between stages from CPUs only; use --backend nccl, or --pp 1")
        self.mesh = mesh = Mesh(recipe.tp, recipe.pp, recipe.ep, recipe.dp)
        ranks = mesh.world.size()
        recipe.learning_rate(0)  # a schedule that cannot be is refused
        self.batch, self.micro_batch = recipe.batches(ranks)
        recipe.check_layout(recipe.model_config(), ranks)
        self._require_fit(recipe.model_config())
        self.feed = make_feed(recipe, self.batch, mesh.world)
        self.config = config = recipe.model_config(self.feed.vocab_size)
        self.seq = recipe.seq(config)
        recipe.check_layout(config, ranks)
        self._require_fit(config)
        set_matmul_precision(self.device, recipe.precision)

        parts = recipe.tp if recipe.sequence_parallel else 1
        self._lay_out(config)
        self.gradients = ModelGradients(self.model, self.stage, self.plan, self.experts.names, mesh)
        self._set_timers()
        self.pipeline = Pipeline(self.stage, self.model, mesh, recipe.schedule_name, parts, self.timer)
        self.evaluation = Pipeline(self.stage, self.model, mesh, recipe.schedule_name, parts)  # which no timer counts
        self.scaler = recipe.loss_scaler()
        self.skipped = self.stuck = 0  # steps; overflows in a row at the lowest loss scale

    def _lay_out(self, config: ModelConfig) -> None:
        """Stages, parts of matrices, experts, then copies: what this rank has of the model, and its optimizer."""
        recipe, mesh = self.recipe, self.mesh
        # On the meta device: a rank gives values to its part alone, one whole matrix at a time.
        model = TransformerLM(config, "meta")
        self.stage = stage = Stage(model, mesh.pp.rank(), mesh.pp.size(), recipe.chunks)
        multiple = recipe.pad_vocabulary if recipe.tp > 1 else 1
        self.plan = tensor_parallel(model, mesh.tp, recipe.sequence_parallel, multiple)
        self.experts = expert_parallel(model, mesh.ep, mesh.data)
        self.plan.init_weights(recipe.seed, self.device)
        if recipe.half:
            model.to(torch.bfloat16 if recipe.precision == "bf16" else torch.float16)
        self.model, self.optimizer = expert_zero(
            stage,
            self.experts,
            MasterAdamW if recipe.half else AdamW,
            recipe.zero,
            mesh,
            partial(decay_groups, weight_decay=recipe.weight_decay),
            tied_copy(stage),
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.adam_eps,
        )

    def _set_timers(self) -> None:
        recipe = self.recipe
        self.timers = Timers(self.device, self.mesh.world)
        parallel = recipe.is_bert or self.mesh.model.size() > 1
        self.timers_shown = recipe.timers or ("max" if parallel else "none")
        for name in ORDER:
            self.timers(name)
        # Timers that nobody reads would pile up events on a GPU.
        self.timer: Timer = self.timers if self.timers_shown != "none" else lambda name: nullcontext()
        for each in getattr(self.optimizer, "optimizers", [self.optimizer]):
            inner = getattr(each, "inner", each)
            if isinstance(inner, MasterAdamW):
                inner.timer = self.timer

    def _require_fit(self, config: ModelConfig) -> None:
        recipe, ranks = self.recipe, self.mesh.world.size()
        usable = usable_memory(self.device) // (ranks if self.device.type == "cpu" else 1)
        precision, seq = "bf16" if recipe.half else recipe.precision, recipe.seq(config)
        if ranks == 1:
            require_fit(recipe.name, config, self.micro_batch, seq, "step", precision, usable, modes=())
        require_layout_fits(recipe.name, config, recipe.layout(ranks), seq, precision, usable)

    def step(self, step: int) -> Step:
        """One optimizer step, the first is 0, on this rank's rows of the global batch."""
        at_step(step + 1)
        with self.timer("batch-generator"):
            batch = self.feed.batch(step, self.mesh.data.rank(), self.mesh.data.size()).to(self.device)
            counted = self._count_targets(batch)
            microbatches = batch.split(self.micro_batch)
            drawn = self.config.dropout or (self.config.num_experts and self.config.mixture.is_random)
            keys = [self._key(step, each) for each in microbatches] if drawn else None
        set_balance_scale(self.stage, self.scaler.scale / len(microbatches))
        # The wrapper takes the mean over data-parallel ranks, of losses that are to be added up.
        weight = self.mesh.data.size() * self.scaler.scale

        def loss(losses: Losses) -> Tensor:
            return weight * self._share(losses, counted).sum()

        every = self.pipeline.run(microbatches, loss, keys, self.model.no_sync)
        with self._timed("backward-params-all-reduce"):
            self.model.finish_gradient_synchronization()
        with self._timed("backward-embedding-all-reduce"):
            self.gradients.add_partial()
            self.gradients.add_tied()
        rate = self.recipe.learning_rate(step - self.skipped)
        with self.timer("optimizer"):
            norm, skipped = self._update(rate)
        self.optimizer.zero_grad()
        return Step(self._total(every, counted), norm, rate, skipped)

    def _update(self, rate: float) -> tuple[Tensor, bool]:
        """Clip and step, unless the gradients are to be left out: (their norm, whether they were)."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = self.scaler.scale  # of these gradients; the update below may change it for the next
        with self.timer("optimizer-unscale-and-check-inf"):
            norm = self.gradients.norm() / scale
            # One number says it for all gradients of all ranks. Only in fp16 is it usual, and worth the host's wait.
            asked = self.recipe.precision == "fp16" or self.recipe.on_nonfinite == "skip"
            overflow = asked and not math.isfinite(norm.item())
        # Overflows on the way down from the first scale are how the right one is found.
        self.stuck = self.stuck + 1 if overflow and self.scaler.at_floor else 0
        self.scaler.update(overflow)
        if overflow:
            self.skipped += 1
            if self.stuck == STUBBORN:
                cure = "--loss-scale" if self.recipe.loss_scale else f"--lr (now {self.recipe.lr:g})"
                where = f" at a loss scale of {scale:g}" if self.recipe.precision == "fp16" else ""
                raise UserError(f"the gradients were inf or NaN {self.stuck} times in a row{where}; lower {cure}")
            return norm, True
        if self.recipe.half:
            multiplier = (self.recipe.clip / norm).clamp(max=1.0) / scale
            self.optimizer.step(multiplier=multiplier)  # type: ignore[call-overload]
        else:
            with self.timer("optimizer-clip-main-grad"):
                clip_by_norm([each.gradient for each in self.gradients.kept().values()], norm, self.recipe.clip)
            self.optimizer.step()
        return norm, False

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides tensors: what the steps so far have changed, as JSON."""
        return {"skipped": self.skipped, "scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raises UserError for a loss scaler of another kind."""
        self.scaler.load_state_dict(state["scaler"])
        self.skipped = int(state["skipped"])  # not how many in a row: what follows may be done otherwise

    def _timed(self, name: str) -> AbstractContextManager[Any]:
        """A timer around a collective, which may tell waiting from transferring."""
        return self.timers.collective(name) if self.timers_shown == "waits" else self.timer(name)

    def _key(self, step: int, batch: Batch) -> DropoutKey:
        assert batch.rows is not None
        return dropout_key(self.recipe.seed, step, batch.rows)

    def routing(self) -> dict[str, float]:
        """The balancing loss of the last microbatch, 1 if balanced and nothing is padding, the mean over expert layers
        and ranks, and the share of choices that were dropped (not known by einsum); nothing without experts. Every rank
        must call it."""
        if not self.config.num_experts:
            return {}
        total = torch.zeros(4, dtype=torch.float64, device=self.device)
        for layer in self.experts.layers():
            if layer.balance is not None:
                total[:2] += torch.stack((layer.balance.double(), total.new_ones(())))
            if layer.load is not None:
                total[2:] += torch.stack((layer.load.kept.sum(), layer.load.wanted.sum()))
        all_reduce(total, self.mesh.world, "balance", "sum").wait()
        balance, count, kept, wanted = total.tolist()
        return ({"balance": balance / count} if count else {}) | ({"dropped": 1 - kept / wanted} if wanted else {})

    def _count_targets(self, batch: Batch) -> Tensor:
        """Targets in the global batch, a scalar."""
        if self.feed.counted is not None:
            return torch.tensor(float(self.feed.counted), device=self.device)
        counted = count_targets(batch).float()
        all_reduce(counted.view(1), self.mesh.data, "targets", "sum").wait()
        return counted

    def _share(self, losses: Losses, counted: Tensor) -> Tensor:
        """What some rows contribute to the global batch's mean losses, (2,): of targets, and of sentence pairs."""
        pair = torch.zeros_like(losses.tokens) if losses.pair is None else losses.pair / self.batch
        return torch.stack((losses.tokens / counted, pair))

    def _total(self, every: list[Losses], counted: Tensor) -> Tensor:
        """This rank's share of the losses, (2,), where no other rank has the same."""
        if not every or self.mesh.tp.rank():
            return torch.zeros(2, device=self.device)
        return torch.stack([self._share(losses, counted) for losses in every]).sum(0)

    def mean_losses(self, steps: list[Step]) -> list[float]:
        """The global losses of tokens and pairs, averaged over steps, NaN over none: the one wait for the device
        between two logs."""
        losses = [each.losses for each in steps]
        total = (torch.stack(losses).mean(0) if losses else torch.full((2,), torch.nan, device=self.device)).double()
        all_reduce(total, self.mesh.world, "losses", "sum").wait()
        return total.tolist()

    @torch.no_grad()
    def validate(self) -> list[float] | None:
        """The losses on text kept for evaluation, nats a target and nats a pair, without dropout; None without one."""
        place = self.mesh.data.rank(), self.mesh.data.size()
        if self.feed.validation(0, *place) is None:
            return None
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for number in range(self.recipe.eval_iters):
            batch = self.feed.validation(number, *place)
            assert batch is not None
            for losses in self.evaluation.run(batch.to(self.device).split(self.micro_batch), None):
                sums[0] += losses.tokens
                sums[1] += 0.0 if losses.pair is None else losses.pair
            if self.stage.has_last:
                sums[2] += count_targets(batch)
        if self.mesh.tp.rank():
            sums.zero_()
        all_reduce(sums, self.mesh.world, "validation losses", "sum").wait()
        self.model.train()
        tokens, pairs, counted = sums.tolist()
        return [tokens / counted, pairs / (self.recipe.eval_iters * self.batch)]
