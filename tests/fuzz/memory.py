"""What the generator writes about memory and autograd: views, writes in place, leaves, hooks, ``backward`` and ``torch.autograd.grad``
inside, custom functions, regions that are computed again. It plugs into the generator like :mod:`tests.fuzz.awkward`.

Its tensors are of a kind of their own, M: of shape (2, 3), so that each can be written into each. In the templates below, ``{M}`` stands
for one, ``{W}`` for one to write to, mostly not a leaf, and ``{F}``, ``{I}``, ``{S}`` for numbers and strings.
"""

from __future__ import annotations

from tests.fuzz.generator import Scope, Writer

#: The matrices that the program's globals hold.
MATRICES = ("leaf_0", "leaf_2", "leaf_part", "base_0", "base_1", "part")

HELPERS = """\
whole, leaf_2, leaf_part = torch.randn(4, 3), torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)[1:3].requires_grad_()
part = whole[1:3]
store, gradients, given = {}, [], []
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t ** 3
    @staticmethod
    def backward(ctx, gradient):
        (t,) = ctx.saved_tensors
        return 3 * t * t * gradient
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, other):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(other)
        ctx.mark_dirty(t)
        return t.mul_(2), other.sum()
    @staticmethod
    def backward(ctx, first, second):
        (other,) = ctx.saved_tensors
        return None if first is None else first * 2, torch.zeros_like(other) if second is None else second.expand(2, 3)
def branching(t, other):
    product = t * other
    if product.sum() > 1: product = product.clone()
    return product + t
def opaque(t):
    eval('1 + 1')
    return t
def hooked_here(t, hook):
    # Torch 2.13 crashes where it looks for the node of a view that was written to unrecorded.
    if t.requires_grad and (t.is_leaf or t.grad_fn is not None): t.register_hook(hook)
def hooked_leaf(t, hook):
    if t.requires_grad and t.is_leaf: t.register_post_accumulate_grad_hook(hook)
def retained(t):
    if t.requires_grad: t.retain_grad()
def differentiated(value, *leaves, **options):
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not value.requires_grad or not leaves: return
    found = torch.autograd.grad(value, leaves, allow_unused=True, **options)
    gradients.extend(gradient for gradient in found if gradient is not None)
    del gradients[:-6]
""".splitlines()

CHANGES = [
    "gradients.clear()",
    "store.clear()",
    "store.update((key, t.detach()) for key, t in store.items())",
    "torch.no_grad()(leaf_0.add_)(1.0)",
    "torch.no_grad()(whole.mul_)(2.0)",
    "torch.no_grad()(part.add_)(1.0)",
    "base_1.requires_grad_()",
    "leaf_2.requires_grad_(False)",
    "setattr(leaf_0, 'grad', None)",
    "setattr(leaf_2, 'grad', torch.ones(2, 3))",
    "globals().update(part=whole[2:4])",
    "globals().update(part=base_0.view(3, 2).t())",
    "globals().update(base_0=torch.randn(3, 2).t())",
    "globals().update(base_1=base_0)",
    "globals().update(leaf_0=torch.randn(2, 3, requires_grad=True))",
    "globals().update(leaf_0=leaf_2)",
]

#: What a call of the function may be given.
ARGUMENTS = (
    *MATRICES,
    "torch.randn(2, 3)",
    "torch.randn(2, 3)",
    "torch.randn(2, 3)",
    "torch.randn(2, 3, requires_grad=True)",
    "torch.randn(3, 2).t()",
    "torch.randn(4, 3)[1:3]",
    "torch.randn(3, 2, requires_grad=True).t()",
    "torch.randn(4, 3)[1:3].requires_grad_()",
    "whole[:2]",
    "base_0[:]",
    "leaf_0 * 2",
    "(leaf_0 * 2)[:]",
    "leaf_0.detach()",
    "store.get('a', base_0)",
)

