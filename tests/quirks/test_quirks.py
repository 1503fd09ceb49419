"""Each quirk is still needed, and does what it is for.

A quirk whose program is right without it can be deleted: torch has been mended.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import dovetail
from dovetail.backends.inductor.job import WORKAROUNDS
from dovetail.face.loading import load_rules
from dovetail.quirks.registry import QUIRKS, Example, Quirk
from dovetail.runtime.entry import Entry
from dovetail.torch_private import compilers as private_compilers
from tests.differential import same, tensors_in

load_rules()
importlib.import_module("dovetail.backends.inductor.backend")
# The first capture fills the core's own tables.
dovetail.compile(torch.sin, backend="aten")(torch.ones(1))

EXAMPLES = [
    pytest.param(quirk, name, id=f"{quirk.name}{f', {name}' if name else ''}")
    for quirk in QUIRKS.values()
    if quirk.holds and (private_compilers.cpp_compiler() is not None or quirk.table is not WORKAROUNDS)
    for name in quirk.examples
]


def _observed(function: Any, call: tuple[Any, ...], order: int) -> list[Any]:
    """What can be seen of a call: results, random numbers, errors, and gradients up to an order."""
    torch.manual_seed(0)
    args = [
        item.detach().clone().requires_grad_(order > 0 and (item.is_floating_point() or item.is_complex()))
        if isinstance(item, torch.Tensor)
        else item
        for item in call
    ]
    try:
        result = function(*args)
        found: list[Any] = [result, torch.get_rng_state()]
        leaves = [item for item in args if isinstance(item, torch.Tensor) and item.requires_grad]
        values = tensors_in(result)
        for left in range(order, 0, -1):
            roots = [item for item in values if item.requires_grad]
            weights = [torch.linspace(0.7, 1.9, item.numel()).reshape(item.shape).to(item.dtype) for item in roots]
            if left > 1:
                # As in torch's own checks of second derivatives: some formulas look at whether these require a gradient.
                weights = [item.requires_grad_() for item in weights]
            if roots and leaves:
                gradients = torch.autograd.grad(roots, leaves, weights, create_graph=left > 1, allow_unused=True)
                values = [item for item in gradients if item is not None]
                leaves = [*leaves, *weights]
                found.append(gradients)
    except RuntimeError:
        return ["an error"]
    return found


def _agrees(example: Example) -> bool:
    """Whether a compiled program does as eager does, with no more graphs than it should need."""
    options = {"backend": "aten", **example.options}
    compiled = dovetail.compile(example.function, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in example.calls:
            expected, actual = (_observed(callee, call, example.order) for callee in (example.function, compiled))
            try:
                same(expected, actual, exact=example.exact)
            except AssertionError:
                return False
    events = dovetail.events_of(compiled)
    if events.count("the next order runs eagerly") or events.count("backend given up"):
        # Right, but not by the way that the quirk is for.
        return False
    return example.graphs is None or len(compiled.entries) + events.count("graph break") <= example.graphs


#: What a process that runs an example returns where the program is wrong; an error returns 1.
_WRONG = 3


#: Another quirk has Inductor call the same operators; without that one these alone make their examples right.
_HIDDEN = {"look_at_targets": "keep_strides_for_kernels", "keep_order_of_draws": "keep_strides_for_kernels"}


def _in_a_process(quirk: Quirk, name: str, absent: bool = True) -> int:
    """What a process of its own that runs an example without the quirk, and without one that hides it, returns: 0 where it is
    right.
    """
    names = [each for each in (quirk.name if absent else None, _HIDDEN.get(quirk.name)) if each is not None]
    program = (
        "import contextlib\n"
        "from tests.quirks import test_quirks as tests\n"
        f"quirk = tests.QUIRKS[{quirk.name!r}]\n"
        "with contextlib.ExitStack() as stack:\n"
        f"    for name in {names!r}:\n"
        "        stack.enter_context(tests.QUIRKS[name].absent())\n"
        f"    raise SystemExit(0 if tests._agrees(quirk.examples[{name!r}]()) else {_WRONG})\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode


@contextlib.contextmanager
def _left_to_eager() -> Iterator[list[Entry]]:
    """Collect the entries whose graph has failed in a call, which eager has then taken."""
    found: list[Entry] = []
    results = Entry._results

    def noted(entry: Entry, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        values = results(entry, tensors)
        if values is None:
            found.append(entry)
        return values

    with mock.patch.object(Entry, "_results", noted):
        yield found


@pytest.fixture(autouse=True)
def _no_tables_left_changed() -> Iterator[None]:
    before = {name: quirk.table.copy() for name, quirk in QUIRKS.items()}
    yield
    assert before == {name: quirk.table.copy() for name, quirk in QUIRKS.items()}


#: To show a fault of Inductor takes kernels, and the same torch has it in each run.
FAULTS = [
    pytest.param(*example.values, id=example.id, marks=pytest.mark.slow)
    if example.values[0].table is WORKAROUNDS
    else example
    for example in EXAMPLES
]


@pytest.mark.parametrize(("quirk", "name"), FAULTS)
@pytest.mark.sampled(3)
def test_torch_still_has_the_fault(quirk: Quirk, name: str) -> None:
    example = quirk.examples[name]()
    if example.stays:
        assert _in_a_process(quirk, name) == _WRONG
        assert quirk.name not in _HIDDEN or _in_a_process(quirk, name, absent=False) == 0
        return
    with quirk.absent(), _left_to_eager() as calls:
        assert not _agrees(example) or calls, (
            f"torch {torch.__version__} is right without {quirk.name}: delete the quirk"
        )


@pytest.mark.parametrize(("quirk", "name"), EXAMPLES)
def test_the_quirk_makes_it_right(quirk: Quirk, name: str) -> None:
    assert _agrees(quirk.examples[name]())


def test_every_quirk_says_what_it_does() -> None:
    for quirk in QUIRKS.values():
        assert quirk.function.__doc__, quirk.name
        assert quirk.examples, quirk.name
        assert quirk.issue is None or quirk.issue.startswith("https://github.com/pytorch/pytorch/"), quirk.name
