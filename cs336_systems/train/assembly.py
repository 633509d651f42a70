"""A rank's part of a model that is laid out over a mesh, with its data-parallel wrappers and optimizers.

Pipeline stages divide the blocks. Tensor-parallel ranks split a stage's matrices, expert-parallel ranks its experts,
and ZeRO replicates or shards all these over data-parallel ranks. Experts have a wrapper and an optimizer of their own,
since they have fewer replicas than dense parameters: dp x cp ranks, not dp x ep x cp. In ZeRO stage 3 they are sharded
as in stage 2, since FSDP would gather again the experts that expert parallelism has split.

After the wrappers' synchronisation some gradients must still be added up; the global norm counts each gradient once:

    weights that are split               each rank has its part; all ranks count
    partial (routers, sequence parallel) added up over tp, then equal on its ranks; tp rank 0 counts
    whole on every tp rank               equal on its ranks; tp rank 0 counts
    the tied embedding                   added up over the first and last stage; the first counts
    experts of expert parallelism        each ep rank has its own; all ep ranks count

Context-parallel ranks have different tokens, like data-parallel ranks, and the wrappers add up over both.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.comm import Group, Mesh, all_reduce
from cs336_systems.context_parallel import context_parallel
from cs336_systems.data.corpus import Batch
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.layout import TIED, Layout
from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.optim.adamw import AdamW, decay_groups
from cs336_systems.optim.grad_norm import LocalGradient, global_norm
from cs336_systems.optim.master_weights import MasterAdamW
from cs336_systems.pipeline import Pipeline, Stage, Timer
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel.plan import tensor_parallel
from cs336_systems.train.recipe import Recipe
from cs336_systems.zero import zero


class Assembly:
    """A rank's part of a model, in the recipe's precision; on the meta device it has no values. Every rank must
    construct it and call its methods. Raises UserError for a model that does not divide."""

    def __init__(self, recipe: Recipe, config: ModelConfig, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.layout = mesh, layout
        model = TransformerLM(config, "meta")  # a rank gives values to its part alone, one whole matrix at a time
        self.stage = Stage(model, mesh.pp.rank(), mesh.pp.size(), layout.chunks, layout.turn)
        self.plan = tensor_parallel(model, mesh.tp, layout.sequence, layout.vocabulary_multiple)
        self.experts = expert_parallel(model, mesh.ep, mesh.data)
        context_parallel(model, mesh.cp, layout.cp_type)
        if device.type != "meta":
            self.plan.init_weights(recipe.run.seed, device)
        if recipe.model.half:
            model.to(torch.bfloat16 if recipe.model.precision == "bf16" else torch.float16)
        # Number of parameters that this rank computes with, also if data-parallel ranks keep shards of them.
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

        options, adamw = recipe.optimizer, MasterAdamW if recipe.model.half else AdamW
        settings: dict[str, Any] = {"betas": (options.beta1, options.beta2), "eps": options.adam_eps}
        settings["param_groups"] = partial(decay_groups, weight_decay=options.weight_decay)
        # The tied embedding may be on two stages, which must shard its gradient in the same way.
        self.tied = config.tied_head and self.stage.has_first != self.stage.has_last
        apart = [model.get_parameter(TIED)] if self.tied else []
        experts = self.experts.experts()
        alone = list(experts.parameters()) if mesh.ep.size() > 1 or layout.zero == 3 else []
        wrapped = [zero(self.stage, adamw, layout.zero, mesh.data, apart=apart, ignored=alone, **settings)]
        if alone:
            wrapped.append(zero(experts, adamw, min(layout.zero, 2), mesh.replicas, **settings))
        self.wrappers = [wrapper for wrapper, _ in wrapped]
        self.optimizers = [optimizer for _, optimizer in wrapped]
        # The optimizers that ShardedOptimizers run on this rank's share, or the optimizers themselves.
        self.inner_optimizers = [getattr(each, "inner", each) for each in self.optimizers]

    def pipeline(self, timer: Timer) -> Pipeline:
        """Make the executor of the layout's schedule."""
        split = self.layout.tp if self.layout.sequence else 1  # parts of a sequence between the blocks
        return Pipeline(self.stage, self.wrappers[0], self.mesh, self.layout.schedule, split, timer)

    def dropout_keys(self, seed: int, step: int, microbatches: list[Batch]) -> list[Tensor] | None:
        """Make the microbatches' keys for a step; None for a model without random numbers."""
        config = self.stage.model.config
        if not (config.dropout or (config.num_experts and config.mixture.is_random)):
            return None
        return [dropout_key(seed, step, each.rows) for each in microbatches if each.rows is not None]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block, without synchronisation."""
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield

    def finish_gradient_synchronization(self) -> None:
        """Wait for the data-parallel mean of all gradients."""
        for wrapper in self.wrappers:
            wrapper.finish_gradient_synchronization()

    def kept(self) -> dict[str, LocalGradient]:
        """Find this rank's part of every parameter's gradient, by the parameter's name in the whole model."""
        names = {parameter: name for name, parameter in self.stage.model.named_parameters()}
        return {names[each.parameter]: each for wrapper in self.wrappers for each in wrapper.kept_gradients()}

    @torch.no_grad()
    def add_shared(self) -> None:
        """Add up partial gradients: of norms and routers over tp, of the tied embedding over first and last stage."""
        kept, tied = self.kept(), [TIED] if self.tied else []
        sums = (sorted(self.plan.partial), self.mesh.tp, "norms"), (tied, self.mesh.ends, "tied embedding")
        for names, group, label in sums:
            gradients = [kept[name].gradient for name in names if name in kept]
            if gradients and group is not None and group.size() > 1:
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                all_reduce(flat, group, label, "sum").wait()
                for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(total.view_as(gradient))

    def replicas(self, name: str) -> Group | None:
        """Find the group of ranks with the same part of a parameter; None if other ranks count and save this part: the
        first one of tensor-parallel ranks with the same tensor, and the first stage for a tied embedding."""
        duplicate = name not in self.plan.cut and self.mesh.tp.rank() > 0
        if duplicate or (name == TIED and not self.stage.has_first):
            return None
        return self.mesh.replicas if name in self.experts.names else self.mesh.data

    def norm(self) -> Tensor:
        """Compute the L2 norm of the whole model's gradient, a float64 scalar, equal on every rank. It is not finite if
        any rank has a gradient that is not. The host does not wait for the device."""
        parts = [next(self.stage.parameters()).detach().new_empty(0)]  # gives the device if no gradient counts
        for name, each in self.kept().items():
            replicas = self.replicas(name)
            if replicas is not None and (each.sharded or replicas.rank() == 0):
                parts.append(each.gradient)
        return global_norm(parts, (), 2.0, self.mesh.world)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
