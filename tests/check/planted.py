"""Small parallel implementations as a student would write them, mistakes planted in them, and bugs that other systems
have published, rebuilt small. Each mistake has the cause that `check` must name."""

from types import ModuleType
from typing import Any, NamedTuple

DDP = """
import torch
import torch.distributed as dist
from contextlib import contextmanager
from torch import nn


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

OPTIMIZER = """
import torch
import torch.distributed as dist


class StudentSharded(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **options):
        params = list(params)
        super().__init__(params, options)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.owners = [(p, i % world) for i, p in enumerate(params)]
        self.inner = optimizer_cls([p for p, owner in self.owners if owner == rank], **options)

    def step(self, closure=None):
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        for p, owner in self.owners:
            dist.broadcast(p.detach(), owner)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
"""

STEP = """
import torch
import torch.distributed as dist
import torch.nn.functional as F


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

TENSOR = """
import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient)


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
    module.last = Between(Copy.apply, module.last, lambda x: x)
    module.head = Between(lambda x: x, module.head, Sum.apply)
    return module
"""

FSDP = """
import torch
import torch.distributed as dist
from torch import nn


class StudentFSDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.rank, self.world = module, dist.get_rank(), dist.get_world_size()
        self.whole = dict(module.named_parameters())
        self.shapes = {name: p.shape for name, p in self.whole.items()}
        for p in self.whole.values():
            dist.broadcast(p.detach(), 0)
        self.shards = {name: nn.Parameter(self.part(p.detach()), p.requires_grad) if p.dim() > 1 else p
                       for name, p in self.whole.items()}
        self.free()

    def part(self, x):
        size = -(-x.numel() // self.world)
        return nn.functional.pad(x.flatten(), (0, size * self.world - x.numel())).chunk(self.world)[self.rank].clone()

    def free(self):
        for name, p in self.whole.items():
            if p is not self.shards[name]:
                p.grad, p.data = None, torch.empty(0, dtype=p.dtype)

    def gather_full_params(self):
        found = {}
        for name, p in self.shards.items():
            found[name] = p.detach()
            if p is not self.whole[name]:
                parts = [torch.empty_like(p) for _ in range(self.world)]
                dist.all_gather(parts, p.detach())
                found[name] = torch.cat(parts)[: self.shapes[name].numel()].view(self.shapes[name])
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

IN_PLACE = """
import torch
import torch.distributed as dist


def fsdp_in_place(module):
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = {p: p.shape for p in module.parameters()}

    def part(x):
        return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % world)).chunk(world)[rank].clone()

    def gather(*_):
        for p, shape in shapes.items():
            parts = [torch.empty_like(p) for _ in range(world)]
            dist.all_gather(parts, p.detach())
            p.grad, p.data = None, torch.cat(parts)[: shape.numel()].view(shape)

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

FLAT = """
import torch
import torch.distributed as dist


class StudentFlat(torch.optim.Optimizer):
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
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.own.detach().copy_(self.parts(p.detach() for p in self.params)[self.rank])
        self.own.grad = self.parts(torch.zeros_like(p) if p.grad is None else p.grad for p in self.params)[self.rank].clone()
        self.inner.step()
        parts = [torch.empty_like(self.own) for _ in range(self.world)]
        dist.all_gather(parts, self.own.detach())
        whole = torch.cat(parts)[: sum(self.sizes)]
        for p, piece in zip(self.params, whole.split(self.sizes)):
            p.detach().copy_(piece.view_as(p))

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
"""

