"""Trees of containers (``torch.utils._pytree``): flatten, map and rebuild. Checked on torch 2.11 to 2.13."""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
