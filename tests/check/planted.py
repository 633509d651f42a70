"""Small parallel implementations as a student would write them, mistakes planted in them, and bugs that other systems
have published, rebuilt small. Each mistake has the cause that `check` must name."""

from types import ModuleType
from typing import Any, NamedTuple

HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contextlib import contextmanager
from torch import nn


def summed(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)

"""
DDP = f"""{HEAD}
class StudentDDP(nn.Module):
    def __init__(self, module, size=4):
        super().__init__()
        self.module, self.works, self.quiet = module, [], False
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), 0)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.buckets = [trained[i : i + size] for i in range(0, len(trained), size)]

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self):
        yield

    def launch(self, bucket):
        bucket = [p for p in bucket if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1).double() for p in bucket] or [torch.zeros(0)])
        self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            self.launch(bucket)
        for bucket, flat, work in self.works:
            work.wait()
            flat /= dist.get_world_size()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))
        self.works = []
"""
OUTER = f"""{HEAD}
class Outer(torch.optim.Optimizer):
    def pass_on(self):
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

"""
OPTIMIZER = f"""{OUTER}
class StudentSharded(Outer):
    def __init__(self, params, optimizer_cls, **options):
        params = list(params)
        super().__init__(params, options)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.owners = [(p, i % world) for i, p in enumerate(params)]
        self.inner = optimizer_cls([p for p, owner in self.owners if owner == rank], **options)

    def step(self, closure=None):
        self.pass_on()
        self.inner.step()
        for p, owner in self.owners:
            dist.broadcast(p.detach(), owner)
"""
STEP = f"""{HEAD}
def train_step(model, optimizer, inputs, targets):
    size = torch.tensor(float(targets.numel()))
    dist.all_reduce(size)
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / size
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
TENSOR = f"""{HEAD}
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def own(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def copy(x):
    return Pair.apply(x, torch.clone, summed)


def add(x):
    return Pair.apply(x, summed, torch.clone)


class Between(nn.Module):
    def __init__(self, before, module, after):
        super().__init__()
        self.before, self.after, self.weight = before, after, module.weight
        self.bias, self.call = getattr(module, "bias", None), [module]

    def forward(self, x):
        return self.after(self.call[0](self.before(x)))


def tensor_parallel(module):
    rank, world = dist.get_rank(), dist.get_world_size()
    module.last.weight = nn.Parameter(module.last.weight.detach().chunk(world, 0)[rank].clone())
    module.head.weight = nn.Parameter(module.head.weight.detach().chunk(world, 1)[rank].clone())
    module.last = Between(copy, module.last, lambda x: x)
    module.head = Between(lambda x: x, module.head, add)
    return module
"""
FSDP = f"""{HEAD}
class StudentFSDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.rank, self.world = module, dist.get_rank(), dist.get_world_size()
        self.whole = dict(module.named_parameters())
        self.shapes = {{name: p.shape for name, p in self.whole.items()}}
        for p in self.whole.values():
            dist.broadcast(p.detach(), 0)
        self.shards = {{name: nn.Parameter(self.part(p.detach()), p.requires_grad) if p.dim() > 1 else p
                       for name, p in self.whole.items()}}
        self.free()

    def part(self, x):
        size = -(-x.numel() // self.world)
        return nn.functional.pad(x.flatten(), (0, size * self.world - x.numel())).chunk(self.world)[self.rank].clone()

    def free(self):
        for name, p in self.whole.items():
            if p is not self.shards[name]:
                p.grad, p.data = None, torch.empty(0, dtype=p.dtype)

    def gather_full_params(self):
        found = {{}}
        for name, p in self.shards.items():
            found[name] = p.detach()
            if p is not self.whole[name]:
                found[name] = gathered(p.detach())[: self.shapes[name].numel()].view(self.shapes[name])
        return found

    def gather(self):
        for name, value in self.gather_full_params().items():
            self.whole[name].data = value

    def parameters(self):
        return iter(self.shards.values())

    def forward(self, *inputs, **options):
        self.gather()
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for name, p in self.whole.items():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(gradient)
                gradient /= self.world
                self.shards[name].grad = gradient if p is self.shards[name] else self.part(gradient)
        self.free()
"""
IN_PLACE = f"""{HEAD}
def fsdp_in_place(module):
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = {{p: p.shape for p in module.parameters()}}

    def part(x):
        return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % world)).chunk(world)[rank].clone()

    def gather(*_):
        for p, shape in shapes.items():
            p.grad, p.data = None, gathered(p.detach())[: shape.numel()].view(shape)

    def finish():
        for p in shapes:
            whole = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(whole)
            p.grad, p.data = None, part(p.data)
            p.grad = part(whole / world) if p.requires_grad else None

    for p in shapes:
        p.data = part(p.data)
    module.register_forward_pre_hook(gather)
    module.synchronize = finish
    return module
"""
FLAT = f"""{OUTER}
class StudentFlat(Outer):
    def __init__(self, params, optimizer_cls, **options):
        params = [p for p in params if p.requires_grad]
        self.params, self.rank, self.world = params, dist.get_rank(), dist.get_world_size()
        super().__init__(self.params, options)
        self.sizes = [p.numel() for p in self.params]
        self.own = torch.nn.Parameter(self.parts(p.detach() for p in self.params)[self.rank].clone())
        self.inner = optimizer_cls([self.own], **options)

    def parts(self, tensors):
        flat = torch.cat([x.flatten() for x in tensors])
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.world)).chunk(self.world)

    def step(self, closure=None):
        self.pass_on()
        self.own.detach().copy_(self.parts(p.detach() for p in self.params)[self.rank])
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.params)
        self.own.grad = self.parts(gradients)[self.rank].clone()
        self.inner.step()
        whole = gathered(self.own.detach())[: sum(self.sizes)]
        for p, piece in zip(self.params, whole.split(self.sizes)):
            p.detach().copy_(piece.view_as(p))
"""
SEQUENCE = f"""{TENSOR}

def sequence_parallel(module):
    def finish():
        for p in (module.norm.weight, module.norm.bias):
            dist.all_reduce(p.grad)

    tensor_parallel(module)
    module.norm = Between(lambda x: Pair.apply(x, own, gathered), module.norm, lambda x: Pair.apply(x, gathered, own))
    module.finish_gradient_synchronization = finish
    return module
"""
COPY = DDP.replace("= module,", "= __import__('copy').deepcopy(module),").replace("in module.", "in self.module.").replace(
    "list(module.", "list(self.module.")  # fmt: skip
