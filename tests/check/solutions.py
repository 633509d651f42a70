"""Solutions of the later exercises as a student would write them, and mistakes planted in them: (old, new, what `check`
says of it)."""

from tests.check.planted import FSDP, HEAD, OPTIMIZER

ZERO_2 = f"""{OPTIMIZER}

class Model(torch.nn.Module):
    def __init__(self, module, owners):
        super().__init__()
        self.module, self.owners = module, owners

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for p, owner in self.owners:
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                dist.reduce(gradient, owner)
                p.grad = gradient / dist.get_world_size() if owner == dist.get_rank() else None


def zero2(module, optimizer_cls, **options):
    optimizer = StudentSharded(module.parameters(), optimizer_cls, **options)
    return Model(module, optimizer.owners), optimizer
"""

ZERO_3 = FSDP.replace("StudentFSDP", "FSDP")
VOCABULARY = f"""{HEAD}
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        local, here = logits.shape[1], torch.arange(len(targets))
        most = logits.amax(1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        exponents = (logits - most[:, None]).exp()
        total = exponents.sum(1)
        dist.all_reduce(total)
        mine = targets - dist.get_rank() * local
        is_mine = (mine >= 0) & (mine < local)
        own = torch.where(is_mine, logits[here, mine.clamp(0, local - 1)], 0.0)
        dist.all_reduce(own)
        gradient = exponents / total[:, None]
        gradient[here[is_mine], mine[is_mine]] -= 1
        ctx.save_for_backward(gradient / len(targets))
        return (total.log() + most - own).mean()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0], None


def vocabulary_loss(logits, targets):
    return Loss.apply(logits, targets)
"""
STEPS = """
def steps(stage, stages, microbatches):
    ahead = min(stages - 1 - stage, microbatches)
    found = [("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        if i + ahead < microbatches:
            found.append(("forward", i + ahead))
        found.append(("backward", i))
    return found
"""
DISPATCH = f"""{HEAD}
class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        y = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), received, sent)
        return y

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.sizes
        return Swap.apply(gradient, received, sent), None, None


def run_experts(rows, chosen, experts):
    world, local = dist.get_world_size(), len(experts)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=world * local)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent = counts.view(world, local).sum(1).tolist()
    received = arriving.view(world, local).sum(1).tolist()
    here = Swap.apply(rows[order], sent, received)
    expert = torch.arange(local).repeat(world).repeat_interleave(arriving)
    by_expert = expert.argsort(stable=True)
    pieces = here[by_expert].split(torch.bincount(expert, minlength=local).tolist())
    done = torch.cat([run(piece) for run, piece in zip(experts, pieces)])
    back = Swap.apply(done[by_expert.argsort()], received, sent)
    return back[order.argsort()]
"""
ATTENTION = """
import torch


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, exchange, rank, world):
        most = torch.full(q.shape[:2], -torch.inf)
        total, result = torch.zeros(q.shape[:2]), torch.zeros_like(q)
        ctx.ring, keys, values = (exchange, rank, world), k, v
        for step in range(world):
            scores = visible(q @ keys.mT / q.shape[2] ** 0.5, rank, (rank - step) % world)
            new = torch.maximum(most, scores.amax(2))
            old, most = (most - new).exp(), new
            weights = (scores - most[..., None]).exp()
            total = total * old + weights.sum(2)
            result = result * old[..., None] + weights @ values
            if step + 1 < world:
                keys, values = passed(exchange, keys), passed(exchange, values)
        result = result / total[..., None]
        ctx.save_for_backward(q, k, v, result, most + total.log())
        return result

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, result, log_sum = ctx.saved_tensors
        exchange, rank, world = ctx.ring
        of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(world):
            scores = visible(q @ k.mT / q.shape[2] ** 0.5, rank, (rank - step) % world)
            weights = (scores - log_sum[..., None]).exp()
            of_v = of_v + weights.mT @ gradient
            of_scores = weights * (gradient @ v.mT - (gradient * result).sum(2, keepdim=True)) / q.shape[2] ** 0.5
            of_q, of_k = of_q + of_scores @ k, of_k + of_scores.mT @ q
            if step + 1 < world:
                k, v = passed(exchange, k), passed(exchange, v)
            of_k, of_v = passed(exchange, of_k), passed(exchange, of_v)
        return of_q, of_k, of_v, None, None, None


def passed(exchange, x):
    new = torch.empty_like(x)
    exchange(x, new)
    return new


def visible(scores, mine, theirs):
    size = scores.shape[1]
    rows, columns = torch.arange(size) + mine * size, torch.arange(size) + theirs * size
    return scores.masked_fill(rows[:, None] < columns, -torch.inf)


def ring_attention(q, k, v, exchange, rank, world):
    return Ring.apply(q, k, v, exchange, rank, world)
"""
CHECKPOINT = """
import os

import torch


def save(state, folder):
    new = folder / "new"
    torch.save(state, new)
    os.replace(new, folder / "last")


def load(folder):
    path = folder / "last"
    return torch.load(path) if path.exists() else None
"""

