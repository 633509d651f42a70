"""The functions that the course's editions of 2024, 2025 and 2026 name in their tests/adapters.py."""

from cs336_systems.ddp import BucketedDDP, NaiveDDP
from cs336_systems.fsdp import FSDP
from cs336_systems.sharded_optimizer import ShardedOptimizer


def get_ddp_individual_parameters(module):
    return NaiveDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


ddp_bucketed_on_after_backward = ddp_on_after_backward = ddp_individual_parameters_on_after_backward
fsdp_on_after_backward = ddp_on_after_backward


def get_ddp_bucketed(module, bucket_size_mb):
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    ddp_model.begun = True


def get_ddp(module):
    return NaiveDDP(module)


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module, compute_dtype=None):
    return FSDP(module, compute_dtype)


def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.gather_full_params()
