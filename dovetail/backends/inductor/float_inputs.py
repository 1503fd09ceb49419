"""Symbolic floats as the zero-dimensional tensors that carry them, because Inductor takes only tensors and integers.

A float times a tensor of at least one dimension gives that tensor's dtype, whether the float is a Python number or a
zero-dimensional tensor. An operator with a float that is none of these, such as one that draws random numbers, is called as it is:
it reads its float from the tensor when it runs. A graph whose meaning would change is refused.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from dovetail.errors import BackendError
from dovetail.rules.sizes.exact_numbers import real_power
from dovetail.rules.sizes.scalar_operators import calls_with_tensors, gives_new_tensors, takes_tensors, torchs_own
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tracing as private_tracing

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_READ = _aten._local_scalar_dense.default
_NUMBER_TYPES = frozenset({"float", "number", "Optional[float]", "Optional[number]"})
#: Operators on a tensor and a number, with the operator on two tensors.
_ARITHMETIC = ("add", "sub", "mul", "div")
_BINARY: dict[Any, Any] = {
    **{getattr(_aten, name).Tensor: getattr(_aten, name).Tensor for name in _ARITHMETIC},
    **{
        getattr(_aten, name).Scalar: getattr(_aten, name).Tensor
        for name in (*_ARITHMETIC, "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in ("remainder", "fmod")},
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode), _aten.div.Tensor_mode),
    **{getattr(_aten, name).default: getattr(_aten, name).Tensor for name in ("clamp_min", "clamp_max")},
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
    _aten.pow.Scalar: _aten.pow.Tensor_Tensor,
}
_COMPARISONS = frozenset(getattr(_aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge"))
#: Operators on two tensors and a factor, with the operator that combines the two.
_SCALED: dict[Any, Any] = {_aten.addcdiv.default: _aten.div.Tensor, _aten.addcmul.default: _aten.mul.Tensor}
#: Python's functions of numbers, with the operator on zero-dimensional tensors of double precision.
_NUMBERS: dict[Any, Any] = {
    **{
        getattr(operator, f"{prefix}{'truediv' if name == 'div' else name}"): getattr(_aten, name).Tensor
        for name in _ARITHMETIC
        for prefix in ("", "i")
    },
    torch.sym_float: _aten.clone.default,
    operator.neg: _aten.neg.default,
    abs: _aten.abs.default,
    max: _aten.maximum.default,
    min: _aten.minimum.default,
    math.sqrt: _aten.sqrt.default,
    math.exp: _aten.exp.default,
    operator.pow: _aten.pow.Tensor_Tensor,
    real_power: _aten.pow.Tensor_Tensor,
}

#: The same functions by name.
NUMBER_FUNCTIONS: dict[str, Any] = {f"number.{function.__name__}": function for function in _NUMBERS}


def floats_as_tensors(graph: torch.fx.GraphModule) -> None:
    """Rewrite ``graph`` so that it reads no float from a tensor; raises :class:`BackendError` if its meaning would change."""
    scalars = [node for node in graph.graph.nodes if _is_float(node)]
    for scalar in scalars:
        if scalar.target is _READ and scalar.args[0].meta["val"].dim():  # type: ignore[union-attr]
            _without_dimensions(graph.graph, scalar)
    tensors: dict[torch.fx.Node, torch.fx.Node] = {}
    for scalar in scalars:
        tensors[scalar] = (
            _double(graph.graph, scalar) if scalar.target is _READ else _computed(graph.graph, scalar, tensors)
        )
    for scalar in scalars:
        # A number that is only read keeps the dtype of its tensor; a computed one has double precision.
        tensor: Any = scalar.args[0] if scalar.target is _READ else tensors[scalar]
        for user in list(scalar.users):
            if user not in tensors:
                user.replace_input_with(scalar, _rewrite(graph.graph, user, scalar, tensor))
    for scalar in reversed(scalars):
        graph.graph.erase_node(scalar)
    for tensor in reversed(tensors.values()):
        if not tensor.users:
            graph.graph.erase_node(tensor)


def _is_float(node: torch.fx.Node) -> bool:
    is_known = node.target is _READ or node.target in _NUMBERS
    return node.op == "call_function" and is_known and isinstance(node.meta.get("val"), torch.SymFloat)


def _without_dimensions(graph: torch.fx.Graph, scalar: torch.fx.Node) -> None:
    """Read the number from a view: beside another tensor, one of a single element counts for shape and dtype, a number does not."""
    tensor: Any = scalar.args[0]
    with graph.inserting_before(scalar):
        viewed = graph.call_function(_aten.reshape.default, (tensor, []))
    scalar.replace_input_with(tensor, _with_value(viewed, scalar, tensor.meta["val"].reshape(())))


def _double(graph: torch.fx.Graph, scalar: torch.fx.Node) -> torch.fx.Node:
    tensor: Any = scalar.args[0]
    with graph.inserting_after(scalar):
        made = graph.call_function(_CONVERT, (tensor, torch.float64))
    return _with_value(made, scalar, tensor.meta["val"].to(torch.float64))


def _computed(
    graph: torch.fx.Graph, scalar: torch.fx.Node, tensors: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """Return the tensor of a number that Python computes, of other such numbers and of sizes."""
    nodes = [item for item in scalar.args if isinstance(item, torch.fx.Node)]
    if not nodes or not all(item in tensors or isinstance(item.meta.get("val"), torch.SymInt) for item in nodes):
        raise _refusal(scalar, scalar)
    known = [tensors[item].meta["val"] for item in nodes if item in tensors]
    example = known[0] if known else _double_like(graph)
    settings = {"dtype": torch.float64, "device": example.device}
    with graph.inserting_before(scalar):
        arguments = []
        for item in scalar.args:
            if isinstance(item, torch.fx.Node) and item in tensors:
                arguments.append(tensors[item])
                continue
            # A size, below 2^53, is a double exactly; a larger number is rounded once more than by Python.
            is_size = isinstance(item, torch.fx.Node)
            made_by, given = (_aten.scalar_tensor.default, (item,)) if is_size else (_aten.full.default, ([], item))
            arguments.append(_with_value(graph.call_function(made_by, given, settings), scalar, example))
        made = graph.call_function(_NUMBERS[scalar.target], tuple(arguments))
    return _with_value(made, scalar, example)


def _double_like(graph: torch.fx.Graph) -> torch.Tensor:
    """A fake number of double precision where the tensors of the graph are."""
    values = (node.meta.get("val") for node in graph.nodes)
    like = next(value for value in values if isinstance(value, torch.Tensor))
    with private_tracing.disable_current_modes(), torch.no_grad():
        return like.new_empty((), dtype=torch.float64)


def _with_value(made: torch.fx.Node, scalar: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
    # The number's symbol no longer exists.
    made.meta = {name: item for name, item in scalar.meta.items() if name != "unbacked_bindings"} | {"val": value}
    return made


def _rewrite(graph: torch.fx.Graph, user: torch.fx.Node, number: torch.fx.Node, tensor: torch.fx.Node) -> torch.fx.Node:
    """Change ``user`` to an operator that takes tensors; return the tensor in the number's place."""
    meant = torchs_own(user.target)
    if meant is not None and meant in _BINARY:
        user.target = meant
    if user.target is _aten.scalar_tensor.default and user.args == (number,):
        dtype = user.kwargs.get("dtype") or torch.get_default_dtype()
        user.target, user.args, user.kwargs = _CONVERT, (tensor, dtype), {}
        return tensor
    if user.target is _aten.full.default and user.args[1:] == (number,):
        return _filled(graph, user, number, tensor)
    is_alpha = user.target is _aten.add.Tensor and user.kwargs == {"alpha": number}
    is_value = user.target in _SCALED and user.kwargs == {"value": number}
    if number not in user.args and (is_alpha or is_value):
        value = _checked(user, number, user.args[1])
        if not value.dim() and value.dtype.itemsize < 4:
            # Eager's kernel takes the number in a wider type.
            raise _refusal(user, number)
        meta = {**user.meta, "val": value}
        with graph.inserting_before(user):
            inner: Any = user.args[1]
            if is_value:
                inner = graph.call_function(_SCALED[user.target], user.args[1:])
                inner.meta = meta
            factor = tensor if value.dim() else _converted(graph, user, tensor, value)
            product = graph.call_function(_aten.mul.Tensor, (inner, factor))
        product.meta = meta
        user.target, user.args, user.kwargs = _aten.add.Tensor, (user.args[0], product), {}
        return tensor
    others = [item for item in user.args if item is not number]
    if user.target not in _BINARY or user.kwargs.keys() - {"rounding_mode"} or len(others) != 1:
        return _as_it_is(user, number, tensor)
    value = _checked(user, number, _as_floats(graph, user, others[0]))
    user.target = _BINARY[user.target]
    if value.dim():
        return tensor
    with graph.inserting_before(user):
        return _converted(graph, user, tensor, value)


