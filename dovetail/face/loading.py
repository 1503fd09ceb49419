"""Loads the code that plugs into the core: rules, quirks, and wings that fill tables of the core.

Their rooms are named here, not imported: the core works without them. ``import dovetail`` loads none; :func:`load_rules` imports
every module of these rooms before the first capture, so that a new rule is a new file and nothing else.
``DOVETAIL_WITHOUT_RULES=1`` in the environment leaves them out, by which the tests check that the core stands on its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.state import Frontend
from dovetail.frontend.capture import capture
from dovetail.guards import GuardSet
from dovetail.trace import Trace

WITHOUT_RULES = "DOVETAIL_WITHOUT_RULES"
<<<<<<< HEAD
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
=======
#: In the order in which the tables ask them; within a room by name, but a module comes after those that it imports.
ROOMS = ("passes", "higher_order", "whole_calls", "rules", "quirks", "fast_guards")
>>>>>>> house


@functools.cache
def load_rules() -> None:
    """Import everything that plugs into the core, once.

    >>> load_rules()
    """
    for room in () if os.environ.get(WITHOUT_RULES) else ROOMS:
        package = importlib.import_module(f"dovetail.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def bytecode_frontend() -> Frontend:
    """The frontend that interprets bytecode, with its rules loaded and with guards of its own."""

    def frontend(trace: Trace, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureResult:
        return capture(trace, GuardSet(), function, args, kwargs)

    load_rules()
    return frontend


def compile_joint(*args: Any, **kwargs: Any) -> Any:
    """:func:`dovetail.aot.compile_joint`, with its hooks loaded."""
    load_rules()
    return importlib.import_module("dovetail.aot.compile_joint").compile_joint(*args, **kwargs)


def load_distributed_rules() -> None:
    """Import what is known of modules of several processes, once there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        importlib.import_module("dovetail.distributed")
