"""Loads what plugs into the core: rules, quirks, and wings that fill tables of the core.

They are named here, not imported: the core works without them. ``import dovetail`` loads none; :func:`load_rules` imports all of
them before the first capture. ``DOVETAIL_WITHOUT_RULES=1`` in the environment leaves them out, which is how the tests check that
the core stands on its own.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

from dovetail.aot.state import Frontend

WITHOUT_RULES = "DOVETAIL_WITHOUT_RULES"
RULES = (
    "dovetail.passes",
    "dovetail.higher_order",
    "dovetail.rules.torch.branches_on_data",
    "dovetail.rules.torch.same_tensor",
    "dovetail.rules.torch.storage_offsets",
    "dovetail.whole_calls.whole",
    "dovetail.rules.torch.known_values",
    "dovetail.rules.torch.checkpoints",
    "dovetail.rules.torch.custom_functions",
    "dovetail.rules.torch.error_texts",
    "dovetail.rules.torch.filled_tensors",
    "dovetail.rules.gradients.flags",
    "dovetail.rules.gradients.inside",
    "dovetail.rules.language.class_bodies",
    "dovetail.rules.language.classes",
    "dovetail.rules.language.exception_groups",
    "dovetail.rules.language.matching",
    "dovetail.rules.language.type_parameters",
    "dovetail.rules.optim.loss_scaling",
    "dovetail.rules.optim.optimizers",
    "dovetail.rules.optim.schedules",
    "dovetail.rules.python.callables",
    "dovetail.rules.python.conversions",
    "dovetail.rules.python.dovetail_itself",
    "dovetail.rules.python.log_messages",
    "dovetail.rules.python.protocols",
    "dovetail.rules.python.standard_library",
    "dovetail.rules.python.texts",
    "dovetail.rules.sizes.exact_numbers",
    "dovetail.rules.sizes.loops",
    "dovetail.rules.sizes.number_tensors",
    "dovetail.rules.sizes.operator_forms",
    "dovetail.rules.sizes.recurrent_cells",
    "dovetail.rules.sizes.recurrent_networks",
    "dovetail.rules.sizes.scans",
    "dovetail.rules.sizes.tensor_sizes",
    "dovetail.rules.sizes.whole_operators",
    "dovetail.rules.sparse.deferred",
    "dovetail.rules.sparse.kind",
    "dovetail.rules.subclasses.kind",
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
"""Modules that put themselves into tables of the core, in the order in which the tables ask them."""


@functools.cache
def load_rules() -> None:
    """Import everything that plugs into the core, once.

    >>> load_rules()
    """
    if not os.environ.get(WITHOUT_RULES):
        for name in RULES:
            importlib.import_module(name)


def bytecode_frontend() -> Frontend:
    """The frontend that interprets bytecode, with its rules loaded."""
    load_rules()
    frontend: Frontend = importlib.import_module("dovetail.face.compiled_function").bytecode_frontend
    return frontend


def compile_joint(*args: Any, **kwargs: Any) -> Any:
    """:func:`dovetail.aot.compile_joint`, with its hooks loaded."""
    load_rules()
    return importlib.import_module("dovetail.aot.compile_joint").compile_joint(*args, **kwargs)


def load_distributed_rules() -> None:
    """Import what is known of modules of several processes, once there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        importlib.import_module("dovetail.distributed")
