"""Unusual things to compile, unusual arguments, unusual callers: right, or refused in words."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import opcode
import operator
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from dovetail.face.compiled_function import CompiledFunction
from dovetail.reports.explanation import compiled_function
from tests.differential import check, same

X = torch.tensor([1.0, -2.0, 3.0])


def whole(function: Any) -> Any:
    return dovetail.compile(function, backend="aten", fullgraph=True)


def loose(function: Any) -> Any:
    return dovetail.compile(function, backend="aten")


class Scale:
    """An object that can be called, with methods of every kind."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.factor + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    @staticmethod
    def of_nobody(x: torch.Tensor) -> torch.Tensor:
        return x * 3


# --- what can be compiled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, arguments",
    [
        (torch.sin, (X,)),
        (torch.ops.aten.sin.default, (X,)),
        (torch.ops.aten.sin, (X,)),
        (torch.nn.functional.relu, (X,)),
        (torch.Tensor.sum, (X,)),
        (operator.add, (X, X)),
        (len, (X,)),
        (len, ([1, 2],)),
        (int, ("3",)),
        (functools.partial(torch.add, alpha=2), (X, X)),
        (functools.partial(lambda a, b: a * b, 2.0), (X,)),
        (functools.lru_cache(lambda a: a * 2), (3,)),
        (Scale(2.0), (X,)),
        (Scale.of_class, (X,)),
        (Scale.of_nobody, (X,)),
        (functools.partial(Scale(2.0).__call__), (X,)),
        (eval("lambda a: a * 2 + 1"), (X,)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_callables(function: Any, arguments: tuple[Any, ...]) -> None:
    same(function(*arguments), whole(function)(*arguments))


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_a_cache_that_is_asked_for_a_tensor_answers_as_in_eager() -> None:
    """A tensor is looked up by its identity, so that the cache has what was computed from its numbers of before."""
    cached, x = functools.lru_cache(lambda a: a * 2), X.clone()
    compiled = dovetail.compile(cached, backend="aten")
    first = compiled(x)
    x.add_(1)
    assert compiled(x) is first is cached(x)


def test_a_class_makes_an_object() -> None:
    made = whole(Scale)(X)
    assert type(made) is Scale and torch.equal(made.factor, X)


def test_bound_method_reads_its_object_at_every_call() -> None:
    eager, twin = Scale(2.0), Scale(2.0)
    compiled = whole(twin.method)
    for factor in (2.0, 5.0, 5.0):
        eager.factor = twin.factor = factor
        same(eager.method(X), compiled(X))
    assert twin.calls == eager.calls == 3
    assert compiled.__self__ is twin and compiled.__name__ == "method"


def test_bound_method_of_a_module() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum()

    model = Model()
    twin = copy.deepcopy(model)
    model.step(X).backward()
    whole(twin.step)(X).backward()
    same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_bound_method_of_a_tensor() -> None:
    x = X.clone().requires_grad_()
    compiled = whole(x.mul)
    same(x.mul(X), compiled(X))
    with torch.no_grad():
        x += 1
    same(x.mul(X), compiled(X))
    compiled(X).sum().backward()
    same(x.grad, X)


def test_source_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "vanishing.py"
    path.write_text("def function(x):\n    return x * K + 1\n\ndef breaks(x):\n    print()\n    return x\n\nK = 2\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.unlink()
    compiled = whole(space["function"])
    same(compiled(X), X * 2 + 1)
    space["K"] = 3
    same(compiled(X), X * 3 + 1)
    with pytest.raises(errors.GraphBreakError, match="vanishing.py:5"):
        whole(space["breaks"])(X)


def test_code_without_file_names_or_modules() -> None:
    space: dict[str, Any] = {"__builtins__": __builtins__}
    exec("def function(x):\n    return x * k\nk = 4.0", space)
    same(whole(space["function"])(X), X * 4)


# --- what is refused --------------------------------------------------------------------------------------------------


def with_code(function: types.FunctionType, **changes: Any) -> types.FunctionType:
    return types.FunctionType(function.__code__.replace(**changes), function.__globals__)


_SPECIALISED: dict[str, int] = getattr(opcode, "_specialized_opmap", {})


def test_code_of_another_python_version_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    known = function.__code__.co_code
    # From Python 3.14 on, 255 is of its own compiled code: Python crashes where it reads such code.
    number = 255 if sys.version_info < (3, 14) else max(set(range(200)) - {*dis.opmap.values(), *_SPECIALISED.values()})
    unknown = with_code(function, co_code=known[:2] + bytes([number, 0]) + known[2:])
    for mode in (whole, loose):
        # Never run for real: it may end the process.
        with pytest.raises(errors.UnsupportedVersionError, match="is not code of Python"):
            mode(unknown)(X)
    misnumbered = with_code(function, co_code=known[:2] + bytes([dis.opmap["LOAD_CONST"], 77]) + known[2:])
    with pytest.raises(errors.UnsupportedVersionError, match="is not code of Python"):
        loose(misnumbered)(X)


def test_generators_run_eagerly() -> None:
    def function(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x * 2
        yield x * 3

    with pytest.raises(errors.GraphBreakError, match="generator function"):
        whole(function)(X)
    with pytest.warns(errors.EagerFallbackWarning, match="generator function"):
        made = loose(function)(X)
    assert inspect.isgenerator(made)
    same(list(made), [X * 2, X * 3])


def test_coroutines_run_eagerly() -> None:
    async def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    async def stream(x: torch.Tensor) -> Any:
        yield x

    for item in (function, stream):
        with pytest.raises(errors.GraphBreakError, match="async|generator"):
            whole(item)(X)
    with pytest.warns(errors.EagerFallbackWarning, match="async"):
        made = loose(function)(X)
    with pytest.raises(StopIteration) as stop:
        made.send(None)
    same(stop.value.value, X * 2)


@pytest.mark.parametrize(
    "thing",
    [3, "text", None, property(lambda self: 1), [torch.sin]],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_cannot_be_called_is_refused_at_once(thing: Any) -> None:
    if thing is None:
        assert callable(dovetail.compile(thing))
        return
    with pytest.raises(errors.NotCallableError, match="cannot be called"):
        dovetail.compile(thing)


# --- objects that lie or raise ----------------------------------------------------------------------------------------


def liar(claimed: type) -> Any:
    class Liar:
        value = 2.0

        @property
        def __class__(self) -> type:  # type: ignore[override]
            return claimed

    return Liar()


class Raising:
    """Nothing can be asked of it, but its value."""

    value = 2.0

    def __eq__(self, other: object) -> bool:
        raise ValueError("compared")

    def __bool__(self) -> bool:
        raise ValueError("asked for its truth")

    def __hash__(self) -> int:
        raise ValueError("hashed")

    def __len__(self) -> int:
        raise ValueError("measured")

    def __repr__(self) -> str:
        raise ValueError("shown")

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"asked for {name}")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


@pytest.mark.parametrize("claimed", [dict, list, tuple, int, str, type, torch.nn.Module, types.FunctionType])
def test_objects_that_lie_about_their_class(claimed: type) -> None:
    def function(x: torch.Tensor, thing: Any) -> Any:
        return x * thing.value, isinstance(thing, claimed), type(thing) is claimed

    thing = liar(claimed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.EagerFallbackWarning)
        compiled = loose(function)
        same(function(X, thing), compiled(X, thing))
        type(thing).value = 5.0
        same(function(X, thing), compiled(X, thing))


def test_a_claim_that_changes() -> None:
    class Fickle:
        def __init__(self) -> None:
            self.claimed: type = dict

        @property
        def __class__(self) -> type:  # type: ignore[override]
            return self.claimed

    def function(x: torch.Tensor, thing: Any) -> torch.Tensor:
        return x * 2 if isinstance(thing, dict) else x * 3

    thing = Fickle()
    with pytest.warns(errors.EagerFallbackWarning, match="says by __class__"):
        compiled = loose(function)
        same(compiled(X, thing), X * 2)
    thing.claimed = list
    same(compiled(X, thing), X * 3)
    same(compiled(X, {}), X * 2)


def test_objects_of_weak_references() -> None:
    class Scale:
        value = 2.0

    scale = Scale()
    proxy = weakref.proxy(scale)
    with pytest.warns(errors.EagerFallbackWarning, match="says by __class__"):
        compiled = loose(lambda x, thing: x * thing.value)
        same(compiled(X, proxy), X * 2)
    scale.value = 5.0
    same(compiled(X, proxy), X * 5)
    # The refusal holds for proxies only.
    same(compiled(X, scale), X * 5)
    assert len(compiled_function(compiled).entries) == 2


@pytest.mark.parametrize("claimed", [torch.Tensor, torch.nn.Parameter])
def test_objects_that_say_that_they_are_tensors(claimed: type) -> None:
    with pytest.warns(errors.EagerFallbackWarning, match="says by __class__ that it is something else"):
        same(loose(lambda x, thing: x * thing.value)(X, liar(claimed)), X * 2)
    with pytest.raises(errors.GraphBreakError, match="says by __class__"):
        whole(lambda x, thing: x * thing.value)(X, liar(claimed))


def test_objects_whose_methods_raise() -> None:
    def reads(x: torch.Tensor, thing: Any) -> torch.Tensor:
        return x * thing.value

    def catches(x: torch.Tensor, thing: Any) -> torch.Tensor:
        try:
            return x if thing else x + 1
        except ValueError:
            return x + 2

    def compares(x: torch.Tensor, thing: Any) -> torch.Tensor:
        try:
            return x if thing == 1 else x + 1
        except ValueError:
            return x + 3

    thing = Raising()
    for function in (reads, catches, compares):
        compiled = whole(function)
        for _ in range(2):
            same(function(X, thing), compiled(X, thing))
    same(whole(thing)(X), X * 2)
    for raises in (lambda x, thing: x if thing else x, lambda x, thing: x if thing == 1 else x):
        with pytest.raises(ValueError, match="asked for its truth|compared"):
            loose(raises)(X, thing)


def test_keys_and_numbers_whose_comparison_raises() -> None:
    class Number(int):
        def __eq__(self, other: object) -> bool:
            raise ValueError("compared")

        __hash__ = int.__hash__

    class Text(str):
        def __eq__(self, other: object) -> bool:
            raise ValueError("compared")

        def __hash__(self) -> int:
            raise ValueError("hashed")

    table = {0: 2.0, Number(4): 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.EagerFallbackWarning)
        for function, argument in (
            (lambda x, item: x * item[0], table),
            (lambda x, item: x * len(item), Text("abc")),
            (lambda x, item: x * item, Number(3)),
        ):
            compiled = loose(function)
            for _ in range(2):
                same(function(X, argument), compiled(X, argument))


# --- traces inside traces ---------------------------------------------------------------------------------------------


def test_fake_and_functional_tensors_are_left_to_eager() -> None:
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    for strange in (mode.from_tensor(X), torch._to_functional_tensor(X.clone())):
        with pytest.raises(errors.GraphBreakError, match="belongs to another trace"):
            whole(lambda x: x * 2)(strange)
        with pytest.warns(errors.EagerFallbackWarning, match="belongs to another trace"):
            assert type(loose(lambda x: x * 2)(strange)) is type(strange)


def test_a_call_under_another_trace_runs_the_function() -> None:
    compiled = whole(lambda x: x * 2)
    compiled(X)
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: compiled(x) + 1)(X)
    same(graph(X + 1), (X + 1) * 2 + 1)
    assert len(compiled.entries) == 1


def test_a_traced_tensor_that_reaches_another_thread_is_refused() -> None:
    inner = whole(lambda x: x * 2)
    seen: list[BaseException | None] = []

    def ask(value: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(inner, value).exception())

    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        ask(mode.from_tensor(X))
    assert isinstance(seen[0], errors.GraphBreakError)


def test_compiled_inside_compiled_and_recursion() -> None:
    inner = whole(lambda x: x * 2)
    outer = whole(lambda x: inner(x) + 1)
    same(outer(X), X * 2 + 1)
    assert not inner.entries and len(outer.entries) == 1

    def factorial(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 0 else compiled(x, n - 1) * n

    compiled = whole(factorial)
    same(compiled(X, 4), X * 24)
    assert len(compiled.entries) == 1

    def endless(x: torch.Tensor) -> torch.Tensor:
        return endless(x)

    with pytest.raises(RecursionError):
        loose(endless)(X)


def test_a_function_that_compiles() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return dovetail.compile(torch.sin, backend="aten")(x) + 1

    with pytest.warns(errors.GraphBreakWarning, match=r"dovetail\.compile is called inside"):
        same(loose(function)(X), X.sin() + 1)
    joint = dovetail.capture(torch.nn.Linear(3, 2).forward, (X,))
    assert [str(item) for item in joint.input_descriptors[1:3]] == ["parameter 'weight'", "parameter 'bias'"]


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of ``work(number)``, all started at once."""
    barrier = threading.Barrier(count)

    def start(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=60) for future in [pool.submit(start, number) for number in range(count)]]


def test_first_calls_race() -> None:
    compiled = whole(lambda x: x.sin() * 2)
    for result in in_threads(6, lambda number: compiled(X)):
        same(result, X.sin() * 2)
    assert len(compiled.entries) == 1


def test_threads_with_different_shapes_and_backwards() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    compiled = dovetail.compile(lambda x: (x * weight).sin().sum(), backend="aten", fullgraph=True, dynamic=False)

    def work(number: int) -> torch.Tensor:
        total = torch.zeros(3)
        for step in range(5):
            x = torch.full((1 + (number + step) % 4, 3), 0.1 * step)
            (gradient,) = torch.autograd.grad(compiled(x), weight)
            total += gradient
        return total

    def eager(number: int) -> torch.Tensor:
        total = torch.zeros(3)
        for step in range(5):
            x = torch.full((1 + (number + step) % 4, 3), 0.1 * step)
            total += torch.autograd.grad((x * weight).sin().sum(), weight)[0]
        return total

    for number, result in enumerate(in_threads(4, work)):
        same(result, eager(number))
    assert len(compiled.entries) == 4


def test_threads_that_hit_while_another_one_captures() -> None:
    compiled = dovetail.compile(lambda x, k: (x * k).tanh(), backend="aten", fullgraph=True, dynamic=False)
    compiled(X, 0)

    def work(number: int) -> bool:
        return all(torch.equal(compiled(X, k * number), (X * (k * number)).tanh()) for k in range(4))

    assert all(in_threads(3, work))


def test_the_eager_run_of_one_thread_does_not_stop_another() -> None:
    met = threading.Barrier(2, timeout=30)

    def waits(x: torch.Tensor) -> torch.Tensor:
        met.wait()
        return x + 1

    compiled = [loose(waits), loose(waits)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.EagerFallbackWarning)
        # Each waits for the other inside of the user's own code.
        for result in in_threads(2, lambda number: compiled[number](X)):
            same(result, X + 1)


# --- the compiled function as an object -------------------------------------------------------------------------------


@dovetail.compile(backend="aten", fullgraph=True)
def decorated(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    """Multiply."""
    return x * by


class Layer:
    """Compiled functions in a class body."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @dovetail.compile(backend="aten", fullgraph=True)
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @staticmethod
    @dovetail.compile(backend="aten", fullgraph=True)
    def inner_static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @dovetail.compile(backend="aten", fullgraph=True)
    @staticmethod
    def outer_static(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    @classmethod
    @dovetail.compile(backend="aten", fullgraph=True)
    def inner_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    @dovetail.compile(backend="aten", fullgraph=True)
    @classmethod
    def outer_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)


def test_methods_in_a_class_body() -> None:
    for layer in (Layer(2.0), Layer(3.0)):
        same(layer.scale(X), X * layer.factor)
        same(Layer.scale(layer, X), X * layer.factor)
        same(layer.inner_static(X), X + 1)
        same(layer.outer_static(X), X + 2)
        same(Layer.outer_static(X), X + 2)
        same(layer.inner_class(X), X * 5)
        same(layer.outer_class(X), X * 5)
        same(Layer.outer_class(X), X * 5)
    assert Layer(1.0).scale.__name__ == "scale"
    assert str(inspect.signature(Layer(1.0).scale)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"


def test_a_compiled_method_inside_a_capture() -> None:
    layer = Layer(2.0)
    check(lambda x: layer.scale(x) + layer.inner_static(x) + layer.outer_class(x), X.clone())


def test_attributes_are_those_of_the_function() -> None:
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Multiply."
    assert decorated.__module__ == __name__ and decorated.__wrapped__ is decorated.original
    assert str(inspect.signature(decorated)).startswith("(x: 'torch.Tensor', *, by: 'float' = 2.0)")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    function.tag = "here"
    compiled = loose(function)
    assert compiled.tag == "here"
    with pytest.raises(AttributeError, match="nothing"):
        compiled.nothing
    same(decorated(X, by=3.0), X * 3)


def test_copies() -> None:
    assert copy.copy(decorated) is decorated and copy.deepcopy(decorated) is decorated
    model = torch.nn.Module()
    model.function = decorated
    same(copy.deepcopy(model).function(X), X * 2)
    method = whole(Scale(2.0).method)
    twin = copy.deepcopy(method)
    same(twin(X), X * 2 + 1)
    assert twin.__self__ is not method.__self__ and (method.__self__.calls, twin.__self__.calls) == (0, 1)


def test_pickles() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    compiled = whole(operator.neg)
    compiled(X)
    loaded = pickle.loads(pickle.dumps(compiled))
    assert isinstance(loaded, CompiledFunction) and loaded.options == compiled.options and not loaded.entries
    same(loaded(X), -X)
    module = torch.nn.Linear(3, 2)
    restored = pickle.loads(pickle.dumps(whole(module)))
    same(restored(X), module(X))
    assert len(compiled_function(restored).entries) == 1
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(whole(lambda x: x))


@pytest.mark.parametrize("make", [whole, loose])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(
    "function", [torch.add, lambda x, y: torch.cat([x, y]), lambda x, y: x.clone().copy_(y)], ids=["add", "cat", "copy"]
)
def test_tensors_of_two_devices_raise_what_eager_raises(function: Any, needs_gradient: bool, make: Any) -> None:
    x, y = torch.ones(2, 2, requires_grad=needs_gradient), torch.ones(2, 2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        function(x, y)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as found:
            make(function)(x, y)
        assert type(found.value) is type(expected.value) and str(found.value) == str(expected.value)
    same(make(function)(x, torch.ones(2, 2)), function(x, torch.ones(2, 2)))
