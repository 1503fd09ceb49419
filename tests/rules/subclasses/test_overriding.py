"""Tensors of classes with a ``__torch_function__``: in one graph, with eager's results, classes, attributes and errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import entries_of, same

CALLS: list[str] = []


class Tagged(torch.Tensor):
    """Hands its tag on to results."""

    tag: str
    factor = 3.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(func.__name__)
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [item.tag for item in args if isinstance(item, Tagged) and hasattr(item, "tag")]
        if isinstance(out, Tagged) and tags:
            out.tag = "+".join(tags)
        return out

    @property
    def doubled(self) -> torch.Tensor:
        return self * 2

    def scaled(self, by: float | None = None) -> torch.Tensor:
        return self * (self.factor if by is None else by)


class Heir(Tagged):
    """Is asked before the class that it derives from."""


class Plain(torch.Tensor):
    """Torch's own treatment: results are of this class."""


class Doubling(torch.Tensor):
    """Another meaning for additions, given with subclasses switched off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.add, torch.Tensor.add):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})) * 2
        return super().__torch_function__(func, types, args, kwargs)


class Sized(torch.Tensor):
    """Answers for what torch computes without a graph."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return (42,)
        return super().__torch_function__(func, types, args, kwargs)


class Arithmetic(torch.Tensor):
    """Operators and methods of its own, by ``super()``."""

    def __add__(self, other: Any) -> Any:
        return super().__mul__(other)

    def __radd__(self, other: Any) -> Any:
        return torch.Tensor.sub(self, other)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) - 1

    def __len__(self) -> int:
        return 7

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, [value])

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return super().sum(*args, **kwargs) * 10


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def tensor(kind: type, tag: str = "", grad: bool = False, rows: int = 3) -> Any:
    made = torch.arange(1.0, rows * 2 + 1).reshape(rows, 2).as_subclass(kind)
    if tag:
        made.tag = tag
    return made.requires_grad_() if grad else made


def told(value: Any) -> Any:
    """A result with the classes and attributes of its tensors beside them, plain."""
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunction():
        own = [(name, told(item)) for name, item in sorted(vars(value).items()) if not name.startswith("_")]
        return [type(value).__name__, own, value.requires_grad, value.as_subclass(torch.Tensor)]


def run(function: Callable[..., Any], make: Callable[[], Any]) -> Any:
    """What a call gives, the gradients it leads to, and what it makes of its arguments."""
    CALLS.clear()
    args = make()
    result = function(*args)
    asked = [*CALLS]
    found = told(result)
    with torch._C.DisableTorchFunction():
        parts = [
            item for item in (result if isinstance(result, tuple) else (result,)) if isinstance(item, torch.Tensor)
        ]
        totals = [part.as_subclass(torch.Tensor).square().sum() for part in parts if part.requires_grad]
        if totals:
            torch.stack(totals).sum().backward()
        return [found, asked, [told(item) for item in args], [item.grad for item in args]]


def write(x: Any) -> Any:
    x.add_(1)
    x[0] = 5
    x *= 2
    return x.sum(), x


def made_inside(x: Any) -> Any:
    y = x.as_subclass(Tagged)
    y.tag = "inside"
    z = torch.relu(y) + 1
    z.add_(x)
    return z, z.tag, isinstance(z, Tagged), type(z) is Tagged, z.as_subclass(torch.Tensor)


def attributes(x: Any) -> Any:
    x.tag = x.tag + "!"
    x.other = x * 2
    y = x * 3
    y.mask = x > 2
    return y, x.doubled, x.scaled(), x.scaled(by=2.0), getattr(x, "nothing", 5), x.other


