"""Shared parts of the tests of data parallelism: a small model with awkward parameters of every kind, batches, and
reference runs without buckets."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.check.models import batch, rows_of


class Awkward(nn.Module):
    """Tied weights, a shared layer, a frozen bias, an unused layer, and sizes that do not divide."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.first = nn.Linear(7, 5)
        self.shared = nn.Linear(5, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(5, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embedding(tokens)))
        x = self.norm(x + self.shared(torch.tanh(self.shared(x)))) * self.scale
        return self.head(self.last(x))


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> Awkward:
    torch.manual_seed(seed)
    model = Awkward(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def loss_of(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    tokens, targets = (rows_of(each, rank, world_size) for each in batch(step))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def one_process(
    steps: int, optimizer_cls: type, micro: int = 1, clip: float | None = None, **options
) -> tuple[dict, list]:
    """Results of one process from all rows: final parameters by name, and the gradient norms."""
    model = make()
    optimizer = optimizer_cls(model.parameters(), **options)
    norms = []
    for step in range(steps):
        for i in range(micro):
            loss_of(model, step * micro + i).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])).item())
        for gradient in grads if clip is not None and norms[-1] > clip else ():
            gradient *= clip / norms[-1]  # torch's own adds 1e-6 to the norm
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def naive_mean(model: nn.Module, step: int, world_size: int) -> dict[str, Tensor]:
    """The five-line oracle: every rank's gradient computed here, added in the order of ranks, divided."""
    total: dict[str, Tensor] = {}
    for rank in range(world_size):
        twin = copy.deepcopy(model)
        loss_of(twin, step, rank, world_size).backward()
        for name, p in twin.named_parameters():
            if p.grad is not None:
                total[name] = p.grad if name not in total else total[name] + p.grad
    return {name: gradient / world_size for name, gradient in total.items()}


def spread(group, tensors: list[Tensor]) -> float:
    """The largest difference of any element between ranks, measured without the library's verbs."""
    import torch.distributed as dist

    worst = 0.0
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(everyone, tensor.detach().contiguous(), group=group)
        worst = max([worst, *((each - everyone[0]).abs().max().item() for each in everyone if each.numel())])
    return worst


def own_rows(model) -> dict[str, torch.Tensor]:
    """A sharded model's state with this rank's rows, as files of earlier versions have it."""
    return {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
