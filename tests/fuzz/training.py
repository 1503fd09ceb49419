"""Random training: a module of random layers, an optimizer with a schedule, and a step, which is compiled whole or its model only.

What such a program has summed up in gradients comes back in its parameters, so it says how far numbers may lie apart: a graph break, or
a model compiled alone, adds up the gradient of a parameter in another order than eager (docs/limits.md). It calls ``backward`` itself.
"""

from __future__ import annotations

import random

CLASSES = """\
import copy
import random
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
tolerance = 2e-3
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 12)
    def forward(self, x):
        u, v = self.inner(x).chunk(2, -1)
        return u * torch.sigmoid(v)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.inner = nn.Linear(6, 6)
        self.inner.weight = self.weight
    def forward(self, x):
        return functional.linear(self.inner(x).tanh(), self.weight.t())
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.shapes = 0, []
    def forward(self, x):
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return x * (1 + 0.01 * (self.calls % 2))
class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.cell = None, nn.GRUCell(6, 6)
    def forward(self, x):
        state = self.state if self.state is not None and self.state.shape == x.shape else torch.zeros_like(x)
        state = self.cell(x, state)
        self.state = state.detach()
        return state
""".splitlines()

_LAYERS = (
    "nn.Linear(6, 6)",
    "nn.BatchNorm1d(6)",
    "nn.LayerNorm(6)",
    "nn.Dropout(0.3)",
    "nn.AlphaDropout(0.2)",
    "nn.GELU()",
    "nn.PReLU()",
    "nn.ReLU(inplace=True)",
    "nn.Identity()",
    "nn.Sequential(nn.Linear(6, 6), nn.Tanh())",
    "nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))",
    "nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))",
    "Gate()",
    "Tied()",
    "Counting()",
    "Remembering()",
)
_BEFORE = (
    "self.steps += 1",
    "self.average.lerp_(x.mean(0).detach(), 0.1)",
    "self.average = self.average * 0.9 + 0.1 * x.mean(0).detach()",
    "x = x + 0.1 * self.average",
    "x = x * self.scale",
    "x = x.clone(); x[:, 0] = 0",
    "x = functional.normalize(x, dim=-1)",
    "x = torch.cat([x, x.flip(0)])[: len(x)]",
    "x = x + torch.randn_like(x) * 0.01 if self.training else x",
    "if self.training and self.calls % 3 == 0: x = x * 1.1",
    "if self.steps > 2: x = x - 0.01",
    "self.last = x.detach()",
    "self.seen = getattr(self, 'seen', 0) + float(len(x))",
    "with torch.no_grad(): self.scale.clamp_(0.5, 2)",
)
_USES = (
    "x = layer(x)",
    "x = x + layer(x)",
    "x = layer(x.clone())",
    "x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)",
    "x = layer(x) if random.random() > 0.2 or not self.training else x",
)
_AFTER = (
    "self.hidden = x",
    "if x.requires_grad: x.register_hook(lambda gradient: gradient * 0.5)",
    "if x.requires_grad: x.retain_grad()",
    "x = x[:]",
)
_OPTIMIZERS = (
    "SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "SGD(net.parameters(), lr=0.05, weight_decay=0.1)",
    "SGD([{'params': net.head.parameters(), 'lr': 0.1}, {'params': net.layers.parameters()}], lr=0.01, nesterov=True, momentum=0.5)",
    "AdamW(net.parameters(), lr=0.01)",
    "AdamW(net.parameters(), lr=0.01, foreach=True)",
    "AdamW(net.parameters(), lr=torch.tensor(0.01), fused=False)",
    "Adam(net.parameters(), lr=0.01, amsgrad=True)",
    "Adam(net.parameters(), lr=0.01, fused=True)",
    "NAdam(net.parameters(), lr=0.01)",
    "RAdam(net.parameters(), lr=0.01)",
    "Adamax(net.parameters())",
    "Adagrad(net.parameters(), lr=0.05)",
    "Adadelta(net.parameters())",
    "RMSprop(net.parameters(), lr=0.01)",
    "ASGD(net.parameters())",
    "Rprop(net.parameters())",
)
_SCHEDULES = (
    "lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "lr_scheduler.CosineAnnealingLR(optimizer, 8)",
    "lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))",
    "lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)",
    "lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)",
)
_LOSSES = (
    "functional.cross_entropy(out, y)",
    "functional.cross_entropy(out, y, label_smoothing=0.1)",
    "functional.mse_loss(out, functional.one_hot(y, 3).float())",
    "(out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]).mean()",
    "functional.nll_loss(out.log_softmax(1), y, weight=torch.tensor([1.0, 2.0, 3.0]))",
    "functional.kl_div(out.log_softmax(1), functional.one_hot(y, 3).float(), reduction='batchmean')",
)
_ZEROINGS = (
    "optimizer.zero_grad()",
    "optimizer.zero_grad(set_to_none=False)",
    "net.zero_grad()",
    "if number % 2 == 0: optimizer.zero_grad()",
)
_MORE_LOSSES = (
    "loss = loss + 0.01 * sum(p.abs().sum() for p in net.parameters())",
    "(slope,) = torch.autograd.grad(out.sum(), net.head.weight, create_graph=True); loss = loss + 0.1 * slope.square().sum()",
    "other = x.detach().requires_grad_(); (slope,) = torch.autograd.grad(functional.cross_entropy(model(other), y), other); "
    "loss = loss + functional.cross_entropy(model(x + 0.1 * slope.sign()), y)",
    "with torch.no_grad(): target = teacher(x)\nloss = loss + functional.mse_loss(out, target)",
)
_CLIPPING = (
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "history.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))",
    "nn.utils.clip_grad_value_(net.parameters(), 0.1)",
    "for p in net.parameters():\n    if p.grad is not None: p.grad.add_(0.001 * torch.randn_like(p))",
)
_STEPS = (
    "optimizer.step()",
    "optimizer.step()",
    "if number % 2: optimizer.step()",
    "optimizer.step(); best['steps'] = best.get('steps', 0) + 1",
    "if torch.isfinite(loss): optimizer.step()",
)
_AFTERWARDS = (
    "schedule.step(loss.detach()) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else schedule.step()",
    "with torch.no_grad():\n    for a, b in zip(teacher.parameters(), net.parameters()): a.mul_(0.9).add_(b, alpha=0.1)",
    "if loss.item() < best.get('loss', 10): best['loss'] = loss.item()",
    "history.append(loss.detach())",
    "if number == 2: optimizer.param_groups[0]['lr'] *= 0.5",
)
_CHANGES = (
    "net.load_state_dict(copy.deepcopy(teacher.state_dict()))",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "net.head.weight.requires_grad_(False)",
    "net.head._forward_hooks.update({0: lambda module, args, result: result * 1.5})",
    "net.head = nn.Linear(6, 3)",
    "net.double().float()",
    "net.eval()",
)