OPTIMIZED = f"""{DDP}

def with_optimizer(module, optimizer_cls, lr):
    model = StudentDDP(module)
    optimizer = optimizer_cls(model.parameters(), lr=lr)
    optimizer.synchronize, model.finish_gradient_synchronization = model.finish_gradient_synchronization, None
    return model, optimizer
"""
REDUCING = f"""{DDP}

def reducing_step(module, optimizer_cls, lr):
    class Reducing(optimizer_cls):
        def step(self, closure=None):
            model.finish_gradient_synchronization()
            super().step(closure)

    model = StudentDDP(module)
    module.no_sync = model.no_sync
    return module, Reducing(module.parameters(), lr=lr)
"""
STUDENTS = {  # right ones: the name of the class or function, and its source
    "a DDP with buckets": ("StudentDDP", DDP), "a sharded optimizer": ("StudentSharded", OPTIMIZER),
    "a training step": ("train_step", STEP), "split matrices": ("tensor_parallel", TENSOR),
    "split matrices and sequences": ("sequence_parallel", SEQUENCE),
    "a DDP over a copy of the module": ("StudentDDP", COPY), "an FSDP with a shard of each matrix": ("StudentFSDP", FSDP),
    "an FSDP that puts shards in place of weights": ("fsdp_in_place", IN_PLACE),
    "a sharded optimizer of one flat buffer": ("StudentFlat", FLAT),
    "a DDP whose optimizer synchronises": ("with_optimizer", OPTIMIZED),
    "an optimizer that averages gradients in its step": ("reducing_step", REDUCING),
}  # fmt: skip


class Planted(NamedTuple):
    """A mistake: what is changed in which source, the property that shows it, and the cause to be named."""

    name: str
    source: str
    old: str
    new: str
    property: str
    cause: str
    where: str = ""  # of a published bug


def make(source: str, old: str = "", new: str = "") -> Any:
    """What a source has to be checked, with a mistake."""
    assert not old or source.count(old) == 1, f"{old!r} is {source.count(old)} times in the source"
    module = ModuleType("planted")
    exec(compile(source.replace(old, new) if old else source, "planted", "exec"), vars(module))
    return vars(module)[next(name for name, text in STUDENTS.values() if text == source)]


