"""Losses whose numbers or sizes are others while a dispatch mode is on: they stay one call.

Found by running torch's module database bitwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dovetail.frontend.rules import rule
from dovetail.quirks.registry import Example, quirk
from dovetail.whole_calls.whole import call_whole

if TYPE_CHECKING:
    from dovetail.frontend.protocol import TracingInterpreter

_functional = torch.nn.functional
_cross_entropy = _functional.cross_entropy
_multilabel = _functional.multilabel_margin_loss


def _given(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a loss by name; empty for arguments that it refuses, or that are deprecated."""
    try:
        found = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return {}
    found.apply_defaults()
    given = found.arguments
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    is_plain = isinstance(given["input"], torch.Tensor) and isinstance(given["target"], torch.Tensor)
    return given if is_plain and not is_old else {}


def _logits() -> torch.Tensor:
    return torch.arange(120.0).sin().reshape(40, 3)


def _settings() -> dict[str, Any]:
    target, weight = torch.arange(40) % 3, torch.tensor([0.31, 1.73, 0.97])
    target[::4] = -100
    return {"target": target, "weight": weight, "label_smoothing": 0.1}


def _smoothed(x: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(x, **_settings())


def _smoothed_product(x: torch.Tensor) -> torch.Tensor:
    return _functional.linear_cross_entropy(x, torch.eye(3), **_settings())


@quirk(rule, _cross_entropy, example=lambda: Example(_smoothed, [(_logits(),)]))
def weighted_label_smoothing(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep weighted cross entropy with label smoothing whole where the graph is to be eager's to the last bit.

    The mean divides by a sum over the targets that count, which without a dispatch mode are selected and with one are masked.
    """
    return _smoothed_loss(interpreter, _cross_entropy, args, kwargs)


if hasattr(_functional, "linear_cross_entropy"):

    @quirk(rule, _functional.linear_cross_entropy, example=lambda: Example(_smoothed_product, [(_logits(),)]))
    def weighted_linear_label_smoothing(
        interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :func:`weighted_label_smoothing`."""
        return _smoothed_loss(interpreter, _functional.linear_cross_entropy, args, kwargs)


def _smoothed_loss(
    interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = _given(function, args, kwargs) if interpreter.trace.settings.exact else {}
    is_mean = bool(given) and given["reduction"] == "mean" and not given["target"].is_floating_point()
    if is_mean and given["label_smoothing"] > 0 and given["weight"] is not None:
        return interpreter.values.wrap(call_whole(function, args, kwargs))
    return interpreter.call_torch(function, args, kwargs)


@quirk(
    rule,
    _multilabel,
    example=lambda: Example(
        lambda x: _multilabel(x, torch.tensor([1, 0, -1, -1]), reduction="none"),
        [(torch.tensor([0.3, 1.7, -2.1, 0.2]),)],
    ),
)
def margin_loss_of_one_vector(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep the multi-label margin loss of one vector whole: its shape on fake tensors is not that of its result."""
    given = _given(_multilabel, args, kwargs)
    is_vector = bool(given) and given["reduction"] == "none" and given["input"].dim() < 2
    if is_vector:
        return interpreter.values.wrap(call_whole(_multilabel, args, kwargs))
    return interpreter.call_torch(_multilabel, args, kwargs)
