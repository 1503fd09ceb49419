"""Settings of torch that a program changes inside, of which the check of torch's own state knows nothing: the graph breaks there.

Torch's functions run as they are while a program is captured. One that writes to such a setting would write to it then, and never
again.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, rule
from dovetail.torch_private import state as private_state

#: Functions and classes in Python that call such setters.
_CALLERS = (
    *("check_sparse_tensor_invariants", "enforce_grad_layout_policy", "optimized_execution", "set_fusion_strategy"),
    *("preferred_linalg_library", "preferred_blas_library", "preferred_rocm_fa_library", "enable_onednn_fusion"),
    *("set_warn_on_accumulate_grad_stream_mismatch", "set_override_stale_capture_stream", "GraphExecGroup"),
)


@method_rule(*_CALLERS, *private_state.OTHER_SETTERS)
def _set(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    raise Break(f"{function.__name__} changes a setting of torch", "change it outside of the function")


_CHECK = torch.sparse.check_sparse_tensor_invariants


@rule(_CHECK.__enter__, _CHECK.__exit__)
def _entered(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    raise Break("check_sparse_tensor_invariants is entered or left", "enter it outside of the function")
