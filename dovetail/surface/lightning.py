"""PyTorch Lightning calls steps of a module, not the module: they are compiled along with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.face import compile as face

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric")


def compile_steps(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Put compiled steps into a LightningModule, where it has steps of its own that nobody has replaced."""
    if not any(base.__name__ == "LightningModule" for base in type(module).__mro__):
        return
    for name in _STEPS:
        method = getattr(type(module), name, None)
        is_its_own = method is not None and str(method.__module__).split(".", 1)[0] not in _LIBRARIES
        if is_its_own and name not in vars(module):
            setattr(module, name, face.compile(getattr(module, name), **options))
