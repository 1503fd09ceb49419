"""What libraries above torch do: caches of their own, modules that override their call, graph modules, named tuples of sizes."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import check_entries, leaf, same

LIBRARY = """
import functools
import torch

class Recipe:
    def __init__(self, axes):
        self.axes = axes

@functools.lru_cache(256)
def recipe_of(pattern):
    return Recipe(["ab".index(letter) for letter in pattern])

@functools.lru_cache(1024)
def sizes_of(recipe, shape):
    return [shape[axis] for axis in recipe.axes]

@functools.lru_cache(maxsize=2)
def table(size, *, step=1.0):
    made.append(size)
    return torch.arange(size) * step

made = []

def rearrange(x, pattern):
    recipe = recipe_of(pattern)
    return x.permute(recipe.axes).reshape(sizes_of(recipe, tuple(x.shape)))
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that lies where installed packages lie."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "rearranging.py").write_text(LIBRARY)
    specification = importlib.util.spec_from_file_location("rearranging", folder / "rearranging.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["rearranging"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["rearranging"]


def test_a_library_keeps_its_recipes_in_a_cache(library: ModuleType) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return library.rearrange(x * 2, "ba") @ x

    assert check_entries(program, [(leaf(size, 3),) for size in (4, 5, 7, 6)]) == 2


def test_what_is_read_from_a_cached_object_is_guarded(library: ModuleType) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x.permute(library.recipe_of("ba").axes) * 2
        return result

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.randn(4, 3)
    assert torch.equal(compiled(x), program(x))
    library.recipe_of("ba").axes.reverse()
    assert torch.equal(compiled(x), program(x))
    assert compiled(x).shape == (4, 3)


def _forget(library: ModuleType) -> None:
    for size in (7, 8):
        library.table(size)


TABLES: dict[str, Any] = {
    "read": lambda library, x: x * library.table(3, step=0.5) + library.table(3),
    "written": lambda library, x: x * library.table(3).add_(1.0),
    "returned": lambda library, x: (x + library.table(3), library.table(3)),
    "differentiated": lambda library, x: (x * library.table(3, step=0.5).requires_grad_()).square(),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_library_keeps_tensors_in_a_cache(library: ModuleType, name: str) -> None:
    changes = [lambda: None, library.table.cache_clear, lambda: library.table(3).mul_(5), lambda: _forget(library)]

    def outcomes(run: Any) -> list[Any]:
        library.table.cache_clear()
        library.made.clear()
        found = []
        for change, _ in itertools.product([*changes, lambda: None], range(2)):
            change()
            x = torch.linspace(0.5, 1, 3).requires_grad_()
            results = run(x)
            first, *others = results if isinstance(results, tuple) else (results,)
            first.sum().backward()
            found += [first.detach(), x.grad, *[item is library.table(3) for item in others], library.table(3).clone()]
            found.append(torch.tensor(library.made))
        return found

    compiled = dovetail.compile(lambda x: TABLES[name](library, x), backend="aten", fullgraph=True)
    same(outcomes(lambda x: TABLES[name](library, x)), outcomes(compiled))


class Checked(torch.nn.Module):
    """Checks its arguments in a call of its own, as graph libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def __call__(self, x: torch.Tensor, factor: float = 1.0) -> Any:
        try:
            return super().__call__(x * factor)
        except RuntimeError as error:
            raise ValueError("the sizes do not fit") from error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


def test_a_module_whose_class_overrides_the_call() -> None:
    module = Checked()

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module(x, factor=2.0)
        return result

    assert check_entries(program, [(leaf(size, 3),) for size in (4, 5, 7, 6)]) == 2
    with pytest.raises(ValueError, match="the sizes do not fit"):
        dovetail.compile(program, backend="aten")(leaf(4, 5))


def test_a_graph_module_is_called_as_a_module() -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    module = torch.fx.symbolic_trace(Small())

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module(x) * 2
        return result

    assert check_entries(program, [(leaf(size, 3),) for size in (4, 5, 7, 6)]) == 2
    module.register_forward_hook(lambda owner, given, result: result + 1)
    assert check_entries(program, [(leaf(size, 3),) for size in (4, 5)]) == 2


class Sizes(NamedTuple):
    rows: int
    data: torch.Tensor


def test_a_named_tuple_of_sizes_stays_symbolic() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, Sizes]:
        sizes = Sizes(x.shape[0], x)
        more = sizes._replace(rows=sizes.rows + 1)
        return sizes.data[: more.rows - 2].sum() * more.rows, more

    assert check_entries(program, [(leaf(size, 3),) for size in (4, 5, 7, 6)]) == 2


class Local(threading.local):
    calls = 0


local = Local()


def test_a_thread_local_attribute_of_the_class_is_a_break_in_words() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        local.calls = local.calls + 1
        return x * 2

    with pytest.raises(GraphBreakError, match="an attribute of a thread-local object is read"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))
    compiled = dovetail.compile(program, backend="aten")
    before = local.calls
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2) * 2)
    assert local.calls == before + 1


class Counting(torch.fx.GraphModule):
    """A graph module with a call of its own."""

    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().__call__(x) * 2


def test_call_of_a_class_of_graph_modules() -> None:
    """``GraphModule`` puts a call with better tracebacks in front of that of the class."""
    module = Counting(torch.nn.Module(), torch.fx.Tracer().trace(lambda x: x.sin()))
    compiled = dovetail.compile(lambda x: module(x), backend="aten", fullgraph=True)
    x = leaf(3)
    expected = module(x)
    same(expected, compiled(x))
    assert Counting.calls == 2
    same(expected, compiled(x))
    assert Counting.calls == 3
