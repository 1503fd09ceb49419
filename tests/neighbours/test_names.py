"""A library with a list of the backends of torch.compile finds "dovetail" in it, whichever was imported first."""

from __future__ import annotations

import copy
import enum
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dovetail.neighbours import add_name
from tests import layout

_LIBRARY = """
import enum

class DynamoBackend(str, enum.Enum):
    NO = "NO"
    INDUCTOR = "INDUCTOR"
"""


class DynamoBackend(str, enum.Enum):
    NO = "NO"


def test_the_name_is_a_member_like_the_others() -> None:
    library: Any = types.SimpleNamespace(DynamoBackend=DynamoBackend)
    for _ in range(2):
        add_name(library)
    backends: Any = DynamoBackend
    member = backends("DOVETAIL")
    assert member is backends["DOVETAIL"] is backends.DOVETAIL and isinstance(member, DynamoBackend)
    assert (member, member.name, member.value.lower(), str(list(backends))) == (
        *("DOVETAIL", "DOVETAIL", "dovetail"),
        "[<DynamoBackend.NO: 'NO'>, <DynamoBackend.DOVETAIL: 'DOVETAIL'>]",
    )
    assert copy.deepcopy(member) is member and pickle.loads(pickle.dumps(member)) is member
    assert backends("NO") is backends.NO and len(backends) == 2
    with pytest.raises(ValueError, match="OTHER"):
        backends("OTHER")


@pytest.mark.parametrize("library", [types.SimpleNamespace(), types.SimpleNamespace(DynamoBackend={"NO"})])
def test_a_library_that_keeps_its_list_elsewhere_is_left_alone(library: Any) -> None:
    before = dict(vars(library))
    add_name(library)
    assert vars(library) == before


@pytest.mark.parametrize("first", ["dovetail", "accelerate.utils.dataclasses"])
def test_in_either_order(first: str, tmp_path: Path) -> None:
    place = tmp_path / "accelerate" / "utils"
    place.mkdir(parents=True)
    for folder in (place, place.parent):
        (folder / "__init__.py").write_text("")
    (place / "dataclasses.py").write_text(_LIBRARY)
    program = (
        f"import {first}, sys\nfinders = len(sys.meta_path)\nimport dovetail\n"
        "from accelerate.utils import dataclasses\n"
        "assert dataclasses.DynamoBackend('dovetail'.upper()).value == 'DOVETAIL'\n"
        "assert not any(type(finder).__module__.startswith('dovetail') for finder in sys.meta_path)\n"
        "assert dataclasses.__spec__.name == dataclasses.__name__ and 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(layout.ROOT)])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