SEQUENCE = f"""{TENSOR}

def sequence_parallel(module):
    def finish():
        for p in (module.norm.weight, module.norm.bias):
            dist.all_reduce(p.grad)

    tensor_parallel(module)
    module.norm = Between(Scatter.apply, module.norm, Gather.apply)
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


DIVIDE = "            flat /= dist.get_world_size()\n"
REDUCE = "            dist.all_reduce(p.grad)\n"
SUM_BACK = "        dist.all_reduce(x)\n        return x\n\n    @staticmethod\n    def backward(ctx, gradient):\n        return gradient\n"
COPY_BACK = (
    "        gradient = gradient.contiguous().clone()\n        dist.all_reduce(gradient)\n        return gradient"
)
MISTAKES = [
    Planted("the mean is divided once more", DDP, DIVIDE, DIVIDE * 2, "gradients", "averaged twice"),
    Planted("nothing is reduced", DDP, "            self.launch(bucket)", "            pass", "gradients",
            "never synchronised"),
    Planted("one bucket is forgotten", DDP, "        for bucket in self.buckets:\n", "        for bucket in self.buckets[1:]:\n",
            "gradients", "never synchronised"),
    Planted("rank 0's gradients are sent to all", DDP, "dist.all_reduce(flat, async_op=True)",
            "dist.broadcast(flat, 0, async_op=True)", "gradients", "another rank's"),
    Planted("nobody waits", DDP, "            work.wait()\n", "            __import__('time').sleep(0.02)\n", "waits for what it launches", "never synchronised"),
    Planted("a bucket is copied back a step later", DDP, DIVIDE, DIVIDE + "            if bucket[0] is self.buckets[1][0]:\n"
            "                flat, self.last = getattr(self, 'last', flat), flat\n", "gradients", "stale"),
    Planted("the mean is added to the rank's own", DDP, "p.grad.copy_(piece", "p.grad.add_(piece", "gradients", "added to"),
    Planted("slices go back in another order", DDP, "in zip(bucket, flat",
            "in zip(bucket[:2] + bucket[:1:-1] if len(bucket[0]) == 11 else bucket, flat",
            "gradients", "another tensor's"),
    Planted("a buffer in single precision", DDP, ".double()", ".float()", "gradients", "rounded"),
    Planted("gradients are clipped before the reduction", DDP, "        for bucket in self.buckets:\n",
            "        nn.utils.clip_grad_norm_(self.parameters(), 0.1)\n        for bucket in self.buckets:\n", "gradients", "scaled"),
    Planted("the sum is divided by another number", DDP, DIVIDE, "            flat /= 8\n", "gradients", "factor"),
    Planted("weights are not sent", DDP, "            dist.broadcast(parameter.detach(), 0)", "            pass",
            "initial weights", "not sent"),
    Planted("buffers are not sent", DDP, "            dist.broadcast(buffer, 0)", "            pass", "buffers", "not sent"),
    Planted("a backward pass that mixes ranks", DDP, "        trained =",
            "        module.deep[1].register_full_backward_hook(lambda m, x, y: (dist.all_reduce(x[0]), x)[1])\n        trained =",
            "gradients", "from here on"),
    Planted("updates are not sent", OPTIMIZER, "            dist.broadcast(p.detach(), owner)", "            pass",
            "weights after 3 steps", "unmoved"),
    Planted("gradients of split weights are three times as large", TENSOR, SUM_BACK, SUM_BACK.replace("return g", "return 3 * g"),
            "gradients", "factor"),
    Planted("the largest of the ranks' gradients is taken", DDP, "dist.all_reduce(flat, async_op=True)",
            "dist.all_reduce(flat, dist.ReduceOp.MAX, async_op=True)", "gradients", "not summed"),
    Planted("weights are averaged after the update", STEP, REDUCE + "    optimizer.step()\n", "            p.grad *= dist.get_world_size()\n"
            "    optimizer.step()\n    for p in model.parameters():\n        dist.all_reduce(p.data)\n        p.data /= dist.get_world_size()\n",
            "AdamW instead of SGD", "averaged weights"),
    Planted("an optimizer averages weights in its step", REDUCING, "            model.finish_gradient_synchronization()\n            super().step(closure)\n",
            "            super().step(closure)\n            for p in module.parameters():\n                dist.all_reduce(p.data)\n"
            "                p.data /= dist.get_world_size()\n", "AdamW instead of SGD", "averaged weights"),
    Planted("a step does not zero the gradients", STEP, "    optimizer.zero_grad()\n", "", "gradients", "kept"),
    Planted("a copy of the weights is not loaded", FLAT, "        self.own.detach().copy_(self.parts(p.detach() for p in self.params)[self.rank])\n", "",
            "state saved and loaded", "own copy"),
    Planted("rank 1's weights are sent", DDP, "            dist.broadcast(parameter.detach(), 0)", "            dist.broadcast(parameter.detach(), 1)",
            "initial weights", "wrong source"),
    Planted("weights are averaged before the next forward", DDP, "        for bucket in self.buckets:\n            self.launch(bucket)",
            "        self.module.register_forward_pre_hook(lambda *_: [(dist.all_reduce(p.data), p.data.div_(dist.get_world_size()))"
            " for p in self.module.parameters()] and None)", "gradients", "averaged weights"),
    Planted("weights that were gathered before the update are used again", FSDP, "().items():\n            self.whole",
            "().items():\n            value = self.__dict__.setdefault(name, value.clone())\n            self.whole", "training", "stale weights"),
    Planted("a rank keeps the next rank's shard", FSDP, ".chunk(self.world)[self.rank]", ".chunk(self.world)[self.rank - 1]",
            "initial weights", "another rank's shard"),
    Planted("a rank updates with the next rank's gradients", FLAT, "for p in self.params)[self.rank].clone()\n        self.inner.step",
            "for p in self.params)[self.rank - 1].clone()\n        self.inner.step", "weights after 3 steps", "another rank's shard"),
    Planted("only weights that are trained are sent", DDP, "in module.parameters():", "in filter(lambda p: p.requires_grad, module.parameters()):",
            "frozen parameters", "not sent"),
    Planted("the ranks' gradients are rounded to float16 before the sum", DDP, ".double()", ".half().double()", "gradients", "rounded"),
    Planted("no_sync divides all the same", DDP, "        yield\n", "        yield\n        for p in self.parameters():\n"
            "            p.grad /= dist.get_world_size()\n", "accumulation in no_sync", "averaged twice"),
    Planted("gradients of an unused layer are ones", DDP, "bucket = [p for p in bucket if p.grad is not None]",
            "[setattr(p, 'grad', torch.ones_like(p)) for p in bucket if p.grad is None]", "unused on every rank", "unknown"),
    Planted("an optimizer zeroes the gradients of its own share alone", OPTIMIZER, "    def state_dict(",
            "    def zero_grad(self, set_to_none=True):\n        self.inner.zero_grad()\n\n    def state_dict(", "gradients", "kept"),
    Planted("the state is made anew in each step", OPTIMIZER, "        self.inner.step()", "        self.inner.state.clear()\n        self.inner.step()",
            "weights after 3 steps", "state lost"),
    Planted("the state is not loaded", OPTIMIZER, "self.inner.load_state_dict(state)", "self.inner.state.clear()",
            "state saved and loaded", "state lost"),
    Planted("a new learning rate is not passed on", OPTIMIZER, '        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]\n', "",
            "another learning rate later", "another step size"),
    Planted("an optimizer that the target returns has another learning rate", OPTIMIZED, "lr=lr", "lr=2 * lr", "weights after 3 steps",
            "another step size"),
    Planted("each rank updates its share with its own gradient", STEP, REDUCE + "    optimizer.step()\n", "            pass\n    optimizer.step()\n"
            "    for i, p in enumerate(model.parameters()):\n        dist.broadcast(p.data, i % dist.get_world_size())\n", "gradients", "never synchronised"),
    Planted("some weights are not gathered again after the update", FSDP, "().items():\n            self.whole",
            "().items():\n            value = self.__dict__.setdefault(name, value) if 'deep' in name else value\n            self.whole",
            "training", "stale weights"),
    Planted("the output of a layer that is split by inputs is not summed", TENSOR, "        dist.all_reduce(x)\n", "", "training", "partial output"),
    Planted("a rank has the next rank's columns", TENSOR, "chunk(world, 1)[rank]", "chunk(world, 1)[rank - 1]", "initial weights", "another rank's shard"),
    Planted("the update of a shard is added to the next one", FLAT, "        dist.all_gather(parts, self.own.detach())\n        whole = torch.cat(parts)[",
            "        old = self.parts(p.detach() for p in self.params)\n        dist.all_gather(parts, self.own.detach() - old[self.rank])\n"
            "        whole = (torch.cat(old) + torch.cat(parts[1:] + parts[:1]))[", "weights after 3 steps", "another rank's shard"),
    Planted("shards are joined in another order", FLAT, "torch.cat(parts)[", "torch.cat(parts[1:] + parts[:1])[",
            "weights after 3 steps", "another rank's shard"),
]  # fmt: skip
PUBLISHED = [
    Planted("the hook averages the parameter that it is given, not its gradient", DDP,
            "        trained =", "        self.finish_gradient_synchronization = lambda: [(dist.all_reduce(p.data),"
            " p.data.div_(dist.get_world_size())) for p in module.parameters()]\n        trained =", "gradients", "never synchronised", "huggingface/picotron#39"),
    Planted("the loss is averaged over global tokens, and gradients once more over ranks", STEP, REDUCE,
            REDUCE + "            p.grad /= dist.get_world_size()\n", "training", "averaged twice", "pytorch/torchtitan#2323"),
    Planted("each part of the batch is averaged over its own tokens", STEP, "    dist.all_reduce(size)\n",
            "    size *= dist.get_world_size()\n", "unequal parts of the batch", "mean of means", "huggingface/transformers#34191"),
    Planted("a norm's weight under sequence parallelism is not reduced", SEQUENCE,
            "            dist.all_reduce(p.grad)\n", "            pass\n", "gradients", "partial sum", "NVIDIA/Megatron-LM#1446"),
    Planted("most updated parameters are not broadcast", OPTIMIZER, "        for p, owner in self.owners:",
            "        for p, owner in self.owners[:2]:", "weights after 3 steps", "unmoved", "lodestone-rock/RamTorch#13"),
    Planted("data-parallel group of one rank", DDP, "dist.all_reduce(flat, async_op=True)",
            "dist.all_reduce(flat, group=[dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()],"
            " async_op=True)", "gradients", "never synchronised", "ByteDance-Seed/VeOmni#1059"),
    Planted("squared norms of complete gradients are added over the ranks", DDP, "    @contextmanager",
            "    def clip_grad_norm(self, limit):\n        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])\n"
            "        norm = norm * dist.get_world_size() ** 0.5\n"
            "        nn.utils.clip_grads_with_norm_(list(self.parameters()), limit, norm)\n        return norm\n\n    @contextmanager",
            "clipping by the norm", "norm of replicas", "modelscope/twinkle#290"),
    Planted("a copy of the gradient is reduced, and the gradient returned", TENSOR, COPY_BACK,
            "        dist.all_reduce(gradient.contiguous().clone())\n        return gradient", "gradients", "partial sum",
            "NovaSky-AI/SkyRL#1886"),
    Planted("gradients of replicas are added where they should be averaged", DDP, DIVIDE, "", "gradients", "summed",
            "pytorch/pytorch#160285"),
]  # fmt: skip
