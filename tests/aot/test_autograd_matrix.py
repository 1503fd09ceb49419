"""What autograd offers inside a function (custom Functions, hooks, torch.func, checkpoint, autocast …): eager against compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.aot.alias_programs import Inputs, Program, compare

Tensor = torch.Tensor
PROGRAMS: list[Program] = []


def one_leaf() -> Inputs:
    return [torch.randn(3, 4, requires_grad=True)]


def one_nonleaf() -> Inputs:
    root = torch.randn(3, 4, requires_grad=True)
    value = root * 1.5
    value.root = root  # type: ignore[attr-defined]
    return [value]


def one_plain() -> Inputs:
    return [torch.randn(3, 4)]


def two_leaves() -> Inputs:
    return [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]


def plain_and_leaf() -> Inputs:
    return [torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)]


def matrices() -> Inputs:
    return [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]


def half_leaves() -> Inputs:
    return [torch.randn(4, 4, dtype=torch.bfloat16).requires_grad_(), torch.randn(4, 4).bfloat16().requires_grad_()]


def float16_leaves() -> Inputs:
    return [torch.randn(4, 4).half().requires_grad_(), torch.randn(4, 4).half().requires_grad_()]


def complex_leaves() -> Inputs:
    make = torch.randn(4, 4, dtype=torch.complex64)
    return [make.requires_grad_(), torch.randn(4, 4, dtype=torch.complex64).requires_grad_()]


def integers() -> Inputs:
    return [torch.arange(12).reshape(3, 4)]


def program(make: Any, *more: Any, later: Any = None, **options: Any) -> Any:
    """Add a program to the matrix, once for each way of making its inputs."""

    def add(function: Any) -> Any:
        for item in (make, *more):
            name = f"{function.__name__}-{item.__name__}"
            settings = {**options, **({"later": later} if later is not None else {})}
            PROGRAMS.append(Program(function, item, name=name, **settings))
        return function

    return add


# --- autograd.Function ------------------------------------------------------------------------------------------------


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Any:
        return x.sin() * factor, x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, factor = inputs
        ctx.save_for_backward(x)
        ctx.factor = factor
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        # Not the derivative, so that it shows who is asked.
        return gradient * x.cos() * ctx.factor * 2, None


@program(one_leaf, one_nonleaf, one_plain)
def function_with_setup(x: Tensor) -> Any:
    return WithSetup.apply(x, 3.0)


class WritesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@program(one_leaf, one_plain, one_nonleaf)
def function_marks_dirty(x: Tensor) -> Any:
    y = x * 1
    z = WritesInput.apply(y)
    return y, z, y.sin()


@program(one_leaf, one_nonleaf, one_plain)
def function_marks_input_dirty(x: Tensor) -> Any:
    return WritesInput.apply(x)


class WritesUnmarked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@program(one_leaf, one_nonleaf, one_plain)
def function_writes_unmarked(x: Tensor) -> Any:
    return WritesUnmarked.apply(x)


class AsksNeeds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y if ctx.needs_input_grad[0] else None)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        left = gradient * y if ctx.needs_input_grad[0] else None
        right = gradient * x if ctx.needs_input_grad[1] else None
        return left, right


@program(two_leaves, plain_and_leaf)
def function_asks_needs(x: Tensor, y: Tensor) -> Any:
    return AsksNeeds.apply(x, y)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x


@program(one_leaf)
def function_once_differentiable(x: Tensor) -> Any:
    return Once.apply(x)


@program(one_leaf)
def function_once_differentiated_twice(x: Tensor) -> Any:
    y = Once.apply(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g.sin()


class WithJvp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return tangent * 7


@program(one_leaf)
def function_with_jvp_unused(x: Tensor) -> Any:
    return WithJvp.apply(x)


class NoMaterialize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        if a is None:
            return b * 10
        return a * 100 if b is None else a + b


@program(one_leaf)
def function_without_zeros(x: Tensor) -> Any:
    _, b = NoMaterialize.apply(x)
    return b.sin()


@program(one_leaf)
def function_without_zeros_both(x: Tensor) -> Any:
    return NoMaterialize.apply(x)


class ReturnsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


@program(one_leaf, one_nonleaf)
def function_returns_input(x: Tensor) -> Any:
    return ReturnsInput.apply(x) * x


@program(one_leaf, one_nonleaf)
def function_output_is_input(x: Tensor) -> Any:
    return ReturnsInput.apply(x)


class ReturnsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.view(3, 4) * 2


def write_output(result: Any, inputs: Inputs) -> Any:
    return result.mul_(2)


@program(one_leaf, one_nonleaf)
@program(one_leaf, later=write_output)
def function_output_is_view(x: Tensor) -> Any:
    return ReturnsView.apply(x * 1)


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y


@program(one_leaf)
@program(one_leaf, later=write_output)
def function_saves_output(x: Tensor) -> Any:
    return SavesOutput.apply(x)


@program(one_leaf)
def function_same_tensor_twice(x: Tensor) -> Any:
    return AsksNeeds.apply(x, x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-1, 1)


@program(one_leaf)
def function_in_checkpoint(x: Tensor) -> Any:
    return checkpoint(lambda v: Straight.apply(v.sin()), x, use_reentrant=False)


class Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, items: Any) -> Any:
        ctx.items = items
        ctx.shape = x.shape
        return x * items["a"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.reshape(ctx.shape) * (ctx.items["a"] + 1), None


@program(one_leaf)
def function_keeps_attributes(x: Tensor) -> Any:
    return Attribute.apply(x, {"a": 3.0})


# --- hooks ------------------------------------------------------------------------------------------------------------


@program(one_leaf, one_nonleaf)
def hook_scales(x: Tensor) -> Any:
    y = x.sin()
    y.register_hook(lambda g: g * 10)
    return y.exp()


@program(one_leaf, one_nonleaf)
def hook_on_input(x: Tensor) -> Any:
    x.register_hook(lambda g: g * 10)
    return x.exp()


@program(one_leaf)
def hook_removed(x: Tensor) -> Any:
    y = x.sin()
    y.register_hook(lambda g: g * 10).remove()
    return y.exp()


@program(one_leaf)
def hook_on_node(x: Tensor) -> Any:
    y = x.sin()
    y.grad_fn.register_hook(lambda gi, go: (gi[0] * 3,))  # type: ignore[union-attr]
    return y.exp()


@program(one_leaf)
def prehook_on_node(x: Tensor) -> Any:
    y = x.sin()
    y.grad_fn.register_prehook(lambda go: (go[0] * 3,))  # type: ignore[union-attr]
    return y.exp()


@program(one_leaf)
def hook_appends(x: Tensor) -> Any:
    seen: list[Tensor] = []
    y = x.sin()
    y.register_hook(seen.append)
    return y.exp()


@program(one_leaf)
def hook_on_returned(x: Tensor) -> Any:
    y = x.sin()
    y.register_hook(lambda g: g * 10)
    return y


@program(one_leaf)
def accumulate_hook(x: Tensor) -> Any:
    x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))  # type: ignore[union-attr]
    return x.exp()


@program(one_leaf)
def retains_inside(x: Tensor) -> Any:
    y = x.sin()
    y.retain_grad()
    return y.exp()


@program(one_leaf)
def multi_grad_hook(x: Tensor) -> Any:
    y, z = x.sin(), x.cos()
    torch.autograd.graph.register_multi_grad_hook((y, z), lambda gs: None)
    return y * z


def _layer() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Hooked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = _layer()
        first = self.inner[0]  # type: ignore[index]
        if kind == "forward":
            first.register_forward_hook(lambda m, a, o: o * 2)
        elif kind == "pre":
            first.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        elif kind == "keyword":
            first.register_forward_pre_hook(lambda m, a, k: ((a[0] * 3,), k), with_kwargs=True)
        elif kind == "backward":
            first.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,) if gi[0] is not None else None)
        elif kind == "backward pre":
            first.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _hooked(kind: str) -> None:
    module = Hooked(kind)

    def run(x: Tensor, *parameters: Tensor) -> Any:
        return module(x)

    def leaf_and_parameters() -> Inputs:
        module.zero_grad()
        return [torch.randn(3, 4, requires_grad=True), *module.parameters()]

    def plain_and_parameters() -> Inputs:
        module.zero_grad()
        return [torch.randn(3, 4), *module.parameters()]

    run.__name__ = f"module_hook_{kind.replace(' ', '_')}"
    program(leaf_and_parameters, plain_and_parameters)(run)


for _kind in ("forward", "pre", "keyword", "backward", "backward pre"):
    _hooked(_kind)


# --- torch.func and forward mode --------------------------------------------------------------------------------------


def energy(x: Tensor) -> Tensor:
    return (x.sin() * x**2).sum()


@program(one_leaf, one_plain, one_nonleaf)
def func_grad(x: Tensor) -> Any:
    return grad(energy)(x)


@program(one_leaf, one_plain)
def func_grad_of_grad(x: Tensor) -> Any:
    return grad(lambda v: grad(energy)(v).pow(2).sum())(x)


@program(one_leaf)
def func_grad_and_value(x: Tensor) -> Any:
    return grad_and_value(energy)(x)


@program(one_leaf, one_plain)
def func_vjp(x: Tensor) -> Any:
    value, pull = vjp(lambda v: v.exp(), x)
    return value, pull(torch.ones_like(x))


@program(one_leaf, one_plain)
def func_jvp(x: Tensor) -> Any:
    return jvp(lambda v: v.exp() * v, (x,), (torch.ones_like(x),))


@program(one_leaf, one_plain)
def func_vmap(x: Tensor) -> Any:
    return vmap(lambda row: (row * row).sum() * row.exp())(x)


@program(one_leaf)
def func_vmap_of_grad(x: Tensor) -> Any:
    return vmap(grad(lambda row: row.sin().sum()))(x)


@program(one_leaf, one_plain)
def func_hessian(x: Tensor) -> Any:
    return hessian(lambda v: (v.sin() * v).sum())(x[0])


@program(one_leaf, one_plain)
def func_jacobians(x: Tensor) -> Any:
    return jacrev(torch.sin)(x[0]), jacfwd(lambda v: v**3)(x[0])


@program(one_leaf)
def func_functional_call(x: Tensor) -> Any:
    module = nn.Linear(4, 3)
    with torch.no_grad():
        parameters = {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}
    return functional_call(module, parameters, (x,))


LINEAR = nn.Linear(4, 4)


@program(matrices)
def func_functional_call_outer(x: Tensor, w: Tensor) -> Any:
    return functional_call(LINEAR, {"weight": w}, (x,))


@program(matrices)
def func_grad_over_call(x: Tensor, w: Tensor) -> Any:
    return grad(lambda v: functional_call(LINEAR, {"weight": v}, (x,)).pow(2).sum())(w)


@program(one_plain)
def func_vmap_random(x: Tensor) -> Any:
    return vmap(lambda row: row + torch.randn(4), randomness="different")(x)


@program(one_leaf)
def func_vmap_custom_function(x: Tensor) -> Any:
    return vmap(lambda row: WithSetup.apply(row, 2.0)[0])(x)


@program(one_leaf, one_plain)
def forward_mode(x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        value, tangent = forward_ad.unpack_dual(dual.sin() * dual)
        return value * 1, tangent * 1


@program(one_leaf, one_plain)
def forward_mode_custom(x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(WithJvp.apply(dual)).tangent * 1


@program(one_leaf)
def functional_jacobian(x: Tensor) -> Any:
    return torch.autograd.functional.jacobian(torch.exp, x[0])


@program(one_leaf)
def functional_hvp(x: Tensor) -> Any:
    return torch.autograd.functional.hvp(energy, x, torch.ones_like(x))[1]


# --- checkpoint, saved-tensor hooks -----------------------------------------------------------------------------------


def block(x: Tensor) -> Tensor:
    return (x @ x.t()).sin().exp()


@program(one_leaf, one_nonleaf)
def checkpoint_plain(x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False) * 2


@program(one_leaf, one_nonleaf)
def checkpoint_reentrant(x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True) * 2


@program(one_leaf)
def checkpoint_dropout(x: Tensor) -> Any:
    return checkpoint(lambda v: nn.functional.dropout(v.sin(), 0.5), x, use_reentrant=False) * 2


@program(one_leaf)
def checkpoint_dropout_reentrant(x: Tensor) -> Any:
    return checkpoint(lambda v: nn.functional.dropout(v.sin(), 0.5), x, use_reentrant=True) * 2


@program(one_leaf)
def checkpoint_dropout_no_state(x: Tensor) -> Any:
    return checkpoint(lambda v: nn.functional.dropout(v.sin(), 0.5), x, use_reentrant=False, preserve_rng_state=False)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if op is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@program(one_leaf)
def checkpoint_selective(x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(_policy))


@program(one_leaf)
def checkpoint_selective_list(x: Tensor) -> Any:
    return checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]),
    )


@program(one_leaf)
def checkpoint_nested(x: Tensor) -> Any:
    def outer(v: Tensor) -> Tensor:
        return checkpoint(block, v.cos(), use_reentrant=False).sin()

    return checkpoint(outer, x, use_reentrant=False)


@program(one_leaf)
def checkpoint_sequential(x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint_sequential([torch.sin, torch.exp, torch.cos], 2, x, use_reentrant=False)


@program(one_leaf)
def saved_hooks(x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 2):
        y = x.sin()
    return y.exp()


@program(one_leaf)
def saved_on_cpu(x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return x.sin().exp()


@program(one_leaf)
def mutation_allowed(x: Tensor) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 2
        z = y.sin()
        y.mul_(3)
        return z


# --- autocast, random numbers, dtypes ---------------------------------------------------------------------------------


@program(matrices)
def autocast_inside(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ w
    return y, z


@program(matrices)
def autocast_twice_same_weight(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ w) @ w


@program(matrices)
def autocast_decorated(x: Tensor, w: Tensor) -> Any:
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def inner(a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.linear(a, b).softmax(-1)

    return inner(x, w)


@program(one_leaf)
def random_default(x: Tensor) -> Any:
    return x * torch.rand_like(x) + torch.randn(3, 4) + torch.bernoulli(torch.full((3, 4), 0.3))


GENERATOR = torch.Generator()


@program(one_leaf)
def random_generator(x: Tensor) -> Any:
    GENERATOR.manual_seed(3)
    return x * torch.rand(3, 4, generator=GENERATOR)


@program(one_leaf)
def random_generator_made(x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(4)
    return x * torch.rand(3, 4, generator=generator)


@program(one_leaf)
def random_seeded(x: Tensor) -> Any:
    torch.manual_seed(4)
    return x * torch.rand(3, 4)


@program(one_leaf)
def dropouts(x: Tensor) -> Any:
    return nn.functional.dropout(x, 0.3) * nn.functional.alpha_dropout(x, 0.2, training=True)


@program(matrices, half_leaves, float16_leaves, complex_leaves)
def product(x: Tensor, w: Tensor) -> Any:
    return (x @ w) * x + w.mean()


@program(complex_leaves)
def complex_functions(x: Tensor, w: Tensor) -> Any:
    return x.abs(), x.angle(), x.conj() @ w, torch.view_as_real(x * w).sum(-1), (x * w).real, x.imag * 2


@program(complex_leaves)
def complex_in_place(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    y.real.mul_(2)
    return y


@program(one_leaf)
def real_to_complex(x: Tensor) -> Any:
    return torch.complex(x, x.sin()), torch.fft.rfft(x)


@program(integers)
def integer_functions(x: Tensor) -> Any:
    return x * 2, x / 2, x % 3, x > 3, x.float().to(torch.float8_e4m3fn).float()


# --- gradients asked for inside ---------------------------------------------------------------------------------------


@program(one_leaf, one_nonleaf)
def grad_inside(x: Tensor) -> Any:
    return torch.autograd.grad(energy(x), x)[0]


@program(one_leaf, one_nonleaf)
def grad_inside_create_graph(x: Tensor) -> Any:
    (g,) = torch.autograd.grad(energy(x), x, create_graph=True)
    return g.pow(2).sum()


@program(one_leaf)
def grad_inside_unused(x: Tensor) -> Any:
    y = torch.ones(3, requires_grad=True)
    a, b = torch.autograd.grad(energy(x), (x, y), allow_unused=True)
    return a if b is None else b


@program(one_plain)
def grad_of_new_leaf(x: Tensor) -> Any:
    y = x.clone().requires_grad_()
    return torch.autograd.grad(energy(y), y)[0]


@program(two_leaves)
def grad_under_no_grad(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        y = x * w
        with torch.enable_grad():
            z = x * w
    return y, z


@program(two_leaves)
def inference_inside(x: Tensor, w: Tensor) -> Any:
    with torch.inference_mode():
        y = x * w
    return y


@program(one_leaf)
def reads_grad(x: Tensor) -> Any:
    return x * 2 if x.grad is None else x * 3


# --- more of the same -------------------------------------------------------------------------------------------------


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return a * 2 + b * 3 + x


@program(one_leaf, one_nonleaf)
def function_one_output_unused(x: Tensor) -> Any:
    return TwoOutputs.apply(x)[0]


@program(one_leaf)
def function_outputs_both_returned(x: Tensor) -> Any:
    return TwoOutputs.apply(x)


class NotTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, scale: Any = None) -> Any:
        ctx.scale = scale
        return x * 2, name, [1, 2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        return gradient * (1 if ctx.scale is None else ctx.scale), None, None


@program(one_leaf)
def function_with_other_results(x: Tensor) -> Any:
    y, name, numbers = NotTensors.apply(x, "a", 4.0)
    return y * len(name) + numbers[1]


class InsideNoGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        assert not torch.is_grad_enabled()
        return gradient @ w, (x.t() @ gradient).t() * 2


@program(two_leaves, plain_and_leaf)
def function_linear(x: Tensor, w: Tensor) -> Any:
    return InsideNoGrad.apply(x, w)


class NestedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = (inner.sin() * inner).sum()
        ctx.inner, ctx.out = inner, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            (g,) = torch.autograd.grad(ctx.out, ctx.inner)
        return g * gradient


@program(one_leaf)
def function_with_graph_inside(x: Tensor) -> Any:
    return NestedCall.apply(x)


class Inherits(InsideNoGrad):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w * 10, None


@program(two_leaves)
def function_inherits(x: Tensor, w: Tensor) -> Any:
    return Inherits.apply(x, w)


class WrongCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


@program(two_leaves)
def function_with_error(x: Tensor, y: Tensor) -> Any:
    return WrongCount.apply(x, y)


class DirtyView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        ctx.mark_dirty(x)
        return x, x * y

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return a + 2 * b, 3 * b


@program(two_leaves)
def function_dirty_intermediate(x: Tensor, y: Tensor) -> Any:
    z = x * 1
    a, b = DirtyView.apply(z, y)
    return a, b, z


class GradMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable()
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.sign()


@program(one_leaf)
def function_under_no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        y = GradMode.apply(x)
    return y, x * y


@program(one_leaf)
def function_in_loop(x: Tensor) -> Any:
    for _ in range(3):
        x = GradMode.apply(x) * 2
    return x


@program(one_leaf)
def function_grad_inside(x: Tensor) -> Any:
    y = GradMode.apply(x * 2)
    return torch.autograd.grad(y.sum(), x)[0]


@program(one_leaf)
def hooks_in_order(x: Tensor) -> Any:
    y = x.sin()
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: g * 2)
    z = y.exp()
    z.register_hook(lambda g: g * 3)
    return z


@program(one_leaf)
def hook_before_write(x: Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: g * 5)
    y.mul_(3)
    y.register_hook(lambda g: g + 1)
    return y.sin()


@program(one_leaf)
def hook_gives_none(x: Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: None)
    return y.sin()


@program(one_leaf)
def hook_on_shared(x: Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: g.clamp(max=0.5))
    return (y.sin() + y.cos()).sum() + (y * y).sum()


@program(one_leaf)
def hook_writes_list(x: Tensor) -> Any:
    norms: list[float] = []
    y = x * 2
    y.register_hook(lambda g: norms.append(1.0))
    return y.sin()


@program(one_leaf)
def hook_prints(x: Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: print(end=""))
    return y.sin()


@program(one_leaf, one_plain)
def func_nested_transforms(x: Tensor) -> Any:
    return vmap(jacrev(lambda row: (row**3).sum()))(x), vmap(hessian(lambda row: row.sin().sum()))(x)


@program(one_leaf, one_plain)
def func_vmap_dimensions(x: Tensor) -> Any:
    return vmap(lambda a, b: a * b, in_dims=(0, None), out_dims=1)(x, x[0])


@program(one_leaf)
def func_grad_with_aux(x: Tensor) -> Any:
    return grad(lambda v: (energy(v), v * 2), has_aux=True)(x)


@program(one_leaf)
def func_grad_of_dict(x: Tensor) -> Any:
    return grad(lambda d: energy(d["a"]) + d["b"].sum())({"a": x, "b": x * 2})["a"]


@program(one_leaf)
def func_linearize(x: Tensor) -> Any:
    value, push = torch.func.linearize(lambda v: v.sin() * v, x)
    return value, push(torch.ones_like(x))


@program(one_leaf, one_plain)
def func_of_outer_tensor(x: Tensor) -> Any:
    y = x * 2
    return grad(lambda v: (v * y).sin().sum())(torch.ones(3, 4))


@program(one_leaf)
def func_jvp_of_grad(x: Tensor) -> Any:
    return jvp(grad(energy), (x,), (torch.ones_like(x),))[1]


@program(one_leaf)
def func_writes_inside(x: Tensor) -> Any:
    def inner(v: Tensor) -> Tensor:
        y = v * 2
        y.mul_(3)
        return y.sum()

    return grad(inner)(x)


@program(one_leaf)
def autocast_cached_weight_and_gradient(x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        z = x @ x.t()
    return y.float() + z.float()


@program(one_leaf)
def checkpoint_of_pair(x: Tensor) -> Any:
    a, b = checkpoint(lambda v, k=2.0: (v.sin() * k, v.cos()), x, use_reentrant=False)
    return a * b


@program(one_leaf)
def checkpoint_partly_used(x: Tensor) -> Any:
    a, _ = checkpoint(lambda v: (v.sin(), v.cos()), x, use_reentrant=False)
    return a


@program(matrices)
def checkpoint_with_closure(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    return checkpoint(lambda v: (v @ w).sin() * y, x, use_reentrant=False)


@program(matrices)
def checkpoint_under_autocast(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return checkpoint(lambda v: (v @ w).sin() @ w, x, use_reentrant=False)


@program(one_leaf)
def checkpoint_writes_inside(x: Tensor) -> Any:
    def inner(v: Tensor) -> Tensor:
        y = v * 2
        y.mul_(3)
        return y.sin()

    return checkpoint(inner, x, use_reentrant=False)


@program(matrices)
def checkpoint_reentrant_with_closure(x: Tensor, w: Tensor) -> Any:
    def inner(v: Tensor, k: Any) -> Any:
        return (v @ w).sin() * k, v.cos()

    a, b = checkpoint(inner, x * 2, 3.0, use_reentrant=True)
    return a @ w, b


@program(plain_and_leaf)
def checkpoint_reentrant_plain_input(x: Tensor, w: Tensor) -> Any:
    return checkpoint(lambda v: v.sin() * w, x, use_reentrant=True) + w


@program(one_plain)
def bernoulli_and_friends(x: Tensor) -> Any:
    y = x.clone().bernoulli_(0.3)
    return (
        y,
        torch.randperm(5),
        torch.normal(x, x.abs()),
        torch.randint(0, 5, (3,)),
        x.clone().uniform_(),
        x.exponential_(),
    )


@program(one_leaf)
def gumbel(x: Tensor) -> Any:
    torch.set_grad_enabled(True)
    return nn.functional.gumbel_softmax(x, hard=True)


@program(one_leaf)
def rrelu_and_dropout(x: Tensor) -> Any:
    return nn.functional.rrelu(x, training=True) + nn.functional.dropout1d(x, 0.5)


@program(half_leaves, float16_leaves)
def low_precision(x: Tensor, w: Tensor) -> Any:
    return nn.functional.layer_norm(x @ w, (4,)), (x.float() @ w.float()).to(x.dtype), x.softmax(-1), x.sum()


@program(complex_leaves)
def complex_gradient_inside(x: Tensor, w: Tensor) -> Any:
    return torch.autograd.grad((x * w.conj()).abs().sum(), (x, w))


@program(complex_leaves)
def complex_linear_algebra(x: Tensor, w: Tensor) -> Any:
    return torch.linalg.inv(x) @ w, x.mH @ w, torch.fft.ifft(torch.fft.fft(x) * w)


@pytest.mark.parametrize("item", PROGRAMS, ids=str)
@pytest.mark.sampled(12)
def test_as_eager(item: Program) -> None:
    found, reason = compare(item)
    assert not found, "\n".join([*found, f"ran eagerly because: {reason}" if reason else "was captured"])
