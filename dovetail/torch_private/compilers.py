"""The compilers of this machine."""

from __future__ import annotations

import os
import shutil

import torch


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use on this machine, or None."""
    names = [os.environ.get("CXX"), "g++", "clang++", "g++-13", "g++-12", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def has_triton() -> bool:
    """Whether there is a CUDA device and a Triton that can compile for it."""
    from torch.utils._triton import has_triton as torch_has_triton

    return torch.cuda.is_available() and torch_has_triton()