SOLUTIONS = {
    "zero-2": ZERO_2,
    "zero-3": ZERO_3,
    "vocabulary-loss": VOCABULARY,
    "one-f-one-b": STEPS,
    "expert-dispatch": DISPATCH,
    "ring-attention": ATTENTION,
    "checkpoint": CHECKPOINT,
}
MISTAKES = {
    "zero-2": [
        (" if owner == dist.get_rank() else None", "", "keeps .grad of 362 of 362 elements"),
        (" if owner == rank]", "]", "keeps state of 362 of 362 elements"),
        (" / dist.get_world_size() if", " if", "2 times the mean"),
        ("            dist.broadcast(p.detach(), owner)", "            pass", "WRONG a layer used twice: zero"),
    ],
    "zero-3": [
        ("[self.rank].clone()", "[self.rank]", "keeps .data of"),
        ("                gradient /= self.world\n", "", "2 times the mean"),
        ("                dist.all_reduce(gradient)", "                pass", "a layer used twice: never synchronised"),
    ],
    "vocabulary-loss": [
        ("        dist.all_reduce(most, dist.ReduceOp.MAX)", "        pass", "the loss is off by"),
        ("most = logits.amax(1)", "most = 0 * logits[:, 0]", "off by inf"),
        ("upstream * ctx", "ctx", "0.3333 times what it must be"),
        ("    return Loss", "    every = [torch.empty_like(logits) for _ in range(2)]\n"
         "    dist.all_gather(every, logits.detach())\n    return Loss", "collectives were given"),
    ],
    "one-f-one-b": [
        ("stages - 1 - stage, micro", "microbatches, micro", "3 live microbatches, at most 1 should be"),
        ("stages - 1 - stage, micro", "stages - 2 - stage, micro", "deadlock"),
        ("stages - 1 - stage, micro", "int(stage + 1 < stages), micro", "idle for"),
        ("    return found", "    return found[:-1]", "the longest list has 5 steps, not 6"),
        ('("backward", i)', '("backward", microbatches - 1 - i)', "before the forward of microbatch"),
    ],
    "expert-dispatch": [
        ("back[order.argsort()]", "back", "the result is off by"),
        ("Swap.apply(rows[order], sent", "Swap.apply(rows[order].detach(), sent", "the gradient of the rows is off by"),
        ("done[by_expert.argsort()]", "done[by_expert]", "the result is off by"),
        ("run(piece) for", "run(torch.cat([piece, piece]))[: len(piece)] for", "rows, and"),
    ],
    "ring-attention": [
        ("rows[:, None] < columns", "rows[:, None] <= columns", "the output is off by"),
        ("new = torch.maximum(most, scores.amax(2))", "new = torch.zeros(q.shape[:2])", "large scores"),
        ("            of_k, of_v = passed(exchange, of_k), passed(exchange, of_v)\n", "",
         "the gradient of the keys is off"),
        ("            if step + 1 < world:\n                keys,", "            if True:\n                keys,",
         "a ring needs"),
    ],
    "checkpoint": [
        ('new = folder / "new"', 'new = folder / "last"', "load raises"),
        ("exists() else None", "exists() else {}", "load of an empty folder is not None"),
        ('    torch.save', '    if new.exists():\n        return\n    torch.save', "an older state is loaded"),
        ("    os.replace", '    (folder / "last").unlink(missing_ok=True)\n    os.replace', "the state of no step"),
        ('    new = folder / "new"', '    new = folder / "new"\n    new.touch(exist_ok=False)',
         "the next save and load raise"),
    ],
}  # fmt: skip
