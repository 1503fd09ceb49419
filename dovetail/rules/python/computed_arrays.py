"""NumPy arrays that a graph computes: ``x.numpy()``, and what NumPy's functions and operators make of such arrays.

NumPy itself computes at every call, as one operator of the graph, so that the numbers are eager's to the last bit. A result that
shares the memory of its argument (``array.T``, ``array[0]``) is a view of the traced tensor. The graph breaks for all else: writes,
results whose size data decides, functions that are not pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, ValueKind, callable_rule, method_rule, rule, value_kind
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.rules.python.numpy_inputs import input_of_array
from dovetail.rules.python.numpy_numbers import ARRAY, NUMPY, SCALAR
from dovetail.rules.python.numpy_values import is_pure, unknown_arrays
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, Retry
from dovetail.trace.shapes import ShapePolicy
from dovetail.whole_calls.call import whole_call

_ADVICE = "use torch's functions, or call it outside of the function"
#: Data decides the size of what they return.
_OF_DATA = frozenset(
    {
        *("nonzero", "flatnonzero", "argwhere", "unique", "unique_values", "unique_counts", "unique_inverse"),
        *("unique_all", "compress", "extract", "trim_zeros", "union1d", "intersect1d", "setdiff1d", "setxor1d"),
        *("bincount", "histogram", "arange", "linspace", "repeat", "delete", "insert"),
    }
)
_OPERATORS = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.matmul, operator.neg, operator.pos, operator.abs, operator.invert, operator.and_, operator.or_),
        *(operator.xor, operator.lshift, operator.rshift, operator.lt, operator.le, operator.gt, operator.ge),
        *(operator.eq, operator.ne),
    }
)
#: Methods that return new arrays or numbers, of a size that follows from their arguments'.
_METHODS = frozenset(
    {
        *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "copy", "cumprod", "cumsum", "dot"),
        *("flatten", "max", "mean", "min", "prod", "round", "std", "sum", "take", "trace", "var"),
    }
)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
_WRITTEN = "an array that the graph computes is written to"


class ComputedArray:
    """An array in the memory of a traced tensor; with ``is_scalar``, the number in a tensor without dimensions."""

    tensor: torch.Tensor
    is_scalar: bool

    def __init__(self, tensor: torch.Tensor, is_scalar: bool = False) -> None:
        self.__dict__.update(tensor=tensor, is_scalar=is_scalar)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Break(_WRITTEN, _ADVICE)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Break(_WRITTEN, _ADVICE)

    def __len__(self) -> int:
        size = self.tensor.shape[0] if self.tensor.dim() else None
        if type(size) is int:
            return size
        raise self._refuse()

    def __getitem__(self, key: Any) -> ComputedArray:
        return _view(self, key)

    def __iter__(self) -> Iterator[ComputedArray]:
        return iter([self[at] for at in range(len(self))])

    def _refuse(self, *others: Any) -> NoReturn:
        raise Break("the items of an array that the graph computes are needed", _ADVICE)

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = __repr__ = __str__ = __format__ = _refuse  # type: ignore[assignment]
    __copy__ = __deepcopy__ = __reduce_ex__ = __array__ = _refuse  # type: ignore[assignment]


@dataclass(frozen=True)
class _Method:
    """A method of :class:`numpy.ndarray`, bound to a computed array."""

    value: ComputedArray
    name: str


def _example(value: ComputedArray) -> Any:
    """An array, or a number of NumPy's, of the same type and dimensions."""
    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        array = torch.zeros((1,) * value.tensor.dim(), dtype=value.tensor.dtype).numpy()
    return array[()] if value.is_scalar else array


