"""A rank's part of a model that is laid out over a mesh, wrapped, with its optimizer and its pipeline.

In the order in which `assemble` reads: the model's blocks are divided into pipeline stages, a stage's matrices are
split over tensor-parallel ranks, its experts over expert-parallel ones, and what is left is copied or sharded over
data-parallel ranks as the ZeRO stage says. The trainer trains it; the dry run observes it on the meta device.
"""

from dataclasses import dataclass
from functools import partial

import torch

from cs336_systems.comm import Mesh
from cs336_systems.ddp import DataParallel
from cs336_systems.expert_parallel import ExpertParallel, expert_parallel
from cs336_systems.fsdp import FSDP
from cs336_systems.layout import Layout
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.optim.adamw import AdamW, decay_groups
from cs336_systems.optim.master_weights import MasterAdamW
from cs336_systems.pipeline import Stage
from cs336_systems.presets import ModelConfig
from cs336_systems.tensor_parallel.plan import TensorParallel, tensor_parallel
from cs336_systems.train.expert_zero import JointModel, JointOptimizer, expert_zero
from cs336_systems.train.gradients import ModelGradients, tied_copy
from cs336_systems.train.recipe import Recipe


@dataclass
class Assembly:
    """A rank's part of a model: its stage, how it was split, its data-parallel wrapper and its optimizer."""

    stage: Stage
    plan: TensorParallel
    experts: ExpertParallel
    model: DataParallel | FSDP | JointModel
    optimizer: torch.optim.Optimizer | JointOptimizer
    gradients: ModelGradients
    parameters: int  # how many this rank computes with, whether data-parallel ranks keep shards of them or not


def assemble(recipe: Recipe, config: ModelConfig, layout: Layout, mesh: Mesh, device: torch.device) -> Assembly:
    """Build this rank's part of a model, in the recipe's precision and with its optimizer. Every rank must call this.

    On the meta device the parameters have no values. Raises UserError for a model that does not divide.
    """
    model = TransformerLM(config, "meta")  # a rank gives values to its part alone, one whole matrix at a time
    stage = Stage(model, mesh.pp.rank(), mesh.pp.size(), layout.chunks)
    plan = tensor_parallel(model, mesh.tp, layout.sequence, layout.vocabulary_multiple)
    experts = expert_parallel(model, mesh.ep, mesh.data)
    if device.type != "meta":
        plan.init_weights(recipe.run.seed, device)
    if recipe.model.half:
        model.to(torch.bfloat16 if recipe.model.precision == "bf16" else torch.float16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options, adamw = recipe.optimizer, MasterAdamW if recipe.model.half else AdamW
    groups = partial(decay_groups, weight_decay=options.weight_decay)
    adam = {"betas": (options.beta1, options.beta2), "eps": options.adam_eps}
    wrapper, optimizer = expert_zero(stage, experts, adamw, layout.zero, mesh, groups, tied_copy(stage), **adam)
    gradients = ModelGradients(wrapper, stage, plan, experts.names, mesh)
    return Assembly(stage, plan, experts, wrapper, optimizer, gradients, parameters)
