"""Functions of torch whose C++ asks for plain sizes, as one call of the graph for all sizes.

Traced as they are, they would hold the graph to the sizes of today's call. Each row of the table is one function, by its name; a
function is also known as a method of tensors. A formula says how the sizes of its results follow. For arguments that the formula
refuses, torch's own function runs, for the sizes of this call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.number_tensors import with_owner
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import trees as private_trees
from dovetail.whole_calls.whole import Whole, call_whole

Sizes = list[tuple[Sequence[Any], torch.dtype]]


class NoRuleError(Exception):
    """No formula says what the sizes are."""


@dataclass(frozen=True)
class Row:
    """The way in which a function is kept whole.

    ``sizes`` gives, for the same arguments, the size and type of each result, which are contiguous; a single one is no tuple. It
    raises :class:`NoRuleError`, or TypeError, for arguments that it does not know. ``always``: with plain sizes too;
    ``when_exact``: then where the graph is to be eager's to the last bit. ``draws``: the call draws random numbers.
    """

    sizes: Callable[..., Sizes]
    always: bool = False
    when_exact: bool = False
    draws: bool = False


def keep_whole(
    interpreter: TracingInterpreter, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], row: Row
) -> Any:
    """The result of a call that is one node of the graph; NotImplemented where torch's own function is to do it."""
    args, kwargs = interpreter.values.for_native(tuple(args)), interpreter.values.for_native(kwargs)
    leaves, structure = private_trees.tree_flatten((args, kwargs))
    sizes = [size for item in leaves for size in (item.shape if isinstance(item, torch.Tensor) else (item,))]
    is_wanted = row.always or (row.when_exact and interpreter.trace.settings.exact)
    if not is_wanted and not any(map(private_sizes.is_symbolic, sizes)):
        return NotImplemented
    is_out = isinstance(kwargs.get("out"), (torch.Tensor, tuple))
    if is_out or private_state.is_any_autocast_on() or any(map(private_sizes.is_data_number, sizes)):
        return NotImplemented
    given = [item for item in leaves if isinstance(item, torch.Tensor)]
    try:
        readers = [_reader(interpreter, item, given, kwargs.get("device")) for item in leaves]
        _require(_are_plain(given))
        row.sizes(*args, **kwargs)
    except (NoRuleError, TypeError):
        return NotImplemented

    def arguments(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = private_trees.tree_unflatten([read(tensors) for read in readers], structure)
        return found

    def run(*tensors: torch.Tensor) -> list[Any]:
        own, keywords = arguments(tensors)
        return private_trees.tree_leaves(function(*own, **keywords))

    def sizes_of(*tensors: torch.Tensor) -> Sizes:
        own, keywords = arguments(tensors)
        return row.sizes(*own, **keywords)

    found = Whole(run, sizes_of, draws=row.draws, name=function.__name__)(*given)
    return interpreter.values.wrap(found[0] if len(found) == 1 else tuple(found))


def _reader(interpreter: TracingInterpreter, leaf: Any, given: list[torch.Tensor], device: Any) -> Any:
    """The reader of an argument from the tensors of the call: a size is given as that of a tensor without elements."""
    if type(leaf) is torch.SymInt:
        _require(private_sizes.hint(leaf) >= 0)
        device = device or (given[0].device if given else torch.get_default_device())
        given.append(interpreter.call_torch(torch.empty, ((leaf, 0),), {"device": device}))
        at = len(given) - 1
        return lambda tensors: tensors[at].shape[0]
    if isinstance(leaf, torch.Tensor):
        at = next(at for at, item in enumerate(given) if item is leaf)
        return lambda tensors: tensors[at]
    _require(is_leaf_value(leaf))
    return lambda tensors: leaf


def _are_plain(values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are dense ones of one device that no transform looks after."""
    is_transformed = private_state.forward_ad_level() >= 0 or any(map(private_tensors.is_functorch_wrapped, values))
    is_dense = all(item.layout is torch.strided and not item.is_conj() and not item.is_neg() for item in values)
    devices = {item.device for item in values}
    return is_dense and not is_transformed and len(devices) == 1 and not any(map(private_tensors.is_wrapper, values))


def _register(name: str, row: Row) -> None:
    @method_rule(name)
    def kept(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_bound = isinstance(getattr(function, "__self__", None), torch.Tensor)
        called = getattr(torch.Tensor, name) if is_bound else function
        return keep_whole(interpreter, called, with_owner(function, args), kwargs, row)


def _require(condition: Any) -> None:
    if not condition:
        raise NoRuleError


def _products(input: torch.Tensor, correction: int = 1) -> Sizes:
    """Covariances and correlations; torch's C++ compares numbers in tensors, which a trace does not always know."""
    _require(0 < input.dim() < 3 and (input.is_floating_point() or input.is_complex()))
    _require(input.shape[-1] > max(correction, 0))
    rows = input.shape[0] if input.dim() == 2 else 1
    return [((rows, rows) if rows != 1 else (), input.dtype)]


def _pooled(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Sizes:
    stride = kernel_size if stride is None or stride in ((), []) else stride
    given = [
        list(item) if isinstance(item, (list, tuple)) else [item] for item in (kernel_size, stride, padding, dilation)
    ]
    _require(input.dim() in (2, 3) and all(len(item) == 1 and type(item[0]) is int for item in given))
    kernel, step, border, spread = (item[0] for item in given)
    _require(step > 0 and spread > 0 and 0 <= 2 * border <= kernel)
    length = input.shape[-1]
    room = length + 2 * border - spread * (kernel - 1) - 1
    _require(room >= 0)
    count = (room + (step - 1 if ceil_mode else 0)) // step + 1
    if ceil_mode and (count - 1) * step >= length + border:
        # The last window begins within the tensor, or within its left border.
        count = count - 1
    shape = (*input.shape[:-1], count)
    return [(shape, input.dtype), (shape, torch.int64)] if return_indices else [(shape, input.dtype)]


def _pooled_with_indices(*args: Any, **kwargs: Any) -> Sizes:
    found = _pooled(*args, **kwargs)
    return [found[0], (found[0][0], torch.int64)]


def _line(start: float, end: float, steps: Any, *, dtype: Any = None, device: Any = None) -> Sizes:
    _require(not isinstance(start, (complex, torch.Tensor)) and not isinstance(end, (complex, torch.Tensor)))
    return [((steps,), dtype or torch.get_default_dtype())]


TABLE: dict[str, Row] = {
    "corrcoef": Row(_products, always=True),
    "cov": Row(_products, always=True),
    "linspace": Row(_line),
    "max_pool1d": Row(_pooled),
    "max_pool1d_with_indices": Row(_pooled_with_indices),
}

for _name, _row in TABLE.items():
    _register(_name, _row)


@method_rule("ctc_loss")
def _ctc_loss(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With lengths in tensors the data decides a size of its operators; in one graph for a backend that takes none it is a call."""
    settings, lengths = interpreter.trace.settings, [*args[2:4], *kwargs.values()]
    is_refused = settings.one_graph and settings.shapes.data_sizes == "break"
    has_tensors = any(isinstance(item, torch.Tensor) for item in lengths)
    return call_whole(function, args, kwargs) if is_refused and has_tensors else NotImplemented
