"""Kinds of steps of a captured backward: those with an effect, and those that call the user's code."""

from __future__ import annotations

from dovetail.backward_capture import accumulation, functions, hooks

#: Steps that call the user's code, or write to something that the user can see; they keep their order.
EFFECTS = frozenset(
    {
        accumulation.accumulate_grad,
        functions.call_backward,
        functions.compiled_prologue,
        hooks.call_tensor_hook,
        hooks.call_native_tensor_hooks,
        hooks.call_node_pre_hook,
        hooks.call_node_post_hook,
        hooks.call_post_accumulate_hook,
        hooks.unpack_saved,
    }
)
#: Those among them that call the user's own code.
USER_CODE = EFFECTS - {accumulation.accumulate_grad}