_VIEWS = (
    "{M}.t().t()",
    "{M}[0].expand(2, 3)",
    "{M}[:, 1:2].expand(2, 3)",
    "{M}.view(3, 2).t()",
    "{M}.reshape(6).view(2, 3)",
    "{M}.view_as({M})",
    "{M}.detach()",
    "{M}.data",
    "{M}.real",
    "{M}[:]",
    "{M}.chunk(3, 1)[{I} % 3].expand(2, 3)",
    "{M}.unbind()[{I} % 2].expand(2, 3)",
    "{M}.split(1)[1].expand(2, 3)",
    "{M}.unsqueeze(0).squeeze(0)",
    "{M}.unflatten(1, (3, 1)).squeeze(2)",
    "{M}.as_strided((2, 3), (3, 1))",
    "{M}.as_strided((2, 3), (1, 2))",
    "{M}.contiguous()",
    "{M}.to(torch.float32)",
)
_VALUES = (
    "({M} + {M})",
    "({M} * {M})",
    "({M} - {F})",
    "{M}.sin()",
    "torch.tanh({M})",
    "{M}.clone()",
    "{M}.flip(0)",
    "{M}.roll(1, 1)",
    "{M}.abs().sqrt()",
    "{M}.softmax(1)",
    "{M}.cumsum(0)",
    "{M}.double().float()",
    "{M}.narrow(1, 0, 1).repeat(1, 3)",
    "torch.where({M} > 0, {M}, {M})",
    "{M}.masked_fill({M} > 0, {F})",
    "torch.nn.functional.dropout({M}, 0.5)",
    "(torch.rand_like({M}) * {M})",
    "(({M} @ {M}.t()) @ {M})",
    "({M} @ square)",
    "torch.nn.functional.linear({M}, square, state)",
    "({M}.sum() * {M})",
    "({M}.mean(0) + {M})",
    "torch.stack([{M}, {M}]).mean(0)",
    "torch.cat([{M}[:1], {M}[1:]])",
    "store.get({S}, {M})",
    "branching({M}, {M})",
    "opaque({M})",
    "Cube.apply({M})",
    "Doubled.apply({M}, {M})[0]",
    "torch.utils.checkpoint.checkpoint(lambda t, other={M}: (t * other).sin(), {M}, use_reentrant=False)",
    "torch.func.grad(lambda t: (t * {M}).sin().sum())({M})",
)
_WRITES = (
    "{W}.add_({M})",
    "{W}.mul_({F})",
    "{W}.sub_({M}, alpha=0.5)",
    "{W}.copy_({M})",
    "{W}.zero_()",
    "{W}.relu_()",
    "{W}.neg_()",
    "{W}.clamp_(-1, 1)",
    "{W}.normal_()",
    "{W}.fill_({M}[0, 0])",
    "{W}[0] = {M}[1]",
    "{W}[:, 1] += {M}[:, 0]",
    "{W}[{M} > 0] = 0.25",
    "{W}.masked_fill_({M} > 0, 0.1)",
    "{W}.view(-1)[3] = {M}.sum()",
    "{W}.index_add_(0, torch.tensor([0, 1]), {M})",
    "with torch.no_grad(): torch.add({M}, {M}, out={W})",
    "{W}.data.add_(1)",
    "{W}.detach().mul_(0.5)",
    "{W}.requires_grad_()",
    "{W}.detach_()",
    "{W}.t_().t_()",
    "{W}.detach().resize_(2, 3)",
    "{W}.set_({M})",
    "Doubled.apply({W}, {M})",
)
_SEEN = (
    "{M}.requires_grad",
    "{M}.is_leaf",
    "{M}._base is not None",
    "{M}.grad is None",
    "{M}.stride()",
    "{M} is {M}",
    "{M}.data_ptr() == {M}.data_ptr()",
    "len(store)",
)
_SEEN_NUMBERS = ("{M}.sum().item() > 0", "float({M}.sum())", "torch.rand(1).item()")
_GRADIENTS = (
    "hooked_here({M}, lambda g: None if g is None else g * 2)",
    "hooked_here({M}, lambda g: messages.append('hook'))",
    "hooked_leaf({M}, lambda t: messages.append('accumulated'))",
    "if {M}.requires_grad: (leaf_2 * {M}).register_hook(lambda g: messages.append('hook'))",
    "retained({M})",
    "{M}.grad = None",
    "leaf_0.grad = None",
    "(leaf_2 * {M}).sum().backward(retain_graph=True)",
    "if {M}.requires_grad: (leaf_2 * {M}).sum().backward()",
    "differentiated(({M} * {M}).sum(), leaf_0, leaf_2, create_graph={B})",
    "differentiated(({M} ** 2).sum(), leaf_0, {M}, create_graph=True, retain_graph=True)",
    "differentiated({M}.sum(), {M}, retain_graph=True)",
)
_OTHERS = (
    "store[{S}] = {M}",
    "store['a'] = {M}",
    "gradients.append({M}); del gradients[:-6]",
    "torch._dynamo.graph_break()",
    "torch.manual_seed({I})",
)
_HEADS = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.autograd.set_detect_anomaly(False):",
    "if {M}.requires_grad:",
    "for row in {M}[:2]:",
)


class _Parts:
    """What the fields of a template stand for: each is drawn anew."""

    def __init__(self, writer: Writer, scope: Scope, depth: int) -> None:
        self._writer, self._scope, self._depth = writer, scope, depth

    def __getitem__(self, kind: str) -> str:
        made = self._scope.assignable.get("M")
        if kind == "W":
            return self._writer.pick(*made) if made and self._writer.chance(0.9) else self["M"]
        return self._writer.expression(kind, self._scope, self._depth)


def matrix(writer: Writer, scope: Scope, depth: int) -> str:
    """An expression of kind M."""
    return writer.pick(*(_VIEWS if writer.chance(0.4) else _VALUES)).format_map(_Parts(writer, scope, depth))


def expression(writer: Writer, kind: str, scope: Scope, depth: int) -> str | None:
    """An expression about memory; None where there is none of this kind."""
    options = {
        "T": ("{M}",),
        "B": ("{M}.requires_grad", *(("({M}.sum() > 0)",) if writer.breaks else ())),
        "LT": ("[{M}, {M}]", "list({M}.unbind())", "[*{M}.chunk(3, 1)]"),
    }
    found = options.get(kind)
    return writer.pick(*found).format_map(_Parts(writer, scope, depth)) if found else None


def statement(writer: Writer, scope: Scope) -> list[str]:
    """A statement about memory, without a block of its own."""
    parts = _Parts(writer, scope, 0)
    if writer.chance(0.5):
        known = scope.assignable.get("M", [])
        name = writer.pick(*known) if known and writer.chance(0.15) else writer.name("m")
        line = f"{name} = {matrix(writer, scope, writer.rng.choice((0, 0, 1)))}"
        scope.add("M", name)
        scope.add("T", name, assignable=False)
        return [line]
    (templates,) = writer.rng.choices((_WRITES, _SEEN, _GRADIENTS, _OTHERS), (10, 4, 4, 3))
    template = writer.pick(*templates)
    if templates is _SEEN:
        if writer.breaks and writer.chance(0.3):
            template = writer.pick(*_SEEN_NUMBERS)
        template = f"messages.append({template}); del messages[:-12]"
    line = template.format_map(parts)
    return ["with torch.no_grad():", "    " + line] if templates is _WRITES and writer.chance(0.3) else [line]


def head(writer: Writer, scope: Scope) -> list[str]:
    """The head of a block about memory."""
    return [writer.pick(*_HEADS).format_map(_Parts(writer, scope, 0))]
