"""The values that leave a capture: each becomes a recipe that an entry builds the value from at every call."""

from __future__ import annotations

import types
from typing import Any, NoReturn

import torch

from dovetail.errors import CaptureError, UnbuildableError
from dovetail.frontend.code.frame import Null, Unread
from dovetail.frontend.code.points import FramePoint
from dovetail.frontend.interpreter.interpreter import Interpreter
from dovetail.frontend.rules import kind_of, leaving_rule
from dovetail.frontend.values.leaves import IDENTITY_TYPES, is_bound_builtin, is_leaf_value
from dovetail.runtime.recipe import CallItem, ConstantItem, NumberItem, Recipe, SourceItem, TensorItem
from dovetail.runtime.recipe_builder import RecipeBuilder, closure_contents, holds_interpreted
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import trees as private_trees
from dovetail.torch_private.tensors import is_traced


class Outputs:
    """Collects what the graph of a capture must return, while recipes are built for the values that leave it.

    ::

        build(value)                    the recipe of one value, container by container
          _classify(value)              of an item: a recipe, or None where the item is made anew from its parts
            ValueKind.leave             a stand-in of a rule's kind that the program has made
            _tensor                     computed by the graph
            NumberItem, _data_number    computed from sizes, or by the graph
            SourceItem                  read again where it was read: it existed before the call
            ConstantItem                the object itself

    ``tensors`` and ``numbers`` are what recipes refer to by position.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._values = interpreter.values
        self._trace = interpreter.trace
        self._positions: dict[int, int] = {}
        self._builder = RecipeBuilder(self._classify)
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []

    def build(self, value: Any) -> Recipe:
        """The recipe of a value; raises :class:`CaptureError` for one that cannot leave the graph."""
        return self._builder.build(value)

    def holds(self, value: Any) -> bool:
        """Whether an object is part of what was built so far."""
        return self._builder.holds(value)

    def _classify(self, value: Any) -> Recipe | None:
        if isinstance(value, torch.Tensor):
            value = self._values.wrap(value)
        if isinstance(value, (list, tuple, dict)) and (own := self._values.own(value)) is not value:
            return self._builder.build(own)
        kind = kind_of(value)
        if kind is not None:
            known = self._values.stood_for(value)
            return (
                kind.leave(self._interpreter, self._builder, value) if known is None else SourceItem(known.source.fetch)
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if private_sizes.is_data_number(value):
            return self._data_number(value)
        if private_sizes.is_symbolic(value):
            self.numbers.append(value)
            return NumberItem(len(self.numbers) - 1)
        if isinstance(value, Unread):
            return SourceItem(value.source.fetch)
        if is_leaf_value(value) or isinstance(value, (Null, FramePoint)):
            return ConstantItem(value)
        source = self._values.source_of(value)
        return self._object(value) if source is None else SourceItem(source.fetch)

    def _object(self, value: Any) -> Recipe | None:
        """An object that the program has made, or one of those that are told apart by identity alone."""
        if is_bound_builtin(value):
            return None
        if type(value) is types.FunctionType and holds_interpreted(value):
            # A result of torch.func.vmap(f), say: it is made again with the user's own function in it.
            return None
        if isinstance(value, IDENTITY_TYPES) and not self._interpreter.is_created(value):
            held = [*closure_contents(value)] if type(value) is types.FunctionType else []
            if any(isinstance(leaf, torch.Tensor) and is_traced(leaf) for leaf in private_trees.tree_leaves(held)):
                raise UnbuildableError("a function of torch that keeps tensors of the graph (a pull-back) leaves it")
            return ConstantItem(value)
        return None

    def _data_number(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Recipe:
        """A number that the graph computes leaves it as a tensor without dimensions."""
        self.tensors.append(number_as_tensor(value))
        return CallItem(ConstantItem(torch.Tensor.item), (TensorItem(len(self.tensors) - 1),))

    def _tensor(self, value: torch.Tensor) -> Recipe:
        self._check_tensor(value)
        is_new = id(value) not in self._positions
        if is_new:
            self._positions[id(value)] = len(self.tensors)
            self.tensors.append(value)
        found: Recipe = TensorItem(self._positions[id(value)])
        if is_new and id(value) in self._values.tensor_attributes:
            attributes = self._builder.build(self._values.tensor_attributes[id(value)][1])
            found = CallItem(ConstantItem(_with_attributes), (found, attributes))
        if value.is_leaf and value.grad is not None and self._trace.input_of(value) is None:
            return CallItem(ConstantItem(_with_gradient), (found, self._tensor(value.grad)))
        return found

    def _check_tensor(self, value: torch.Tensor) -> None:
        for check in leaving_rule:
            check(self._interpreter, value)
        if value.grad_fn is not None and private_autograd.has_hooks(value):
            # In the graph they are in front of all that is seen of its gradient outside; in eager they are behind it.
            self._refuse(
                "a tensor with a hook on its gradient leaves the function",
                "register the hook outside, or return a view of the tensor: x.view_as(x)",
            )

    def _refuse(self, what: str, advice: str = "") -> NoReturn:
        raise CaptureError(what, where=self._interpreter.locate(), advice=advice)


def _with_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A leaf that the program has made and gone back to."""
    leaf.grad = gradient
    return leaf


def _with_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """A tensor that the program has made and has set attributes on."""
    tensor.__dict__.update(attributes)
    return tensor


def number_as_tensor(value: Any) -> torch.Tensor:
    """A symbolic number as a traced tensor without dimensions."""
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
    with torch.no_grad():
        return torch.scalar_tensor(value, dtype=kinds[type(value)])
