"""Type parameters and aliases (3.12 on), made as Python's own syntax makes them."""

from __future__ import annotations

import typing
from typing import Any

from dovetail.frontend.instructions.functions import ONE, TWO


def _type_parameter(parameter: str, name: str, compute: Any = None) -> Any:
    """A type parameter as Python's own syntax makes it: its bound is computed when somebody asks for it."""
    namespace: dict[str, Any] = {"compute": compute}
    exec(f"def generic[{parameter.format(name)}](): ...", namespace)
    return namespace["generic"].__type_params__[0]


def _type_alias(parts: tuple[str, Any, Any]) -> Any:
    name, parameters, compute = parts
    if parameters:
        # Python has no way to hand a parameter to an alias whose value is computed later.
        return typing.TypeAliasType(name, compute(), type_params=parameters)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"compute": compute}
    exec(f"type {name} = compute()", namespace)
    return namespace[name]


def _set_type_parameters(function: Any, parameters: Any) -> Any:
    function.__type_params__ = parameters
    return function


def _with_default(parameter: Any, compute: Any) -> Any:
    kind = type(parameter).__name__
    stars = {"TypeVar": "", "ParamSpec": "**", "TypeVarTuple": "*"}[kind]
    if kind == "TypeVar" and (parameter.__bound__ is not None or parameter.__constraints__):
        return typing.TypeVar(  # type: ignore[misc, call-arg]
            parameter.__name__,
            *parameter.__constraints__,
            bound=parameter.__bound__,
            infer_variance=True,
            default=compute(),
        )
    default = "*compute()" if kind == "TypeVarTuple" else "compute()"
    return _type_parameter(f"{stars}{{}} = {default}", parameter.__name__, compute)


ONE |= {
    7: lambda name: _type_parameter("{}", name),
    8: lambda name: _type_parameter("**{}", name),
    9: lambda name: _type_parameter("*{}", name),
    10: lambda parameters: typing.Generic[  # type: ignore[index]
        tuple(typing.Unpack[item] if isinstance(item, typing.TypeVarTuple) else item for item in parameters)
    ],
    11: _type_alias,
}
TWO |= {
    2: lambda name, compute: _type_parameter("{}: compute()", name, compute),
    3: lambda name, compute: _type_parameter("{}: (*compute(),)", name, compute),
    4: _set_type_parameters,
    5: _with_default,
}