def slope_inside(w: Any) -> Any:
    x = w.as_subclass(Plain)
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return (slope * 2).sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "default": (lambda x: (x.sin() + 1, 2**x, x.shape, x.is_leaf), lambda: [tensor(Plain, grad=True)]),
    "tags": (
        lambda x, y: (x + y, y @ x.t(), torch.cat([x, y])),
        lambda: [tensor(Tagged, "a"), tensor(Tagged, "b", True)],
    ),
    "heir first": (lambda x, y: torch.where(x > 2, x, y), lambda: [tensor(Tagged, "a"), tensor(Heir, "b")]),
    "python functions": (lambda x: (F.softmax(x, dim=-1), F.mse_loss(x, x * 2)), lambda: [tensor(Tagged, "a", True)]),
    "switched off": (lambda x, y: (x + y, torch.add(y, x), x * y), lambda: [tensor(Doubling), torch.ones(3, 2)]),
    "getters": (lambda x: (x.shape, x.dtype, x.ndim, (x * 2).shape), lambda: [tensor(Sized)]),
    "operators": (lambda x: (x + 2, 2 + x, x[0], len(x), x.sum(), abs(x)), lambda: [tensor(Arithmetic)]),
    "iterated": (lambda x: [row * 2 for row in x], lambda: [tensor(Tagged, "a")]),
    "lists": (lambda x, y: (sum([x, y]), torch.stack((y, x)), x.unbind()), lambda: [tensor(Plain), tensor(Plain)]),
    "written with a gradient": (
        lambda x, w: x.mul_(w),
        lambda: [tensor(Tagged, "a"), torch.ones(2, requires_grad=True)],
    ),
    "written": (write, lambda: [tensor(Tagged, "a")]),
    "made inside": (made_inside, lambda: [torch.ones(3, 2, requires_grad=True)]),
    "attributes": (attributes, lambda: [tensor(Tagged, "a")]),
    "itself": (lambda x: (x, x.view(-1), x.detach(), [x]), lambda: [tensor(Tagged, "a")]),
    "index": (
        lambda x, i: (x[i], x.index_select(0, i)),
        lambda: [torch.ones(3, 2), torch.tensor([0, 2]).as_subclass(Plain)],
    ),
    "slope": (slope_inside, lambda: [torch.ones(3, requires_grad=True)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_are_interpreted_in_one_graph(name: str) -> None:
    function, make = PROGRAMS[name]
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    expected = run(function, make)
    run(compiled, make)  # The capture asks the class too.
    found = run(compiled, make)
    expected[1] = []
    same(expected[:1] + expected[2:], found[:1] + found[2:])


def test_a_class_is_asked_as_often_and_for_the_same_functions() -> None:
    def function(x: torch.Tensor) -> Any:
        return (x - 1).abs().mean() + torch.exp(x).sum() + F.gelu(x).sum() + x[0, 1] + (1 / x).sum() + (-x).size(0)

    expected = run(function, lambda: [tensor(Tagged)])[1]
    assert expected.count("sum") == 3
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        assert run(compiled, lambda: [tensor(Tagged)])[1] == expected


def _set(owner: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda x: setattr(owner(x), name, value)


def _twice(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    out = torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]
    return out.neg() if func is torch.Tensor.mul else out


@pytest.mark.parametrize(
    "change",
    [
        _set(lambda x: type(x).__bases__[0], "__torch_function__", classmethod(_twice)),
        _set(type, "__torch_function__", classmethod(_twice)),
        _set(type, "__mul__", lambda self, other: "mine"),
        _set(type, "sin", lambda self: "mine"),
        _set(type, "k", 5),
        _set(lambda x: x, "k", 9),
        _set(lambda x: x, "weight", torch.ones(2) * 3),
    ],
)
def test_what_a_class_and_a_tensor_say_is_guarded(change: Callable[[Any], None]) -> None:
    class Base(torch.Tensor):
        k = 2

    class Derived(Base):
        pass

    def function(x: Any) -> Any:
        return x * x.k, x.sin(), x.weight

    x = tensor(Derived)
    x.weight = torch.ones(2)
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(told(function(x)), told(compiled(x)))
    before = told(function(x))
    change(x)
    assert str(told(function(x))) != str(before)
    same(told(function(x)), told(compiled(x)))


def test_classes_and_tags_have_graphs_of_their_own() -> None:
    def function(x: Any) -> Any:
        return x * len(getattr(x, "tag", "")), type(x).__name__

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for x in (tensor(Tagged, "a"), tensor(Tagged, "abc"), tensor(Plain), torch.ones(3, 2), tensor(Heir, "a")):
        same(told(function(x)), told(compiled(x)))
    assert entries_of(compiled) == 5


@pytest.mark.parametrize("call", [lambda x, y: torch.add(x, y), lambda x, y: F.mse_loss(x, y), lambda x, y: x + y])
def test_a_call_that_nobody_takes_raises_as_in_eager(call: Callable[..., Any]) -> None:
    args = tensor(Refusing), torch.ones(3, 2)
    with pytest.raises(TypeError) as expected:
        call(*args)
    with pytest.raises(TypeError) as found:
        dovetail.compile(call, backend="aten")(*args)
    assert str(found.value) == str(expected.value)


def test_such_parameters_train() -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(Plain))
        optimizer, call = torch.optim.SGD(model.parameters(), 0.1), wrap(model)
        for _ in range(2):
            optimizer.zero_grad()
            call(tensor(Plain)).as_subclass(torch.Tensor).square().mean().backward()
            optimizer.step()
        return [told(item) for item in model.parameters()]

    same(trained(lambda model: model), trained(lambda model: dovetail.compile(model, backend="aten", fullgraph=True)))


def _quietly(x: Any) -> Any:
    y = x.as_subclass(Tagged)
    y.tag = "t"
    for _ in range(2):
        y = y * 2
        print(end="")
    return y, y.tag


def _break_while_off(x: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        y = x * 2
        print(end="")
        z = x + y
    return z, x * 1


def _transposed(x: Any) -> Any:
    x.t_()
    return x * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_quietly, "print writes"),
        (_break_while_off, "print writes"),
        (_transposed, "changed in place"),
        (lambda x: x.requires_grad_() * 2, "changed in place"),
        (lambda x: torch.func.vmap(lambda row: row.sum())(x), "tensor subclass"),
        (lambda x: f"{x}", "__format__|__str__|text"),
    ],
)
def test_the_rest_breaks_the_graph_or_runs_eagerly(function: Callable[..., Any], words: str) -> None:
    def make() -> Any:
        return [tensor(Plain)]

    expected, found = run(function, make), run(dovetail.compile(function, backend="aten"), make)
    same(expected[:1] + expected[2:], found[:1] + found[2:])
    with pytest.raises(GraphBreakError, match=words):
        dovetail.compile(function, backend="aten", fullgraph=True)(*make())


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_class_dies_with_what_was_compiled_for_it(is_asked: bool) -> None:
    switched_off = {} if is_asked else {"__torch_function__": torch._C._disabled_torch_function_impl}
    kind = type("Passing", (torch.Tensor,), switched_off)
    compiled = dovetail.compile(lambda x: x * 2 + torch.ones(2).as_subclass(torch.Tensor), backend="aten")
    assert type(compiled(torch.ones(2).as_subclass(kind))) is (kind if is_asked else torch.Tensor)
    dead = weakref.ref(kind)
    del kind, compiled
    gc.collect()
    assert dead() is None