class _ArrayKind(ValueKind):
    """Arrays that a graph computes."""

    def claims(self, real: torch.Tensor) -> bool:
        """No tensor is one."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether this is a stand-in."""
        return type(value) is ComputedArray

    def example(self, values: Any, value: Any) -> Any:
        """An array of the same type."""
        return _example(value)

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """The array in the memory of the tensor that the graph returns."""
        return builder.made(value, _number if value.is_scalar else torch.Tensor.numpy, [value.tensor])

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """``value.name``: what the traced tensor knows, a view, or a method."""
        tensor = value.tensor
        if name == "shape":
            return tuple(tensor.shape)
        if name in ("ndim", "size", "itemsize", "nbytes"):
            found = {"ndim": tensor.dim, "size": tensor.numel, "itemsize": tensor.element_size}
            return found[name]() if name in found else tensor.numel() * tensor.element_size()
        if name == "dtype":
            return _example(value).dtype
        if name == "T":
            return ComputedArray(tensor.permute(*reversed(range(tensor.dim()))), value.is_scalar)
        example = _example(value)
        if not hasattr(example, name):
            raise AttributeError(f"{type(example).__qualname__!r} object has no attribute {name!r}", name=name)
        if not callable(getattr(type(example), name)):
            raise Break(f".{name} of an array that the graph computes is read", _ADVICE)
        return _Method(value, name)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """An operator, a function of NumPy's, or one of torch's that makes a tensor of an array."""
        is_array = len(args) == 1 and type(args[0]) is ComputedArray and not args[0].is_scalar
        if function in _LEGACY and is_array and not kwargs and args[0].tensor.dtype in _LEGACY[function]:
            dtype = _LEGACY[function][0] or torch.get_default_dtype()
            return args[0].tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        wanted = {name: item for name, item in kwargs.items() if item is not None}
        if (
            function in _INTO_TENSORS
            and type(args[0]) is ComputedArray
            and len(args) == 1
            and not wanted.keys() - {"dtype"}
        ):
            if function is torch.from_numpy and args[0].is_scalar:
                raise Break("from_numpy is given a number", _ADVICE)
            made = args[0].tensor.detach()
            return made.to(**wanted, copy=function is torch.tensor or args[0].is_scalar)
        if function is operator.getitem and isinstance(args[0], torch.Tensor) and _is_index(args[1]):
            return interpreter.call_torch(function, (args[0], args[1].tensor), {})
        is_known = function in _OPERATORS if getattr(function, "__module__", "") == "_operator" else is_pure(function)
        if not is_known or function.__name__ in _OF_DATA or (function is NUMPY.where and len(args) == 1):
            raise Break(f"{function.__name__} is given an array that the graph computes", _ADVICE)
        return _compute(interpreter, function, args, kwargs)


def _is_index(key: Any) -> bool:
    return type(key) is ComputedArray and not key.is_scalar and key.tensor.dtype in (torch.int64, torch.int32)


def _number(tensor: torch.Tensor) -> Any:
    return tensor.numpy()[()]


_FLOATS = (torch.float32, torch.float64)
#: Constructors that copy: the dtype of the result, None for the default, and dtypes of arrays that they take.
_LEGACY: dict[Any, tuple[Any, ...]] = {
    torch.Tensor: (None, *_FLOATS),
    torch.FloatTensor: _FLOATS,
    torch.DoubleTensor: (torch.float64, torch.float32),
    torch.LongTensor: (torch.int64,),
}
_INTO_TENSORS = (torch.from_numpy, torch.as_tensor, torch.tensor)

_KIND = _ArrayKind()
if NUMPY is not None:
    value_kind(_KIND, ComputedArray)


# --- from tensors to arrays ------------------------------------------------------------------------------------------


