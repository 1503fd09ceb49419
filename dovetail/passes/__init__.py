"""Passes over joint graphs: those that users apply, and those that hook into the steps of ``compile_joint`` by themselves.

Each function here makes a pass that is useful as it is, and short enough to be read as an example; ``joint.apply`` runs it, and
so does ``dovetail.compile(..., passes=(...,))``. (They are known as ``dovetail.aot.passes`` too.)

>>> import torch, dovetail
>>> from dovetail.aot import passes
>>> model = torch.nn.Linear(3, 1)
>>> step = dovetail.compile(model, backend="aten", passes=(passes.clip_gradients(1.0),))
>>> (step(torch.ones(2, 3)) * 100).sum().backward()
>>> norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
>>> round(norm.item(), 4)
1.0
"""

# Loading them registers their hooks. A hook that wraps a graph's callable is inside of those that were registered before it.
from dovetail.passes import any_layout, decompose, recompute, whole_step, dropped_gradients  # noqa: F401, I001
from dovetail.passes import trailing_update, write_backs, memory_between_steps, first_run, index_checks  # noqa: F401
from dovetail.passes.gradients import clip_gradients, scale_gradients, scale_loss
from dovetail.passes.saved import offload_saved, save_in_bfloat16, saved_nodes

__all__ = ["clip_gradients", "offload_saved", "save_in_bfloat16", "saved_nodes", "scale_gradients", "scale_loss"]
