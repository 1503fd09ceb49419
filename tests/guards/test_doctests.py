"""The examples in the docstrings of guards and of torch's private names hold."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests import layout

ROOMS = ("guards", "fast_guards", "torch_private")
NAMES = [".".join(("dovetail", *layout.parts_of(path))) for path in layout.MODULES if path.parent.name in ROOMS]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failed == 0