def _converted(graph: torch.fx.Graph, user: torch.fx.Node, tensor: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
    """Return the number in the type of its partner: beside a tensor without dimensions, the number's own would count."""
    converted = graph.call_function(_CONVERT, (tensor, value.dtype))
    converted.meta = {**user.meta, "val": tensor.meta["val"].to(value.dtype)}
    return converted


def _as_floats(graph: torch.fx.Graph, user: torch.fx.Node, other: Any) -> Any:
    """Have whole numbers and truth values beside a float as what they are converted to; return the argument of ``user``."""
    value: Any = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return other
    dtype = torch.get_default_dtype() if user.target in _COMPARISONS else user.meta["val"].dtype
    with graph.inserting_before(user):
        converted = graph.call_function(_CONVERT, (other, dtype))
    converted.meta = {**user.meta, "val": value.to(dtype)}
    user.replace_input_with(other, converted)
    return converted


def _as_it_is(user: torch.fx.Node, number: torch.fx.Node, tensor: torch.fx.Node) -> torch.fx.Node:
    """Change ``user`` to an operator that calls it with the number in the tensor."""
    operator = user.target
    meant = calls_with_tensors(operator)
    names, operator = meant if meant is not None else ((), operator)
    if not isinstance(operator, private_operators.OpOverload) or not gives_new_tensors(operator):
        raise _refusal(user, number)
    arguments = operator._schema.arguments
    given = {**dict(zip((item.name for item in arguments), user.args, strict=False)), **user.kwargs}
    found = tuple(item.name for item in arguments if given.get(item.name) is number or item.name in names)
    if any(str(item.type) not in _NUMBER_TYPES for item in arguments if item.name in found):
        raise _refusal(user, number)
    user.target = takes_tensors(operator, found)
    # The facts by which Inductor would lay the arguments out, the number among them.
    user.meta.pop("eager_input_vals", None)
    return tensor


def _filled(graph: torch.fx.Graph, user: torch.fx.Node, number: torch.fx.Node, tensor: torch.fx.Node) -> torch.fx.Node:
    """Change ``user``, a tensor full of ``number``, to ones times the number: memory of its own, and the number's sign of zero."""
    value: Any = user.meta["val"]
    if value.dtype is torch.bool:
        raise _refusal(user, number)
    with graph.inserting_before(user):
        ones = graph.call_function(_aten.full.default, (user.args[0], 1), user.kwargs | {"dtype": value.dtype})
        converted = graph.call_function(_CONVERT, (tensor, value.dtype))
    ones.meta = dict(user.meta)
    converted.meta = {**user.meta, "val": tensor.meta["val"].to(value.dtype)}
    user.target, user.args, user.kwargs = _aten.mul.Tensor, (ones, converted), {}
    return converted


def _checked(user: torch.fx.Node, number: torch.fx.Node, other: Any) -> torch.Tensor:
    """Return the fake value of the number's partner, which must be a floating-point tensor."""
    value: Any = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    fits = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if not fits:
        raise _refusal(user, number)
    return value


def _refusal(user: torch.fx.Node, number: torch.fx.Node) -> BackendError:
    return BackendError(
        f"the number {number.name}, which changes from call to call, is an argument of {user.target}, and the compiler "
        "takes such a number in sums, products, powers and comparisons with tensors only",
        where=user.meta.get("user_line"),
        advice='keep the number in a tensor, or use backend="aten"',
    )
