"""Loads the modules that put rules and quirks into the tables of the core.

They are named here, not imported: the core works without them. ``import dovetail`` loads none.
"""

from __future__ import annotations

import functools
import importlib

RULES = (
    "dovetail.rules.optim.loss_scaling",
    "dovetail.rules.optim.optimizers",
    "dovetail.rules.optim.schedules",
    "dovetail.rules.python.callables",
    "dovetail.rules.python.classes",
    "dovetail.rules.python.log_messages",
    "dovetail.rules.python.protocols",
    "dovetail.rules.python.standard_library",
    "dovetail.rules.python.texts",
    "dovetail.rules.sizes.counted_loops",
    "dovetail.rules.sizes.interpolation",
    "dovetail.rules.sizes.parts_loops",
    "dovetail.rules.sizes.plain_size_calls",
    "dovetail.rules.sizes.plain_size_formulas",
    "dovetail.rules.sizes.plain_size_selections",
    "dovetail.rules.sizes.recurrent_cells",
    "dovetail.rules.sizes.recurrent_networks",
    "dovetail.rules.sizes.scans",
    "dovetail.rules.sizes.spectra",
    "dovetail.rules.sizes.overlapping_views",
    "dovetail.rules.sizes.tensor_sizes",
    "dovetail.rules.sparse.kind",
    "dovetail.rules.subclasses.kind",
    "dovetail.rules.torch.branches_on_data",
    "dovetail.rules.torch.storage_offsets",
    "dovetail.whole_calls.whole",
    "dovetail.rules.torch.known_values",
    "dovetail.quirks.overlapping_writes",
    "dovetail.quirks.functionalisation",
    "dovetail.quirks.fake_kernels",
    "dovetail.quirks.clamped_slices",
    "dovetail.quirks.gradient_formulas",
    "dovetail.quirks.eigenvectors",
    "dovetail.quirks.losses",
    "dovetail.quirks.replays",
    "dovetail.fast_guards",
)
"""Modules with rules and quirks, in the order in which they are asked, and wings that plug into every capture."""


@functools.cache
def load_rules() -> None:
    """Load all rules and quirks, once; called before the first capture.

    >>> load_rules()
    """
    for name in RULES:
        importlib.import_module(name)