# What is changed, and names for what is changed more than once.
DIVIDE, REDUCE = "            flat /= dist.get_world_size()\n", "            dist.all_reduce(p.grad)\n"
SEND = "            dist.broadcast(parameter.detach(), 0)"
EACH, LAUNCH, MADE = "        for bucket in self.buckets:\n", "            self.launch(bucket)", "        trained ="
RUNS, HAVING = "dist.all_reduce(flat, async_op=True)", "bucket = [p for p in bucket if p.grad is not None]"
AVERAGE = "[(dist.all_reduce(p.data), p.data.div_(dist.get_world_size())) for p in {}.parameters()]"
UPDATE, ITEMS, BEFORE = f"{REDUCE}    optimizer.step()\n", "().items():\n            self.whole", "    @contextmanager"
SHARES = "        whole = gathered(self.own.detach())["
MISTAKES = [
    Planted("nothing is reduced", DDP, LAUNCH, "            pass", "gradients", "never synchronised"),
    Planted("rank 0's gradients are sent to all", DDP, RUNS, "dist.broadcast(flat, 0, async_op=True)", "gradients", "another rank's"),
    Planted("nobody waits", DDP, "            work.wait()\n", "            __import__('time').sleep(0.02)\n", "waits for what it launches",
            "never synchronised"),
    Planted("a bucket is copied back a step later", DDP, DIVIDE, DIVIDE + "            if bucket[0] is self.buckets[1][0]:\n"
            "                flat, self.last = getattr(self, 'last', flat), flat\n", "gradients", "stale"),
    Planted("the mean is added to the rank's own", DDP, "p.grad.copy_(piece", "p.grad.add_(piece", "gradients", "added to"),
    Planted("gradients are clipped before the reduction", DDP, EACH, f"        nn.utils.clip_grad_norm_(self.parameters(), 0.1)\n{EACH}",
            "gradients", "scaled"),
    Planted("the sum is divided by another number", DDP, DIVIDE, "            flat /= 8\n", "gradients", "factor"),
    Planted("weights are not sent", DDP, SEND, "            pass", "initial weights", "not sent"),
    Planted("buffers are not sent", DDP, "            dist.broadcast(buffer, 0)", "            pass", "buffers", "not sent"),
    Planted("a backward pass that mixes ranks", DDP, MADE,
            f"        module.deep[1].register_full_backward_hook(lambda m, x, y: (dist.all_reduce(x[0]), x)[1])\n{MADE}",
            "gradients", "from here on"),
    Planted("the largest of the ranks' gradients is taken", DDP, RUNS, RUNS.replace(",", ", dist.ReduceOp.MAX,"), "gradients", "not summed"),
    Planted("weights are averaged after the update", STEP, UPDATE, "            p.grad *= dist.get_world_size()\n"
            f"    optimizer.step()\n    {AVERAGE.format('model')}\n", "AdamW instead of SGD", "averaged weights"),
    Planted("an optimizer averages weights in its step", REDUCING, "            model.finish_gradient_synchronization()\n            super().step(closure)\n",
            f"            super().step(closure)\n            {AVERAGE.format('module')}\n", "AdamW instead of SGD", "averaged weights"),
    Planted("a step does not zero the gradients", STEP, "    optimizer.zero_grad()\n", "", "gradients", "kept"),
    Planted("a copy of the weights is not loaded", FLAT, "        self.own.detach().copy_(self.parts(p.detach() for p in self.params)[self.rank])\n", "",
            "state saved and loaded", "own copy"),
    Planted("rank 1's weights are sent", DDP, SEND, SEND.replace("0", "1"), "initial weights", "wrong source"),
    Planted("weights are averaged before the next forward", DDP, EACH + LAUNCH,
            f"        self.module.register_forward_pre_hook(lambda *_: {AVERAGE.format('self.module')} and None)", "gradients", "averaged weights"),
    Planted("a rank keeps the next rank's shard", FSDP, ".chunk(self.world)[self.rank]", ".chunk(self.world)[self.rank - 1]",
            "initial weights", "another rank's shard"),
    Planted("a rank updates with the next rank's gradients", FLAT, "(gradients)[self.rank]", "(gradients)[self.rank - 1]",
            "weights after 3 steps", "another rank's shard"),
    Planted("only weights that are trained are sent", DDP, "in module.parameters():", "in filter(lambda p: p.requires_grad, module.parameters()):",
            "frozen parameters", "not sent"),
    Planted("the ranks' gradients are rounded to float16 before the sum", DDP, ".double()", ".half().double()", "gradients", "rounded"),
    Planted("no_sync divides all the same", DDP, "        yield\n", "        yield\n        for p in self.parameters():\n"
            "            p.grad /= dist.get_world_size()\n", "accumulation in no_sync", "averaged twice"),
    Planted("gradients of an unused layer are ones", DDP, HAVING,
            "[setattr(p, 'grad', torch.ones_like(p)) for p in bucket if p.grad is None]", "unused on every rank", "unknown"),
    Planted("an optimizer zeroes the gradients of its own share alone", OPTIMIZER, "    def state_dict(",
            "    def zero_grad(self, set_to_none=True):\n        self.inner.zero_grad()\n\n    def state_dict(", "gradients", "kept"),
    Planted("the state is made anew in each step", OPTIMIZER, "        self.inner.step()", "        self.inner.state.clear()\n        self.inner.step()",
            "weights after 3 steps", "state lost"),
    Planted("the state is not loaded", OPTIMIZER, "self.inner.load_state_dict(state)", "self.inner.state.clear()", "state saved and loaded", "state lost"),
    Planted("a new learning rate is not passed on", OPTIMIZER, "        self.pass_on()\n", "", "another learning rate later", "another step size"),
    Planted("each rank updates its share with its own gradient", STEP, UPDATE, "            pass\n    optimizer.step()\n"
            "    for i, p in enumerate(model.parameters()):\n        dist.broadcast(p.data, i % dist.get_world_size())\n", "gradients", "never synchronised"),
    Planted("some weights are not gathered again after the update", FSDP, ITEMS,
            ITEMS.replace("self", "value = self.__dict__.setdefault(name, value) if 'deep' in name else value\n            self"),
            "training", "stale weights"),
    Planted("the output of a layer that is split by inputs is not summed", TENSOR, "summed, torch.clone)", "torch.clone, torch.clone)", "training",
            "partial output"),
    Planted("a rank has the next rank's columns", TENSOR, "chunk(world, 1)[rank]", "chunk(world, 1)[rank - 1]", "initial weights", "another rank's shard"),
    Planted("the update of a shard is added to the next one", FLAT, SHARES, "        old = self.parts(p.detach() for p in self.params)\n"
            "        whole = (torch.cat(old) + gathered(self.own.detach() - old[self.rank]).roll(-len(self.own)))[",
            "weights after 3 steps", "another rank's shard"),
    Planted("shards are joined in another order", FLAT, SHARES, SHARES.replace(")[", ").roll(-len(self.own))["), "weights after 3 steps", "another rank's shard"),
]  # fmt: skip
PUBLISHED = [
    Planted("the hook averages the parameter that it is given, not its gradient", DDP, MADE,
            f"        self.finish_gradient_synchronization = lambda: {AVERAGE.format('module')}\n{MADE}", "gradients", "never synchronised",
            "huggingface/picotron#39"),
    Planted("the loss is averaged over global tokens, and gradients once more over ranks", STEP, REDUCE,
            f"{REDUCE}            p.grad /= dist.get_world_size()\n", "training", "averaged twice", "pytorch/torchtitan#2323"),
    Planted("each part of the batch is averaged over its own tokens", STEP, "    dist.all_reduce(size)\n",
            "    size *= dist.get_world_size()\n", "unequal parts of the batch", "mean of means", "huggingface/transformers#34191"),
    Planted("a norm's weight under sequence parallelism is not reduced", SEQUENCE, REDUCE, "            pass\n", "gradients", "partial sum",
            "NVIDIA/Megatron-LM#1446"),
    Planted("most updated parameters are not broadcast", OPTIMIZER, "in self.owners:", "in self.owners[:2]:", "weights after 3 steps", "unmoved",
            "lodestone-rock/RamTorch#13"),
    Planted("data-parallel group of one rank", DDP, RUNS, RUNS.replace(",", ", group=[dist.new_group([r]) for r in range(dist.get_world_size())]"
            "[dist.get_rank()],"), "gradients", "never synchronised", "ByteDance-Seed/VeOmni#1059"),
    Planted("squared norms of complete gradients are added over the ranks", DDP, BEFORE,
            "    def clip_grad_norm(self, limit):\n"
            "        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()]) * dist.get_world_size() ** 0.5\n"
            "        nn.utils.clip_grads_with_norm_(list(self.parameters()), limit, norm)\n"
            f"        return norm\n\n{BEFORE}", "clipping by the norm", "norm of replicas", "modelscope/twinkle#290"),
    Planted("a copy of the gradient is reduced, and the gradient returned", TENSOR, "torch.clone, summed)", "torch.clone, lambda x: (summed(x), x)[1])",
            "gradients", "partial sum", "NovaSky-AI/SkyRL#1886"),
    Planted("gradients of replicas are added where they should be averaged", DDP, DIVIDE, "", "gradients", "summed", "pytorch/pytorch#160285"),
]  # fmt: skip
