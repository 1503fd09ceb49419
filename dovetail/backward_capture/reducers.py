"""Models in ``DistributedDataParallel``: hooks in Python take the place of the native ones that exchange gradients.

The engine does not hand over a graph with the native hooks. The same reducer can be told from Python that a leaf's gradient is
there, so the hooks are replaced, once for each model.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import engine as private_engine


class ReducerHook:
    """Tells a model's reducer that a leaf has its gradient; the last such call waits for the other ranks."""

    def __init__(self, model: Any, place: int) -> None:
        self._model = weakref.ref(model)
        self._reducer = model.reducer
        self._place = place

    def __call__(self, outputs: Any = (), inputs: Any = ()) -> None:
        """Called by the node of a leaf after it has run."""
        model = self._model()
        # A model that was given to another group of processes has a new reducer, with native hooks of its own.
        if model is not None and model.reducer is self._reducer:
            private_distributed.gradient_is_ready(self._reducer, self._place)


#: The reducers whose hooks are replaced, by model.
_replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def replace_native_reducers(nodes: list[Any]) -> bool:
    """Replace the native hooks of models whose leaves are among the nodes of a backward; returns whether there were any."""
    if not torch.distributed.is_available():
        return False
    leaves = {id(node.variable) for node in nodes if node is not None and private_autograd_nodes.is_leaf_node(node)}
    kind = torch.nn.parallel.DistributedDataParallel
    replaced = False
    for model in [item for item in gc.get_objects() if issubclass(type(item), kind)]:
        if _replaced.get(model) is model.reducer:
            continue
        parameters = private_distributed.exchanged_parameters(model)
        if not any(id(parameter) in leaves for parameter in parameters):
            continue
        private_distributed.remove_native_hooks(model)
        for place, parameter in enumerate(parameters):
            private_engine.put_hook_first(private_autograd_nodes.gradient_node(parameter), ReducerHook(model, place))
        _replaced[model] = model.reducer
        replaced = True
    return replaced