@method_rule("numpy")
def _numpy(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    owner = getattr(function, "__self__", None)
    given = (owner, *args) if isinstance(owner, torch.Tensor) else args
    tensor = given[0] if len(given) == 1 and not kwargs else None
    if not isinstance(tensor, torch.Tensor) or not interpreter.trace.settings.one_graph or NUMPY is None:
        return NotImplemented
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if not is_plain or tensor.dtype == torch.bfloat16 or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    return ComputedArray(interpreter.call_torch(torch.Tensor.detach, (tensor,), {}))


@unknown_arrays
def _inputs(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Arrays that existed before the call and have changed since the last one are inputs of the graph."""
    if not interpreter.trace.settings.one_graph:
        return NotImplemented

    def computed(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(computed, value))
        if type(value) in ARRAY and interpreter.values.source_of(value) is not None:
            return ComputedArray(input_of_array(interpreter, value))
        return value

    found = [computed(item) for item in args], {name: computed(item) for name, item in kwargs.items()}
    is_changed = any(item is not given for item, given in zip(found[0], args, strict=True))
    return _KIND.call(interpreter, function, tuple(found[0]), found[1]) if is_changed else NotImplemented


# --- views --------------------------------------------------------------------------------------------------------------


def _view(value: ComputedArray, key: Any) -> ComputedArray:
    """A view by whole numbers and slices. A number where no dimension is left."""
    keys = key if type(key) is tuple else (key,)
    is_plain = all(type(item) in (int, torch.SymInt, slice, type(None), type(Ellipsis)) for item in keys)
    if not is_plain or any(type(item) is slice and type(item.step) is int and item.step < 0 for item in keys):
        raise Break("an array that the graph computes is indexed by another, or turned around", _ADVICE)
    found = value.tensor[keys]
    return ComputedArray(found, not found.dim() and Ellipsis not in keys)


def _reshape(value: ComputedArray, *shape: Any, **kwargs: Any) -> ComputedArray:
    if kwargs:
        raise Break("an array that the graph computes is reshaped in another order", _ADVICE)
    return ComputedArray(value.tensor.reshape(*shape))


def _transpose(value: ComputedArray, *axes: Any) -> ComputedArray:
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], (list, tuple)) else axes
    dims = value.tensor.dim()
    return ComputedArray(value.tensor.permute(*(order if order and order[0] is not None else reversed(range(dims)))))


def _squeeze(value: ComputedArray, axis: Any = None) -> ComputedArray:
    if axis is None:
        return ComputedArray(value.tensor.squeeze())
    if type(axis) is not int or axis >= value.tensor.dim() or value.tensor.shape[axis] != 1:
        raise Break("an axis of an array that the graph computes is squeezed out", _ADVICE)
    return ComputedArray(value.tensor.squeeze(axis))


_VIEWS: dict[str, Callable[..., ComputedArray]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "ravel": lambda value: ComputedArray(value.tensor.reshape(-1)),
    "swapaxes": lambda value, first, second: ComputedArray(value.tensor.transpose(first, second)),
    "asarray": lambda value: value,
    "expand_dims": lambda value, axis: ComputedArray(value.tensor.unsqueeze(axis)),
}


def _viewed(name: str, args: Arguments, kwargs: Keywords) -> ComputedArray:
    try:
        return _VIEWS[name](*args, **kwargs)
    except TypeError as error:
        raise Break(f"numpy's {name} is called in a form that no view of a tensor has", _ADVICE) from error


@callable_rule(_Method)
def _call_method(interpreter: TracingInterpreter, method: Any, args: Arguments, kwargs: Keywords) -> Any:
    name, value = method.name, method.value
    if name in _VIEWS and not value.is_scalar:
        return _viewed(name, (value, *args), kwargs)
    if name == "item" and not args and not kwargs:
        return interpreter.call_torch(torch.Tensor.item, (value.tensor,), {})
    if name == "tolist":
        return interpreter.call_torch(torch.Tensor.tolist, (value.tensor,), {})
    if name not in _METHODS:
        raise Break(f".{name} of an array that the graph computes is called", _ADVICE)
    return _compute(interpreter, operator.methodcaller, (value, *args), kwargs, name)


def _method_of_array(name: str, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """A method of an array that existed before the call, or that the program has made."""
    array, *rest = args
    if interpreter.values.source_of(array) is None:
        return interpreter.native(getattr(array, name), tuple(rest), kwargs)
    if type(array) not in ARRAY or not interpreter.trace.settings.one_graph:
        raise Break(f"ndarray.{name} may read or change state that nobody guards", _ADVICE)
    method = _Method(ComputedArray(input_of_array(interpreter, array)), name)
    return _call_method(interpreter, method, tuple(rest), kwargs)


for _name in () if NUMPY is None else sorted({*_METHODS, *_VIEWS, "tolist", "item"} & vars(NUMPY.ndarray).keys()):
    rule(getattr(NUMPY.ndarray, _name))(functools.partial(_method_of_array, _name))


# --- NumPy as an operator -------------------------------------------------------------------------------------------


def _compute(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, method: str = ""
) -> Any:
    """A pure function of NumPy's as one node; raises :class:`Break` where it cannot be one."""
    name = method or function.__name__
    if not method and name in _VIEWS and args and type(args[0]) is ComputedArray and not args[0].is_scalar:
        return _viewed(name, args, kwargs)
    tensors: list[ComputedArray] = []
    if kwargs.get("out") is not None:
        raise Break(_WRITTEN, _ADVICE)
    if not interpreter.trace.settings.one_graph:
        # A graph in which NumPy computes has no derivatives of higher order outside.
        raise Break(f"numpy's {name} is given an array that the graph has", _ADVICE)
    template = _template(interpreter, [list(args), dict(kwargs)], tensors)
    forms: list[Any] = []

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        arrays = [tensor.numpy() for tensor in given]
        for array in arrays:
            # An output that is given by its position would be written to past autograd.
            array.setflags(write=False)
        positional, keywords = _filled(
            template, [array[()] if flag else array for array, flag in zip(arrays, flags, strict=True)]
        )
        if method:
            result = getattr(positional[0], method)(*positional[1:], **keywords)
        else:
            result = function(*positional, **keywords)
        results = result if type(result) in (tuple, list) else (result,)
        if any(not isinstance(item, (*ARRAY, *SCALAR)) for item in results):
            raise CaptureError(f"numpy's {name} returns something else than arrays")
        if any(isinstance(item, ARRAY) and NUMPY.shares_memory(item, array) for item in results for array in arrays):
            raise CaptureError(f"numpy's {name} returns a view")
        if not forms:
            forms.append((type(result), [isinstance(item, SCALAR) for item in results]))
        return [torch.from_numpy(NUMPY.array(item)) for item in results]

    flags = [value.is_scalar for value in tensors]
    interpreter.trace.recorder.refuse_replay("NumPy computes in it")
    try:
        with interpreter.trace.recorder.paused(), private_calls.no_torch_function(), _quiet():
            found = whole_call(interpreter.trace, name, run, [value.tensor for value in tensors])
    except CaptureError as error:
        raise Break(error.what, error.advice) from error
    except (TypeError, ValueError) as error:
        if "read-only" in str(error):
            raise Break(_WRITTEN, _ADVICE) from error
        if type(error) in (TypeError, ValueError) and "dtype" not in str(error):
            raise
        raise Break(f"numpy's {name} returns what torch has no type for", _ADVICE) from error
    for item in found:
        interpreter.trace.recorder.number(item)
    kind, scalars = forms[0]
    made = [ComputedArray(item, flag) for item, flag in zip(found, scalars, strict=True)]
    return kind(made) if kind in (tuple, list) else made[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """NumPy says nothing of made-up values."""
    with NUMPY.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_plain_sizes(settings: CaptureSettings) -> CaptureSettings:
    """These settings with sizes as plain numbers; what the data decides (``loss.item()``) stays symbolic."""
    return dataclasses.replace(settings, shapes=ShapePolicy(allowed=False, data_sizes=settings.shapes.data_sizes))


def _template(interpreter: TracingInterpreter, value: Any, tensors: list[ComputedArray]) -> Any:
    """Arguments as constants, with numbers in the place of computed arrays, which are collected."""
    kind = type(value)
    if kind is ComputedArray:
        if private_sizes.has_symbols(value.tensor):
            reason = "NumPy is given an array of a size that changes"
            if not interpreter.trace.settings.shapes.allowed:
                raise Break(reason, _ADVICE)
            is_of_data = any(map(private_sizes.is_data_number, value.tensor.shape))
            raise Retry(reason, change=CaptureSettings.with_fewer_symbols if is_of_data else with_plain_sizes)
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if kind in (list, tuple):
        interpreter.values.whole(value)
        return kind(_template(interpreter, item, tensors) for item in value)
    if kind is dict:
        return {key: _template(interpreter, item, tensors) for key, item in value.items()}
    try:
        value = plain_numbers(value)
    except private_tracing.DATA_DEPENDENT_ERRORS as error:
        raise Break("NumPy is given a number made of data", _ADVICE) from error
    if kind in ARRAY and interpreter.values.source_of(value) is None:
        constant = value.copy(order="K")
        constant.setflags(write=False)
        return constant
    is_type = isinstance(value, type) and value.__module__ in ("numpy", "builtins")
    if is_type or type(value) in _PLAIN or isinstance(value, (*SCALAR, NUMPY.dtype)):
        return value
    raise Break(f"NumPy is given an array that the graph computes and a {kind.__qualname__}", _ADVICE)


@dataclass(frozen=True)
class _Place:
    at: int


def _filled(template: Any, arrays: Sequence[Any]) -> Any:
    kind = type(template)
    if kind is _Place:
        return arrays[template.at]
    if kind in (list, tuple):
        return kind(_filled(item, arrays) for item in template)
    return {key: _filled(item, arrays) for key, item in template.items()} if kind is dict else template
