"""Reasons that keep an operator out of a recording: CPU tensors, values read back by the host, sizes that depend on data …

Numbers that change from call to call are none where a recorded piece can read them from the device's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends.cudagraphs.recorder import Recorder
from dovetail.errors import UserLocation
from dovetail.passes.mutations import is_pure_function
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import trees as private_trees

_aten = torch.ops.aten
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"})
#: Operators that make the host wait on CUDA although the tags of their schemas do not say so.
_SYNCHRONISING_NAMES = """
    _local_scalar_dense item is_nonzero equal allclose nonzero masked_select unique_dim _unique _unique2 unique_consecutive
    unique_dim_consecutive bincount histc multinomial repeat_interleave linalg_cholesky cholesky linalg_inv linalg_solve
    inverse linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_lstsq linalg_matrix_rank linalg_det linalg_slogdet
    _linalg_check_errors _linalg_solve_ex _linalg_slogdet _linalg_det _linalg_eigh _linalg_svd linalg_qr geqrf
    _ctc_loss _cudnn_ctc_loss ctc_loss _pack_padded_sequence segment_reduce randperm _assert_scalar _assert_async
    sym_constrain_range to_sparse _to_dense _sparse_coo_tensor_unsafe _coalesce embedding_bag _embedding_bag quantile nanquantile
"""
_SYNCHRONISING = frozenset(f"aten::{name}" for name in _SYNCHRONISING_NAMES.split())
_WHOLE_CALLS = frozenset({"dovetail::whole_call", "dovetail::whole_call_random"})
_HIGHER_ORDER = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl", "call_torchbind"})


#: Operators that give the same bits on CUDA for a number from memory as for one in the launch; a division does not.
_EXACT: dict[Any, Any] = {
    getattr(getattr(_aten, name), overload): getattr(_aten, name).Tensor
    for name in ("add", "sub", "mul")
    for overload in ("Tensor", "Scalar")
}
_ROUNDED: dict[Any, Any] = {
    **_EXACT,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
}


@dataclass(frozen=True)
class Obstacle:
    """The reason that keeps one operator out of a recording, with the user's line."""

    operator: str
    reason: str
    where: UserLocation | None = None

    def __str__(self) -> str:
        return f"{self.operator}{f' at {self.where}' if self.where else ''}: {self.reason}"


def node_tensors(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Return the fake tensors in a node's value."""
    return (leaf for leaf in private_trees.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def is_number(node: torch.fx.Node) -> bool:
    """Return whether the node's value is a number that may differ from call to call."""
    return isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymInt, torch.SymBool))


def is_float(node: torch.fx.Node) -> bool:
    """Return whether the node's value is a floating-point number that may differ from call to call."""
    return isinstance(node.meta.get("val"), torch.SymFloat)


def on_host(node: torch.fx.Node, recorder: Recorder) -> bool:
    """Return whether the node's value holds a tensor that the device cannot read while it replays."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and private_sizes.carried_float(value) is not None:
        return True
    return any(not recorder.records(leaf) or leaf.layout is not torch.strided for leaf in node_tensors(node))


def find_obstacle(node: torch.fx.Node, recorder: Recorder, device: torch.device | None) -> Obstacle | None:
    """Return the reason that keeps this node out of a recording on ``device``; None if there is none."""
    reason = _reason(node, recorder, device)
    if not reason:
        return None
    return Obstacle(str(node.target), reason, node.meta.get("user_line"))


def _reason(node: torch.fx.Node, recorder: Recorder, device: torch.device | None) -> str:
    target = node.target
    if node.op in ("call_module", "call_method"):
        return "it is no operator, and what it does is not known"
    schema = target._schema if isinstance(target, private_operators.OpOverload) else None
    if schema is not None and schema.name.split("::")[0] in _COLLECTIVES:
        return "it talks to other processes, and a recording that outlives the communicator hangs at the end"
    if schema is not None and (schema.name in _SYNCHRONISING or _reads_values(node)):
        return "the host waits for the device there (a value is read back, or a size depends on data)"
    if schema is not None and schema.name in _WHOLE_CALLS:
        return "it calls a function as a whole, which may wait for the device"
    if schema is None and not is_pure_function(target) and getattr(target, "__name__", "") in _HIGHER_ORDER:
        return "its branches or loops are chosen by the host, from data"
    if any(isinstance(item, torch.Generator) for item in private_trees.tree_leaves((node.args, node.kwargs))):
        return "it draws from a generator of its own, and a recording knows the default generator only"
    if "val" not in node.meta and node.users:
        return "nothing is known about its result"
    for value in (node, *node.all_input_nodes):
        for leaf in node_tensors(value):
            if leaf.layout is not torch.strided:
                return f"it handles a tensor of layout {leaf.layout}"
        if on_host(value, recorder):
            return "it handles a tensor that lies on the CPU" if value is not node else "its result lies on the CPU"
        for leaf in node_tensors(value):
            if device is not None and leaf.device != device:
                return f"it lies on {leaf.device}, and the recording is made on {device}"
    return ""


def _reads_values(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if target._schema.name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"):
        # The tag says that the size may depend on data, which holds for masks only.
        indices = node.args[1] if len(node.args) > 1 else ()
        found = [item for item in private_trees.tree_leaves(indices) if isinstance(item, torch.fx.Node)]
        return any(leaf.dtype in (torch.bool, torch.uint8) for item in found for leaf in node_tensors(item))
    return any(tag in target.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def needs_kernel(node: torch.fx.Node) -> bool:
    """Return whether the node is work for the device, rather than a view or a number."""
    if node.op != "call_function" or node.target is operator.getitem or is_number(node):
        return False
    if not isinstance(node.target, private_operators.OpOverload):
        return not is_pure_function(node.target)
    returns = node.target._schema.returns
    return not any(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def float_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments of a node that are floating-point numbers which may change."""
    return [value for value in node.all_input_nodes if is_float(value)]


def can_read_from_memory(node: torch.fx.Node, *, exact: bool) -> bool:
    """Return whether the node gives the same result (with ``exact`` to the last bit) for its number as a 0-d tensor."""
    numbers = float_arguments(node)
    table = _EXACT if exact else _ROUNDED
    if len(numbers) != 1 or node.target not in table or node.kwargs or len(node.args) != 2:
        return False
    other = next((item for item in node.args if item is not numbers[0]), None)
    value = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if exact:
        return value.dtype in (torch.float32, torch.float64)
    return value.is_floating_point() or value.is_complex()


def read_from_memory(graph: torch.fx.GraphModule, device: torch.device) -> tuple[int, ...]:
    """Turn every number that ``graph`` takes into a zero-dimensional tensor; return the indices of these inputs."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    numbers = {index: node for index, node in enumerate(placeholders) if is_float(node)}
    for placeholder in numbers.values():
        tensor = next(
            leaf for node in graph.graph.nodes for leaf in node_tensors(node) if private_tensors.is_fake(leaf)
        )
        with tensor.fake_mode:  # type: ignore[attr-defined]
            placeholder.meta["val"] = torch.empty((), dtype=torch.float64, device=device)
        for user in placeholder.users:
            user.target = _ROUNDED[user.target]
    return tuple(numbers)
