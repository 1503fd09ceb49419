"""Compare two worlds (what two runs of the same program returned and left behind), identity and storage sharing included."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
    torch.layout,
)
_SKIPPED_NAMES = frozenset(
    {"__builtins__", "__name__", "__doc__", "__file__", "__warningregistry__", "__logger__", "__inner__"}
)
_SKIPPED_IN_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "_backward_cls"}
)


class Difference(Exception):
    """The two worlds differ: ``kind`` is the sort of difference, the text says where."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Comparison:
    """One walk over two worlds side by side. Two objects are paired at the first meeting and must stay a pair.

    Values are alike to the bit, or with a tolerance. Gradients are added up in orders that differ, and always have one; what lies in a
    global named ``gradients`` may be a view of what the operators of a backward have made.
    """

    def __init__(self, own_module: str, tolerance: float = 0.0, has_gradients: bool = True) -> None:
        self._own_module = own_module
        self._tolerance = tolerance
        self._has_gradients = has_gradients
        self._left: dict[int, int] = {}
        self._right: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._storages_back: dict[int, int] = {}
        self._kept: list[Any] = []
        self.tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def same(self, left: Any, right: Any, path: str) -> None:
        """Raise :class:`Difference` unless the two values are alike in everything that a program can see."""
        if type(left) is not type(right) and not self._same_class(type(left), type(right)):
            raise Difference(
                f"type {type(left).__name__} {type(right).__name__}",
                f"{path}: {type(left).__name__} and {type(right).__name__}: {left!r:.200} and {right!r:.200}",
            )
        if isinstance(left, _VALUES) and type(left).__module__ in ("builtins", "torch"):
            close = isinstance(left, float) and math.isclose(left, right, rel_tol=self._tolerance)
            if left != right and repr(left) != repr(right) and not close:
                raise Difference("value", f"{path}: {left!r} and {right!r}")
            return
        if not isinstance(left, tuple) or not self._is_plain_tuple(left):
            if not self._pair(left, right, path):
                return
        self._contents(left, right, path)

    @staticmethod
    def _same_class(left: type, right: type) -> bool:
        """Whether two classes are the two worlds' versions of one class, of the program or made by a function."""
        return (left.__module__, left.__qualname__) == (right.__module__, right.__qualname__)

    @staticmethod
    def _is_plain_tuple(value: Any) -> bool:
        # The interpreter itself shares or rebuilds constant tuples: their identity is no promise of Python.
        return type(value) is tuple

    def _pair(self, left: Any, right: Any, path: str) -> bool:
        """Note a pair. Returns False where the pair is known already, and raises where one of the two has another mate."""
        known_left, known_right = self._left.get(id(left)), self._right.get(id(right))
        if known_left is None and known_right is None:
            self._left[id(left)], self._right[id(right)] = id(right), id(left)
            self._kept += (left, right)
            return True
        if known_left != id(right) or known_right != id(left):
            raise Difference(
                "identity", f"{path}: the same object as before in one of the two only ({type(left).__name__})"
            )
        return False

    def _contents(self, left: Any, right: Any, path: str) -> None:
        for kind, compare in self._kinds:
            if isinstance(left, kind):
                compare(left, right, path)
                return
        if hasattr(left, "__dict__") and type(left).__module__ != "builtins":
            if type(left).__module__ == self._own_module:
                self.same(type(left), type(right), f"{path}.__class__")
            self._mapping(vars(left), vars(right), f"{path}.__dict__")

    @property
    def _kinds(self) -> tuple[tuple[Any, Callable[[Any, Any, str], None]], ...]:
        return (
            (torch.Tensor, self._tensor),
            (dict, self._mapping),
            ((list, tuple), self._sequence),
            ((set, frozenset), self._set),
            ((types.ModuleType, type), self._module_or_class),
            (types.FunctionType, self._function),
            (types.CellType, self._cell),
            (types.MethodType, functools.partial(self._attributes, ("__func__", "__self__"))),
            (functools.partial, functools.partial(self._attributes, ("func", "args", "keywords"))),
            ((property, staticmethod, classmethod), functools.partial(self._attributes, ("fget", "fset", "__func__"))),
            (BaseException, self._exception),
        )

    def _sequence(self, left: Any, right: Any, path: str) -> None:
        if len(left) != len(right):
            raise Difference("length", f"{path}: {len(left)} and {len(right)}")
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            self.same(a, b, f"{path}[{position}]")

    def _set(self, left: Any, right: Any, path: str) -> None:
        if sorted(map(repr, left)) != sorted(map(repr, right)):
            raise Difference("value", f"{path}: {left!r} and {right!r}")

    def _module_or_class(self, left: Any, right: Any, path: str) -> None:
        if isinstance(left, type) and left.__module__ == self._own_module:
            self._class(left, right, path)
        elif left is not right:
            raise Difference("identity", f"{path}: {left} and {right}")

    def _attributes(self, names: tuple[str, ...], left: Any, right: Any, path: str) -> None:
        for name in names:
            self.same(getattr(left, name, None), getattr(right, name, None), f"{path}.{name}")

    def _exception(self, left: Any, right: Any, path: str) -> None:
        if str(left) != str(right):
            raise Difference("value", f"{path}: {left!r} and {right!r}")

    def _mapping(
        self, left: dict[Any, Any], right: dict[Any, Any], path: str, skipped: frozenset[str] = frozenset()
    ) -> None:
        # Torch numbers the hooks of a process.
        name = (lambda _: "a hook") if path.endswith("_hooks']") else _name
        left_keys = {key: name(key) for key in left if not isinstance(key, str) or key not in skipped}
        right_keys = {key: name(key) for key in right if not isinstance(key, str) or key not in skipped}
        if [*left_keys.values()] != [*right_keys.values()]:
            raise Difference("keys", f"{path}: {left_keys.values()!r:.300} and {right_keys.values()!r:.300}")
        for key, other in zip(left_keys, right_keys, strict=True):
            if isinstance(key, torch.Tensor):
                self.same(key, other, f"{path}.keys()")
            self.same(left[key], right[other], f"{path}[{left_keys[key]}]")

    def namespace(self, left: dict[str, Any], right: dict[str, Any]) -> None:
        """Compare two sets of global variables."""
        self._mapping(left, right, "globals", _SKIPPED_NAMES)

    def _class(self, left: type, right: type, path: str) -> None:
        if left.__qualname__ != right.__qualname__:
            raise Difference("value", f"{path}: {left} and {right}")
        left_names = {name: item for name, item in vars(left).items() if name not in _SKIPPED_IN_CLASSES}
        right_names = {name: item for name, item in vars(right).items() if name not in _SKIPPED_IN_CLASSES}
        self._mapping(left_names, right_names, path)

    def _function(self, left: types.FunctionType, right: types.FunctionType, path: str) -> None:
        if (left.__qualname__, left.__code__.co_firstlineno) != (right.__qualname__, right.__code__.co_firstlineno):
            raise Difference("value", f"{path}: {left.__qualname__} and {right.__qualname__}")
        if left.__module__ != self._own_module:
            return
        self.same(left.__defaults__, right.__defaults__, f"{path}.__defaults__")
        self.same(left.__kwdefaults__, right.__kwdefaults__, f"{path}.__kwdefaults__")
        self.same(left.__dict__, right.__dict__, f"{path}.__dict__")
        for name, a, b in zip(left.__code__.co_freevars, left.__closure__ or (), right.__closure__ or (), strict=True):
            self.same(a, b, f"{path}.<{name}>")

    def _cell(self, left: types.CellType, right: types.CellType, path: str) -> None:
        contents = []
        for cell in (left, right):
            try:
                contents.append([cell.cell_contents])
            except ValueError:
                contents.append([])
        self.same(len(contents[0]), len(contents[1]), f"{path} is empty")
        if contents[0]:
            self.same(contents[0][0], contents[1][0], path)

    def _tensor(self, left: torch.Tensor, right: torch.Tensor, path: str) -> None:
        for name in ("dtype", "shape", "requires_grad", "is_leaf"):
            a, b = _asked(left, name), _asked(right, name)
            if a != b:
                raise Difference(name, f"{path}: {a} and {b}")
            if isinstance(a, str):
                return
        if left.stride() != right.stride() or left.storage_offset() != right.storage_offset():
            raise Difference(
                "stride",
                f"{path}: {left.stride()} and {right.stride()}, offsets {left.storage_offset()}, {right.storage_offset()}",
            )
        if not bitwise_equal(left, right) and not (
            self._tolerance and left.is_floating_point() and close(left, right, self._tolerance)
        ):
            raise Difference("tensor", f"{path}: {left.detach()} and {right.detach()}")
        if self._has_gradients:
            self.gradient(left, right, path)
        a, b = left.untyped_storage().data_ptr(), right.untyped_storage().data_ptr()
        if (a or b) and (self._storages.setdefault(a, b) != b or self._storages_back.setdefault(b, a) != a):
            raise Difference("storage", f"{path}: shares its storage with another tensor in one of the two only")
        if (left._base is None) != (right._base is None) and not path.startswith("globals['gradients']"):
            raise Difference("base", f"{path}: {left._base} and {right._base}")
        self.tensors.append((path, left, right))

    def gradient(self, left: torch.Tensor, right: torch.Tensor, path: str) -> None:
        """Raise :class:`Difference` unless what has been accumulated in two tensors is alike."""
        if not (left.is_leaf or left.retains_grad):
            return
        a, b = left.grad, right.grad
        if a is None and b is None:
            return
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            raise Difference("gradient", f"{path}.grad: {a} and {b}")
        if not close(a, b, max(self._tolerance, 1e-4)):
            raise Difference("gradient", f"{path}.grad: {a} and {b}")


def _name(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else repr(key)


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by little, seen from the largest of the values."""
    scale = float(left.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if left.numel() else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=0.1 * tolerance * max(scale, 1.0), equal_nan=True)


def _asked(tensor: torch.Tensor, name: str) -> Any:
    """An attribute of a tensor, or the text of the error: a view made under no_grad may refuse to be asked after a write."""
    try:
        return getattr(tensor, name)
    except RuntimeError as error:
        return str(error)


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same values; any NaN is like any other."""
    with torch.no_grad():
        return torch.equal(torch.nan_to_num(left, nan=12345.0), torch.nan_to_num(right, nan=12345.0)) and torch.equal(
            left.isnan(), right.isnan()
        )
