"""Loads the code that plugs into the core: rules, quirks, and wings that fill tables of the core.

Their rooms are named here, not imported: the core works without them. ``import dovetail`` loads none; :func:`load_rules` imports
every module of these rooms before the first capture, so that a new rule is a new file and nothing else.
``DOVETAIL_WITHOUT_RULES=1`` in the environment leaves them out, by which the tests check that the core stands on its own.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import pkgutil
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.state import Frontend
from dovetail.backends import Backend
from dovetail.frontend.capture import capture
from dovetail.guards import GuardSet
from dovetail.options import Options
from dovetail.trace import Trace

WITHOUT_RULES = "DOVETAIL_WITHOUT_RULES"
#: In the order in which the tables ask them; within a room by name, but a module comes after those that it imports.
ROOMS = ("passes", "higher_order", "whole_calls", "rules", "switches", "quirks", "fast_guards", "tiers", "fast_capture")


@functools.cache
def load_rules() -> None:
    """Import everything that plugs into the core, once; in a thread, where no mode and no transform of the program is on.

    >>> load_rules()
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(_import_rooms).result()


def _import_rooms() -> None:
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


def in_tiers(backend: Backend, options: Options) -> Backend:
    """The backend as the options ``tiers`` and ``check_swap`` want it."""
    wing = importlib.import_module("dovetail.tiers.choice") if backend.slow_to_compile else None
    return wing.in_tiers(backend, options) if wing else backend


def load_distributed_rules() -> None:
    """Import what is known of modules of several processes, once there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        importlib.import_module("dovetail.distributed")
