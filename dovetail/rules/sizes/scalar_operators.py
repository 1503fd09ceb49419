"""Torch's operators that take a C++ ``float``, with numbers that may change from call to call.

For an argument that a schema calls ``float``, torch asks a symbolic number for its value. The operators here have the same names
and arguments in Dovetail's own namespace, take a ``Scalar`` there, and call torch's. They are defined when one is asked for:
milliseconds that most programs need not wait.

>>> operator = takes_numbers(torch.ops.aten.huber_loss.default)
>>> operator, torchs_own(operator)
(<OpOverload(op='dovetail.huber_loss', overload='default')>, <OpOverload(op='aten.huber_loss', overload='default')>)
>>> operator(torch.tensor([3.0]), torch.tensor([1.0]), 1, 0.5)
tensor(0.8750)
>>> takes_tensors(operator, ("delta",))(torch.tensor([3.0]), torch.tensor([1.0]), 1, torch.tensor(0.5))
tensor(0.8750)
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from dovetail.torch_private import sizes as private_sizes

_EXAMPLE = 0.5
_LOCK = threading.Lock()
_OWN: dict[Any, Any] = {}
_OF_NUMBERS: dict[Any, Any] = {}
_OF_TENSORS: dict[Any, Any] = {}


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("dovetail", "FRAGMENT")


def takes_numbers(operator: Any, example: Callable[..., Any] | None = None) -> Any:
    """The operator that takes symbolic numbers where ``operator`` takes floats; ``example`` computes it on fake tensors."""
    with _LOCK:
        return _OF_NUMBERS.get(operator) or _OF_NUMBERS.setdefault(operator, _with_numbers(operator, example))


def takes_tensors(operator: Any, names: tuple[str, ...]) -> Any:
    """The operator that takes tensors without dimensions in the place of the numbers of these names, and reads them when it runs.

    ``operator`` may be one of :func:`takes_numbers`. It neither writes nor gives a view.
    """
    with _LOCK:
        key = torchs_own(operator) or operator, names
        return _OF_TENSORS.get(key) or _OF_TENSORS.setdefault(key, _with_tensors(*key))


def torchs_own(operator: Any) -> Any:
    """The operator of torch's that one of :func:`takes_numbers` calls; None for all others."""
    return _OWN.get(operator)


def calls_with_tensors(operator: Any) -> tuple[tuple[str, ...], Any] | None:
    """The names and the operator of which :func:`takes_tensors` has made this one, or the one that takes plain numbers."""
    if (own := torchs_own(operator)) is not None:
        return (), own
    return next(((names, own) for (own, names), made in _OF_TENSORS.items() if made is operator), None)


def gives_new_tensors(operator: Any) -> bool:
    """Whether an operator has tensors for its results, in memory of their own, whose sizes do not depend on a float.

    >>> gives_new_tensors(torch.ops.aten.hardshrink.default), gives_new_tensors(torch.ops.aten.arange.default)
    (True, False)
    """
    schema, tags = operator._schema, set(operator.tags)
    is_new = all(str(item.type) == "Tensor" and item.alias_info is None for item in schema.returns)
    has_tensors = any("Tensor" in str(item.type) for item in schema.arguments)
    is_plain = not schema.is_mutable and not tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return is_plain and is_new and (has_tensors or torch.Tag.nondeterministic_seeded in tags)


def _with_numbers(operator: Any, example: Callable[..., Any] | None) -> Any:
    schema = str(operator._schema).removeprefix("aten::").replace("float ", "Scalar ").replace("float? ", "Scalar? ")

    def shown(*args: Any, **kwargs: Any) -> Any:
        return operator(*map(_any_number, args), **{key: _any_number(item) for key, item in kwargs.items()})

    own = _define(schema, operator, operator, example or shown)
    _OWN[own] = operator
    return own


def _with_tensors(operator: Any, names: tuple[str, ...]) -> Any:
    overload, *rest = str(operator._schema).split("(", 1)
    own, _, kind = overload.rpartition("::")[2].partition(".")
    # The operator of numbers has another name.
    schema = f"{own}_of_tensors.{'_'.join(filter(None, (kind, *names)))}({rest[0]}"
    for name in names:
        schema = re.sub(rf"(float|Scalar)\?? {name}\b(=[^,)]*)?", f"Tensor? {name}=None", schema)
    places = [at for at, item in enumerate(operator._schema.arguments) if item.name in names]

    def with_each(read: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [read(item) if at in places else item for at, item in enumerate(args)]
            return operator(*given, **{name: read(item) if name in names else item for name, item in kwargs.items()})

        return call

    return _define(schema, operator, with_each(torch.Tensor.item), with_each(lambda number: _EXAMPLE))


def _define(schema: str, operator: Any, kernel: Callable[..., Any], example: Callable[..., Any]) -> Any:
    library = _library()
    library.define(schema, tags=tuple(tag for tag in operator.tags if tag == torch.Tag.nondeterministic_seeded))
    name = schema[: schema.index("(")]
    library.impl(name, lambda *args, **kwargs: kernel(*args, **kwargs), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dovetail::{name}", example, lib=library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.dovetail, packet), overload or "default")


def _any_number(value: Any) -> Any:
    """A number in the place of a symbolic one: what the results look like does not depend on it."""
    if not isinstance(value, torch.SymFloat) or not private_sizes.is_symbolic(value):
        return value
    return _EXAMPLE if value.node.hint is None else value.node.hint
