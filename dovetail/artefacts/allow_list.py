"""The operators that an artefact may name; others are refused when it is written and when it is read.

An artefact may come from anywhere, so its operators must be pure functions of tensors and numbers: no files, no streams, no writes
to their arguments, no handles that a kernel does not check. Public ATen operators are on the list by that rule; the private ones
that captures produce are named one by one.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import ArtefactError
from dovetail.torch_private import operators as private_operators

NAMESPACES = ("aten", "prims")
_NAME = re.compile(r"(aten|prims)::([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
# Texts, not compiled patterns, which would take 4 ms at each start: who reads an artefact compiles them.
# They read or write files, hand out memory or handles, or act on something that is not a value.
FORBIDDEN = (
    r"from_file|set_data|data|record_stream|resize.*|set|set_.*|storage.*|pin_memory|is_pinned|retain_grad|requires_grad|rename"
    r"|backward|output_nr|_.*|.*fbgemm.*|.*mkldnn.*|mkl_.*|.*cudnn.*|.*miopen.*|quantize.*|quantized.*|.*_per_tensor_.*"
    r"|q_.*|int_repr|dequantize.*|choose_qparams.*|sym_constrain.*|empty_quantized|.*nested.*|.*_csr.*|.*_csc.*"
    r"|.*_bsr.*|.*_bsc.*|.*sparse.*|.*coalesce.*|to_dense_backward|item"
)
PRIVATE = (
    r"_softmax(_backward_data)?|_log_softmax(_backward_data)?|_to_copy|_unsafe_view|_scaled_dot_product_.*|_foreach_.*"
    r"|_native_batch_norm_legit.*|_batch_norm_with_update_functional|_adaptive_avg_pool[23]d(_backward)?|_cdist_(forward|backward)"
    r"|_euclidean_dist|_conj|_conj_physical|_neg_view|_fft_(c2c|c2r|r2c)|_linalg_.*|_local_scalar_dense|_pdist_(forward|backward)"
    r"|_prelu_kernel(_backward)?|_reshape_alias|_stack|_trilinear|_unique2|_upsample_.*|_weight_norm_interface(_backward)?"
    r"|_ctc_loss(_backward)?|_convolution|_standard_gamma(_grad)?|_dirichlet_grad|_sample_dirichlet|_addmm_activation"
    r"|_is_any_true|_is_all_true|_chunk_cat|_fused_dropout|_masked_softmax(_backward)?|_cholesky_solve_helper|_logcumsumexp"
    r"|_efficientzerotensor|_histogramdd_.*|_grid_sampler_2d_cpu_fallback(_backward)?|_index_put_impl|_safe_softmax|_aminmax|_cast_.*|_fused_rms_norm(_backward)?"
    r"|_int_mm|_lu_with_info|_unique|_masked_scale|_spdiags|_assert_async"
)
_ARGUMENT_TYPES = (
    r"(Optional\[|List\[)*(Tensor|int|float|bool|complex|number|Scalar|SymInt|str|Device|Layout|MemoryFormat|ScalarType"
    r"|Generator|NoneType)\]*"
)
_OPERATORS = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
_IN_PLACE = ("iadd", "isub", "imul", "itruediv")
_MATH = ("sqrt", "exp", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "atan", "pow", "fabs", "erf")
_PYTHON: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    **{f"operator.{name}": getattr(operator, name) for name in (*_OPERATORS, *_IN_PLACE)},
    **{f"math.{name}": getattr(math, name) for name in _MATH},
    **{f"torch.sym_{name}": getattr(torch, f"sym_{name}") for name in ("max", "min", "not", "int", "float")},
}

_FLOAT_OF_FLOATS = {"dovetail.power", "torch.sym_float"} | {
    f"operator.{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", *_IN_PLACE)
}
#: Functions of our own, by name: their modules are loaded when an artefact has one of them, and most have none.
_OWN = {
    # It reads what nothing else reads, so that its errors come.
    "dovetail.read": ("dovetail.rules.torch.unread_errors", "READ"),
    # Python's ``**`` on floats.
    "dovetail.power": ("dovetail.rules.sizes.exact_numbers", "real_power"),
}


def is_allowed(found: Any) -> bool:
    """Whether an operator may be in an artefact."""
    if not isinstance(found, private_operators.OpOverload):
        return False
    schema = found._schema
    namespace, _, base = schema.name.partition("::")
    if namespace not in NAMESPACES or schema.is_mutable:
        return False
    if namespace == "aten" and re.fullmatch(FORBIDDEN, base) and not re.fullmatch(PRIVATE, base):
        return False
    return all(re.fullmatch(_ARGUMENT_TYPES, str(argument.type)) for argument in schema.arguments)


def name_of_operator(target: Any) -> str:
    """The name of an operator in an artefact. Raises :class:`ArtefactError` for one that is not on the list."""
    for name, function in _PYTHON.items():
        if function is target:
            return name
    for name in _OWN:
        if operator_by_name(name) is target:
            return name
    if not is_allowed(target):
        raise ArtefactError(
            f"the operator {target} is not allowed in an artefact",
            advice="export a graph of pure ATen operators, without custom ones",
        )
    return f"{target._schema.name}.{target._overloadname}"


def operator_by_name(name: str) -> Callable[..., Any]:
    """The operator with a name, which is looked up only if it has the form of a name. Raises :class:`ArtefactError`."""
    if name in _PYTHON:
        return _PYTHON[name]
    if name in _OWN:
        module, own = _OWN[name]
        return getattr(importlib.import_module(module), own)  # type: ignore[no-any-return]
    match = _NAME.fullmatch(name)
    found: Any = None
    if match is not None and not any(part.startswith("__") for part in match.groups()):
        namespace, base, overload = match.groups()
        packet = getattr(getattr(torch.ops, namespace), base, None)
        found = getattr(packet, overload, None)
    if not is_allowed(found):
        raise ArtefactError(f"the operator {name!r} is not allowed in an artefact")
    return found  # type: ignore[no-any-return]


def check_arguments(target: Any, count: int, names: list[str]) -> None:
    """Raise :class:`ArtefactError` unless an operator takes so many positional arguments and these named ones."""
    if not isinstance(target, private_operators.OpOverload):
        if names or not 1 <= count <= 2:
            raise ArtefactError(f"{target} does not take these arguments")
        return
    arguments = target._schema.arguments
    free = {argument.name for argument in arguments[count:]}
    if count > len(arguments) or not set(names) <= free or len(set(names)) != len(names):
        raise ArtefactError(f"{target} does not take these arguments")


def makes_a_float(name: str) -> bool:
    """Whether a function with this name gives a float wherever one of its arguments is one."""
    return name.startswith("math.") or name in _FLOAT_OF_FLOATS


def takes_only_floats(name: str) -> bool:
    """Whether a function with this name is in a graph only for floats: of whole numbers its result could fill the memory."""
    return name.startswith("math.") or name == "dovetail.power"
