"""``nn.MultiheadAttention`` in evaluation: eager's fused kernel, whose last bits are others than those of its parts.

torch takes the parts wherever it is traced, because the traced graph could be trained later; an entry is not. In the same way
``nn.TransformerEncoder`` packs padded sequences in eager only: the padding then gives zeros.
"""

from __future__ import annotations

from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.rules.refusals import refuse
from dovetail.torch_private import kernels as private_kernels

_IS_TRACED, _KERNEL, _IS_ALIGNED = private_kernels.attention_fast_path()
_NEEDS_WEIGHTS = 10


@rule(_IS_TRACED)
def _is_traced(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    return False


@rule(_KERNEL)
def _attention(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Without weights the kernel gives None for them, and its fake kernel a tensor."""
    attended, weights = interpreter.call_torch(_KERNEL, args, kwargs)
    needs_weights = args[_NEEDS_WEIGHTS] if len(args) > _NEEDS_WEIGHTS else kwargs.get("need_weights", True)
    return attended, weights if needs_weights else None


refuse(
    (_IS_ALIGNED,),
    "TransformerEncoder packs padded sequences in evaluation, by the values of the mask",
    "make it with enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)",
)
