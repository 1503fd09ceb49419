"""The suite's programs on mutation, aliasing, dynamic shapes, second order and errors, and the probe of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.backends import Backend
from dovetail.errors import DovetailError
from dovetail.testing.cases import Case, Compile, Group, Program, check_program, program_case, state_of
from dovetail.testing.models import Perceptron

PROGRAM_CASES: list[Case] = []


def case(group: Group, name: str, *, may_refuse: bool = False) -> Callable[[Program], Program]:
    """Add a program to the suite."""

    def add(program: Program) -> Program:
        PROGRAM_CASES.append(program_case(group, name, program, may_refuse=may_refuse))
        return program

    return add


@case("mutation", "an input written to")
def _input_written(compile: Compile) -> Any:
    def write(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    compiled, x = compile(write), torch.randn(3, 4)
    return [compiled(x) for _ in range(2)], x


@case("mutation", "parts of an input written to")
def _part_written(compile: Compile) -> Any:
    def write(x: Tensor) -> Tensor:
        x[1:].add_(x[:1])
        x.t()[0] = 3
        return x.sum()

    compiled, x = compile(write), torch.randn(3, 4)
    return [compiled(x) for _ in range(2)], x


class _Counter(torch.nn.Module):
    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean + (x.mean(0) - self.mean) / self.count
        return x - self.mean


@case("mutation", "buffers written to and replaced")
def _buffers_written(compile: Compile) -> Any:
    module = _Counter()
    compiled = compile(module)
    return [compiled(torch.randn(3, 4)) for _ in range(3)], state_of(module)


@case("mutation", "inputs that share memory", may_refuse=True)
def _inputs_that_overlap(compile: Compile) -> Any:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    compiled, whole = compile(write), torch.randn(4)
    return [compiled(whole[:2], whole[2:]), compiled(whole, whole.view(2, 2)), compiled(whole, whole)], whole


@case("mutation", "in-place writes under gradients")
def _written_under_gradients(compile: Compile) -> Any:
    def write(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        y.mul_(3)
        y[0] *= 2
        return y

    compiled, w = compile(write), torch.randn(3, 4, requires_grad=True)
    compiled(torch.randn(3, 4), w).sum().backward()
    return [w.grad]


@case("mutation", "a list of tensors written to")
def _list_written(compile: Compile) -> Any:
    def write(tensors: list[Tensor]) -> None:
        torch.ops.aten._foreach_mul_.Scalar(tensors, 2.0)
        tensors.append(tensors[0] + 1)

    compiled, tensors = compile(write), [torch.randn(2), torch.randn(3)]
    first = tensors[0]
    compiled(tensors)
    return tensors, tensors[0] is first


@case("aliasing", "views of an input, and the input itself")
def _view_of_input(compile: Compile) -> Any:
    compiled, x = compile(lambda x: (x.view(-1), x[1:], x)), torch.randn(3, 4)
    flat, part, same = compiled(x)
    flat[0] = 7
    part.mul_(2)
    return flat, part, x, same is x


@case("aliasing", "outputs that share memory")
def _outputs_that_share(compile: Compile) -> Any:
    def share(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y, y, y.t(), y[0]

    one, two, turned, row = compile(share)(torch.randn(3, 4))
    row.zero_()
    return one, turned, row, one is two


@case("aliasing", "a view of an input under gradients")
def _view_under_gradients(compile: Compile) -> Any:
    compiled, x = compile(lambda x: (x.t(), x * 2)), torch.randn(3, 4, requires_grad=True)
    turned, doubled = compiled(x)
    (turned.exp().sum() + doubled.sum()).backward()
    return [x.grad]


@case("aliasing", "results stay what they were")
def _results_stay(compile: Compile) -> Any:
    compiled = compile(lambda x: (x * 2, x.cumsum(0)))
    kept = [compiled(torch.randn(3, 4)) for _ in range(4)]
    return kept


@case("aliasing", "gradients stay what they were")
def _gradients_stay(compile: Compile) -> Any:
    compiled, w = compile(lambda x, w: (x @ w).sum()), torch.randn(4, 2, requires_grad=True)
    kept = []
    for _ in range(3):
        compiled(torch.randn(3, 4), w).backward()
        assert w.grad is not None
        kept.append(w.grad)
        w.grad = None
    return kept


@case("aliasing", "two forwards, then their backwards twice")
def _two_forwards_then_backwards(compile: Compile) -> Any:
    compiled, w = compile(lambda x, w: (x @ w).tanh().sum()), torch.randn(4, 2, requires_grad=True)
    losses = [compiled(torch.randn(3, 4), w) for _ in range(2)]
    for loss in reversed(losses):
        loss.backward(retain_graph=True)
    losses[0].backward()
    return [w.grad]


@case("dynamic shapes", "a batch that changes its size, trained")
def _growing_batch(compile: Compile) -> Any:
    compiled, w = compile(lambda x, w: (x @ w).softmax(-1).log()), torch.randn(4, 2, requires_grad=True)
    results = []
    for size in (3, 5, 8, 1, 2, 13):
        result = compiled(torch.randn(size, 4), w)
        result.sum().backward()
        results.append(result)
    return results, w.grad


@case("dynamic shapes", "symbolic from the first call")
def _symbolic_from_the_start(compile: Compile) -> Any:
    def scaled(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[0]) / x.shape[1] + torch.arange(x.shape[0])

    compiled = compile(scaled, dynamic=True)
    return [compiled(torch.randn(rows, columns)) for rows, columns in ((3, 4), (5, 2), (1, 6), (7, 7))]


@case("dynamic shapes", "a branch on a size")
def _branch_on_size(compile: Compile) -> Any:
    compiled = compile(lambda x: x.sum(0) if x.shape[0] > 4 else x * x.shape[0])
    return [compiled(torch.randn(size, 2)) for size in (2, 6, 3, 7, 4, 5)]


@case("dynamic shapes", "two inputs that change their sizes")
def _inference_in_many_sizes(compile: Compile) -> Any:
    compiled = compile(lambda x, y: torch.cat([x, y]).relu() @ y.t())
    with torch.no_grad():
        return [compiled(torch.randn(size, 3), torch.randn(size + 1, 3)) for size in (2, 4, 6, 3)]


@case("dynamic shapes", "a batch of nothing")
def _empty_batch(compile: Compile) -> Any:
    compiled = compile(lambda x: (x * 2, x.sum(0)))
    return [compiled(torch.randn(size, 3)) for size in (2, 0, 3)]


def _energy(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().pow(2).sum()


@case("second order", "a gradient taken inside, differentiated", may_refuse=True)
def _inside(compile: Compile) -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        energy = _energy(x, w)
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.pow(2).sum()

    compiled = compile(loss)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    result = compiled(x, w)
    result.backward()
    return result, x.grad, w.grad


@case("second order", "a gradient taken inside, returned", may_refuse=True)
def _gradient_inside(compile: Compile) -> Any:
    def force(x: Tensor, w: Tensor) -> Tensor:
        return torch.autograd.grad(_energy(x, w), x)[0]

    return [compile(force)(torch.randn(3, 4, requires_grad=True), torch.randn(4, 2))]


@case("second order", "through the compiled function", may_refuse=True)
def _through(compile: Compile) -> Any:
    compiled = compile(_energy)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    energy = compiled(x, w)
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    force.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    return force, x.grad, w.grad


def _raised(run: Callable[[], Any]) -> str:
    """The type of the exception; an error of Dovetail's own is no error of the user's."""
    try:
        run()
    except DovetailError:
        raise
    except Exception as error:  # noqa: BLE001  (what is raised is the result)
        return type(error).__name__
    return "nothing"


@case("errors", "shapes that do not fit")
def _wrong_shapes(compile: Compile) -> Any:
    compiled = compile(lambda x, y: x @ y)
    good = compiled(torch.ones(2, 3), torch.ones(3, 2))
    return good, _raised(lambda: compiled(torch.ones(2, 3), torch.ones(2, 3)))


@case("errors", "the program's own exception")
def _own_exception(compile: Compile) -> Any:
    def checked(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            raise KeyError("too long")
        return x * 2

    compiled = compile(checked)
    return compiled(torch.ones(2)), _raised(lambda: compiled(torch.ones(3))), compiled(torch.ones(2))


@case("errors", "a saved result written to before the backward")
def _saved_tensor_written(compile: Compile) -> Any:
    x = torch.randn(3, requires_grad=True)
    y = compile(lambda x: x.exp())(x)
    y.detach().mul_(2)
    # Eager has saved the result and raises. One that computes it again is right too; a gradient from the new value is not.
    try:
        y.sum().backward()
    except RuntimeError:
        return "right or refused"
    return "right or refused" if torch.allclose(x.grad, x.detach().exp()) else "a wrong gradient"  # type: ignore[arg-type]


@case("errors", "an input written to before the backward")
def _input_written_later(compile: Compile) -> Any:
    compiled, w = compile(lambda x, w: x * w), torch.randn(3, requires_grad=True)
    x = torch.randn(3)
    y = compiled(x, w)
    x.add_(1)
    return _raised(lambda: y.sum().backward())


@case("errors", "the backward run twice")
def _backward_twice(compile: Compile) -> Any:
    loss = compile(lambda x: x.sin().sum())(torch.randn(3, requires_grad=True))
    loss.backward()
    return _raised(loss.backward)


@case("errors", "calls after an error")
def _goes_on_after_an_error(compile: Compile) -> Any:
    model = Perceptron()
    compiled = compile(model)
    with torch.no_grad():
        first = compiled(torch.ones(2, 8))
        problem = _raised(lambda: compiled(torch.ones(2, 9)))
        return first, problem, compiled(torch.ones(2, 8))


def _training(compile: Compile) -> Any:
    # CUDA graphs are recorded at the second call, and the third replays.
    compiled, w = compile(lambda x, w: (x @ w).tanh().sum()), torch.ones(3, 2, requires_grad=True)
    for _ in range(3):
        compiled(torch.ones(4, 3), w).backward()
    return [w.grad]


def _inference(compile: Compile) -> Any:
    compiled = compile(lambda x: (x @ x.t()).tanh())
    with torch.no_grad():
        return [compiled(torch.ones(4, 3)) for _ in range(3)]


def _check_small_step(backend: Backend, options: Mapping[str, Any], device: str) -> str:
    program = _training if "backward" in backend.kinds else _inference
    return check_program(program, True, backend, options, device)


#: A few small steps, for finding out whether a backend works at all; no part of the suite.
PROBE_CASE = Case("probe", "a small step", _check_small_step)