def reads_what_it_has_set(x: Any) -> Any:
    x.tag = "first"
    return x * 2, x.tag, hasattr(x, "tag"), getattr(x, "other", None)


def counts(x: Any) -> Any:
    for _ in range(2):
        x.calls = getattr(x, "calls", 0) + 1
    return x + 1, x.calls


@pytest.mark.parametrize("program", [reads_what_it_has_set, counts])
@pytest.mark.parametrize("kind", [Tagged, Plain])
def test_the_first_attribute_of_an_input_is_seen(program: Callable[[Any], Any], kind: type) -> None:
    """The object had none before, so that its dictionary was empty."""
    found = []
    for run in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        x = torch.ones(2).as_subclass(kind)
        results = run(x)
        found.append((results, vars(x), [vars(item) for item in results if isinstance(item, torch.Tensor)]))
    same(found[0], found[1])


def is_one(x: Any, y: Any) -> Any:
    return x * y, x is y


def sets_and_reads(x: Any, y: Any) -> Any:
    x.tag = "set"
    return x + y, y.tag


@pytest.mark.parametrize("program", [is_one, sets_and_reads])
@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_two_inputs_that_are_one_object_at_times(program: Callable[..., Any], order: tuple[bool, ...]) -> None:
    found = []
    for run in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        results = []
        for are_one in order:
            x, y = torch.ones(2).as_subclass(Plain), torch.ones(2).as_subclass(Plain)
            x.tag = y.tag = "first"
            results.append(run(x, x if are_one else y))
        found.append(results)
    same(found[0], found[1])


class Listening(torch.Tensor):
    """Its own code says what it is asked for."""

    heard: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.heard.append(name)
        return 1

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_the_users_code_is_asked_by_the_program_only() -> None:
    def function(x: Any, k: int) -> Any:
        return x * k + x.offset

    heard = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        Listening.heard.clear()
        for size in (2, 3, 4):
            plain = run(torch.ones(size).as_subclass(Listening), size)
            assert plain.as_subclass(torch.Tensor).tolist() == [size + 1] * size
        heard.append([name for name in Listening.heard if name != "as_subclass"])
    assert heard[0] == heard[1]


