"""Refusals of modules that several ranks cannot train, and the weights that a module computes from its parameters."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from cs336_systems.buffers.flat import overlapping
from cs336_systems.comm import fault
from cs336_systems.errors import UserError


def refuse_max_norm(module: nn.Module) -> None:
    """Raises UserError for an embedding whose forward changes the rows that are looked up, on this rank alone."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise fault(f"{name} has a max_norm, and each rank would change the rows it looks up: normalise its output")


def refuse_shared_memory(names: Mapping[nn.Parameter, str]) -> None:
    """Raises UserError for two parameters in one memory, of which sharding would make two."""
    if found := overlapping(list(names)):
        first, second = ([*names.values()][number] for number in found)
        both = f"{first} and {second} lie in one memory, of which sharding makes two"
        raise fault(f"{both}: make them one Parameter, or clone() one")


def refuse_hooks(weight: nn.Parameter, name: str, own: int = 0) -> None:
    """Raises UserError for a hook on the gradient of a sharded weight, which autograd never gives one; `own` are the
    wrapper's of each kind."""
    if max(len(hooks or ()) for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks)) > own:
        raise fault(f"{name} has a gradient hook, which would never run since the weight is sharded: remove it")


@_disable_dynamo
def refuse_compiler(compiler: object) -> None:
    """Raises UserError if a compiler, the current one of torch.compile, reads FSDP's own forward."""
    if callable(compiler):
        raise fault(
            "torch.compile cannot read FSDP, which gathers and frees weights while the model runs: compile the model "
            "block by block before it is wrapped, as in `for block in model.blocks: block.compile()`"
        )


def computed_weights(module: nn.Module) -> list[Tensor]:
    """Weights that old-style weight_norm and spectral_norm have computed, which the next forward computes anew."""
    hooks = ((layer, hook) for layer in module.modules() for hook in layer._forward_pre_hooks.values())
    return [getattr(layer, hook.name) for layer, hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]


def replaced_error(name: str) -> UserError:
    """Error of a tensor that is put in a sharded parameter's place."""
    return fault(
        f"what takes the place of {name} is not the parameter that was wrapped, and FSDP would not compute with it; "
        "change the module first, then wrap it anew (functional_call takes modules that are not sharded)"
    )


def assigned_error(name: str) -> UserError:
    """Error of a sharded parameter's gradient that was assigned while the mean is under way."""
    return fault(
        f"{name}.grad was assigned before finish_gradient_synchronization() had delivered it: call that first, or "
        "zero_grad() of the wrapper to drop it"
    )
