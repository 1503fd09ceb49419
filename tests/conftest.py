"""Options, rules and fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from dovetail import cache
from tests.differential import set_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores, so each test computes on one.
    torch.set_num_threads(1)
    # Tests find nothing that the user's programs or earlier runs have kept; those of the cache switch it on.
    os.environ["DOVETAIL_CACHE"] = "0"
    # pytest listens to loggers that do not propagate. Torch would write a record with stacks and printed graphs at each step.
    structured = logging.getLogger("torch.__trace")
    structured.handlers.clear()
    structured.propagate = True
    # No test fails because the machine is busy.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_samples(items)
    _keep_once(items)
    skip_slow = pytest.mark.skip(reason="slow; run with --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


def _keep_samples(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``sampled(n)``, one variant in n runs by default, the first one among them; all with ``--slow``.

    Chosen by a digest of their names: of variants in rows and columns, each n-th one might leave out a whole column.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for first, *others in variants.values():
        mark = first.get_closest_marker("sampled")
        assert mark is not None
        others.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in others[-(-(len(others) + 1) // mark.args[0]) - 1 :]:
            item.add_marker("slow")


def _keep_once(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``once(name)``, one of the variants with this name in their id runs by default."""
    found: set[tuple[str, str]] = set()
    for item in items:
        test, _, variant = item.nodeid.rstrip("]").partition("[")
        for mark in item.iter_markers("once"):
            if mark.args[0] in variant.split("-"):
                if (test, mark.args[0]) in found:
                    item.add_marker("slow")
                found.add((test, mark.args[0]))


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Collecting garbage costs by the number of live objects: those of libraries and of earlier files do not count again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _ambient_state() -> Iterator[None]:
    """Every test starts from one seed, and must leave torch's global state as it found it."""
    set_seed(0)
    before = (torch.is_grad_enabled(), torch.get_default_dtype())
    yield
    after = (torch.is_grad_enabled(), torch.get_default_dtype())
    torch.set_grad_enabled(before[0])
    torch.set_default_dtype(before[1])
    assert after == before, f"the test left (grad mode, default dtype) as {after}, found them as {before}"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a cache of the test's own, switched on; an empty one."""
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path))
    cache.switch(True)
    yield cache.directory()
    cache.switch(None)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warnings: for tests about graph breaks and fallbacks, ``pytestmark = pytest.mark.usefixtures("quiet")``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