def test_guards_ask_no_class_of_the_users() -> None:
    def function(x: Any) -> Any:
        return x.grad, x.is_leaf, x * 2

    heard = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = torch.ones(2, requires_grad=True).as_subclass(Listening).detach()
        x.grad = torch.ones(2)
        Listening.heard.clear()
        for _ in range(3):
            gradient, is_leaf, _ = run(x)
            assert is_leaf
            assert gradient.tolist() == [1, 1]
        heard.append(list(Listening.heard))
    assert heard[0] == heard[1]


def test_whether_classes_are_asked_is_said_inside_of_the_block() -> None:
    def program(x: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            with torch._C.DisableTorchFunctionSubclass():
                x = x + 1
            inside = torch._C._is_torch_function_enabled()
        return inside, torch._C._is_torch_function_enabled(), x

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    assert program(torch.ones(2))[:2] == compiled(torch.ones(2))[:2] == (False, True)


class Telling(torch.Tensor):
    """Gives the name of each function that it is given to."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function.__name__


TELLING = torch.ones(1).as_subclass(Telling)
ITS_METHOD = TELLING.abs


def test_native_methods_that_are_bound_to_one_ask_its_class() -> None:
    def bound_outside(x: torch.Tensor) -> Any:
        return ITS_METHOD(), x * 2

    def bound_inside(x: torch.Tensor) -> Any:
        return torch.Tensor.add.__get__(TELLING)(x), torch.Tensor.__neg__.__get__(TELLING)(), x * 2

    def given(x: torch.Tensor, method: Any) -> Any:
        return method(), x * 2

    x = torch.ones(2)
    same(bound_outside(x), dovetail.compile(bound_outside, backend="aten", fullgraph=True)(x))
    same(bound_inside(x), dovetail.compile(bound_inside, backend="aten", fullgraph=True)(x))
    compiled = dovetail.compile(given, backend="aten", fullgraph=True)
    for method in (TELLING.abs, TELLING.neg, torch.full((1,), -3.0).abs):
        same(given(x, method), compiled(x, method))


def test_an_operator_that_no_class_takes_goes_to_the_other_operand() -> None:
    class Left(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    class Right(Left):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 7 if function is torch.Tensor.__rpow__ else NotImplemented

    def function(x: torch.Tensor, left: Any, right: Any) -> Any:
        return x * (left**right)

    given = torch.ones(2), torch.ones(1).as_subclass(Left), torch.ones(1).as_subclass(Right)
    same(function(*given), dovetail.compile(function, backend="aten")(*given))


def test_what_is_like_a_tensor_is_asked_for_its_gradient() -> None:
    class Like:
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function.__name__, len(args[0])

    def function(x: torch.Tensor, like: Any) -> Any:
        return torch.autograd.grad(like, like), x * 2

    x = torch.ones(2)
    same(function(x, Like()), dovetail.compile(function, backend="aten")(x, Like()))


class Placed(torch.nn.Parameter):
    """A parameter with an attribute, for which torch asks nobody."""

    place: str
    __torch_function__ = torch._C._disabled_torch_function_impl


@torch.jit.script
def _scripted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * y.sin(), y


def test_a_scripted_function_is_given_the_plain_tensor() -> None:
    def program(weight: Placed, x: torch.Tensor) -> tuple[torch.Tensor, bool, str]:
        product, same_weight = _scripted(x, weight)
        return product.sum(), same_weight is weight, weight.place

    results = []
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for function in (program, compiled):
        weight = Placed(torch.ones(3))
        weight.place = "here"
        for size in (2, 4, 5):
            found = function(weight, torch.arange(3.0 * size).view(size, 3))
            found[0].backward()
            results.append((type(found[0]), found, type(weight.grad), weight.grad))
    same(results[:3], results[3:])


def test_a_scripted_method_is_given_a_subclass(quiet: None) -> None:
    net = torch.jit.script(torch.nn.Linear(3, 2))
    weight = Placed(torch.ones(3))
    weight.place = "here"
    compiled = dovetail.compile(lambda x: net(x) + 1, backend="aten")
    for _ in range(2):
        same(net(weight) + 1, compiled(weight))