def program(rng: random.Random) -> str:
    """The source text of a program that trains."""

    def some(lines: tuple[str, ...], most: int) -> list[str]:
        chosen = rng.sample(lines, rng.randint(0, most))
        return [line for text in chosen for line in text.split("\n")]

    def indented(lines: list[str], by: int) -> list[str]:
        return [" " * by + line for line in lines]

    layers = [rng.choice(_LAYERS) for _ in range(rng.randint(2, 5))]
    net = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.layers = nn.ModuleList([{', '.join(layers)}])",
        "        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))",
        "        self.register_buffer('average', torch.zeros(6))",
        "        self.register_buffer('steps', torch.zeros((), dtype=torch.long))",
        "        self.calls = 0",
        "    def forward(self, x):",
        "        self.calls += 1",
        *indented(some(_BEFORE, 4), 8),
        "        for number, layer in enumerate(self.layers):",
        f"            {rng.choice(_USES)}",
        *indented(some(_AFTER, 1), 8),
        "        return self.head(x)",
        "net = Net()",
        f"optimizer = torch.optim.{rng.choice(_OPTIMIZERS)}",
        f"schedule = {rng.choice(_SCHEDULES)}",
        "teacher, history, best = copy.deepcopy(net), [], {}",
    ]
    whole = rng.random() < 0.6
    body = [
        *some(("net.train(number % 3 != 2)",), 1),
        rng.choice(_ZEROINGS),
        "out = model(x)",
        f"loss = {rng.choice(_LOSSES)}",
        *some(_MORE_LOSSES, 1),
        "loss.backward()",
        *some(_CLIPPING, 1),
        rng.choice(_STEPS),
        *some(_AFTERWARDS, 3),
        "return loss.detach(), out.detach(), out.requires_grad",
    ]
    step = ["def step(model, x, y, number):", *indented(body, 4)]
    if whole:
        step += ["def function(x, y, number):", "    return step(net, x, y, number)"]
    else:
        step.append("function = net")
    for number in range(6):
        size = rng.choice((4, 4, 4, 5, 7))
        step += [
            f"def call_{number}(run):",
            *indented([rng.choice(_CHANGES)] if number > 1 and rng.random() < 0.2 else [], 4),
            f"    x, y = torch.randn({size}, 6), torch.randint(3, ({size},))",
            f"    return run(x, y, {number})" if whole else f"    return step(run, x, y, {number})",
        ]
    return "\n".join([*CLASSES, *net, *step]) + "\n"
