"""Passes over joint graphs that are useful as they are, and short enough to be read as examples.

Each function here makes a pass; ``joint.apply`` runs it, and so does ``dovetail.compile(..., passes=(...,))``.

>>> import torch, dovetail
>>> from dovetail.aot import passes
>>> model = torch.nn.Linear(3, 1)
>>> step = dovetail.compile(model, backend="aten", passes=(passes.clip_gradients(1.0),))
>>> (step(torch.ones(2, 3)) * 100).sum().backward()
>>> norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
>>> round(norm.item(), 4)
1.0
"""

from dovetail.aot.passes.gradients import clip_gradients, scale_gradients, scale_loss
from dovetail.aot.passes.saved import offload_saved, save_in_bfloat16, saved_nodes

__all__ = ["clip_gradients", "offload_saved", "save_in_bfloat16", "saved_nodes", "scale_gradients", "scale_loss"]
