"""Plans: the exchanges of a graph in order, and the operators by which ranks check that they have the same plan.

Ranks whose graphs differ would add up unrelated numbers, or wait for each other forever. So each phase of a graph begins with an
exchange that is the same for all graphs: the maximum over the ranks of two numbers made from the plan. If all ranks have the same
plan, the maximum is each rank's own. The versions of torch and Dovetail that made a plan belong to it.

>>> plan = Plan("backward", ("all_reduce float32[24]: weight, bias",))
>>> print(plan)
backward: 1 exchange
  all_reduce float32[24]: weight, bias
>>> plan.fingerprint == Plan("backward", plan.steps).fingerprint != Plan("forward", plan.steps).fingerprint
True
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from dovetail.distributed.operators import collectives, operator
from dovetail.errors import RanksDifferError
from dovetail.torch_private import distributed as private_distributed
from dovetail.versions import __version__

#: Plans by fingerprint, for the words of an error. Bounded: a plan is as large as its model has parameters.
_plans: collections.OrderedDict[int, Plan] = collections.OrderedDict()
_MOST_PLANS = 1024


def made_by() -> str:
    """The versions that make this rank's graphs."""
    return f"torch {torch.__version__} and Dovetail {__version__}"


def refuse_other_versions(versions: Sequence[str], own: int) -> None:
    """Raise :class:`RanksDifferError` if another rank has other versions than rank ``own``; ``versions`` are those of all ranks."""
    other = next((rank for rank, text in enumerate(versions) if text != versions[own]), None)
    if other is not None:
        raise RanksDifferError(
            f"rank {own} has {versions[own]}, and rank {other} has {versions[other]}: they may compute different things",
            advice="install the same versions for all ranks",
        )


@dataclass(frozen=True)
class Plan:
    """The exchanges of one phase of a graph, in order, as one line each."""

    phase: str
    steps: tuple[str, ...]

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits, different for different plans."""
        digest = hashlib.sha256(repr((made_by(), self.phase, self.steps)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2

    def for_tangents(self, defined: tuple[bool, ...]) -> Plan:
        """The plan of a backward from some of the outputs only."""
        outputs = ", ".join(str(number) for number, flag in enumerate(defined) if flag)
        return Plan(f"{self.phase} from output {outputs} of {len(defined)}", self.steps)

    def __str__(self) -> str:
        count = len(self.steps)
        counted = f": {count} exchange{'' if count == 1 else 's'}" if count else ""
        return "\n  ".join([self.phase + counted, *self.steps])


def register(plan: Plan) -> int:
    """Remember a plan; returns its fingerprint."""
    _plans[plan.fingerprint] = plan
    _plans.move_to_end(plan.fingerprint)
    if len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
    return plan.fingerprint


@operator("int number, Device device", lambda number, device: torch.empty(2, dtype=torch.int64, device=device))
def fingerprint(number: int, device: torch.device) -> torch.Tensor:
    """The two numbers of which the ranks take the maximum."""
    return torch.tensor([number, -number], dtype=torch.int64, device=device)


@operator(
    "Tensor greatest, int number, int size, str group, ScalarType dtype",
    lambda greatest, number, size, group, dtype: torch.empty(0, dtype=dtype, device=greatest.device),
)
def agree(greatest: torch.Tensor, number: int, size: int, group: str, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor, if the maximum over the ranks is this rank's own plan."""
    now = torch.distributed.get_world_size(private_distributed.process_group(group))
    if now != size:
        raise RanksDifferError(
            f"the graph was compiled for {size} ranks, and its process group has {now}",
            advice="make the module for the new group anew: shard, DistributedDataParallel",
        )
    largest, smallest = greatest.tolist()
    if (largest, -smallest) != (number, number):
        raise RanksDifferError(
            _difference(number, group),
            advice="let all ranks take the same way through the program: the same branches, the same parameters in use",
        )
    return torch.empty(0, dtype=dtype, device=greatest.device)


def meet_graphs(groups: Sequence[str], device: torch.device, what: str) -> None:
    """Take part in the check with which the graphs of other ranks begin, as a rank that does not run a graph here.

    Raises :class:`RanksDifferError`, as the graphs do, where another rank runs one; ``what`` says what happens here.
    """
    own = register(Plan(what, ()))
    asked = [collectives.all_reduce(fingerprint(own, device), "max", name) for name in groups]
    for name, begun in zip(groups, asked, strict=True):
        size = torch.distributed.get_world_size(private_distributed.process_group(name))
        agree(collectives.wait_tensor(begun), own, size, name, torch.float32)


def _difference(number: int, group: str) -> str:
    """The first difference in words. All ranks come here after the same exchange, so they can exchange their plans."""
    process_group = private_distributed.process_group(group)
    found: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    mine = made_by(), str(_plans.get(number, "unknown plan"))
    torch.distributed.all_gather_object(found, mine, group=process_group)
    own = torch.distributed.get_rank(process_group)
    refuse_other_versions([versions for versions, _ in found], own)
    texts = [text for _, text in found]
    other = next((rank for rank, text in enumerate(texts) if text != texts[own]), own)
    lines = texts[own].splitlines(), texts[other].splitlines()
    place = next((i for i, (one, two) in enumerate(zip(*lines, strict=False)) if one != two), min(map(len, lines)))
    step = [
        f", there `{text[place].strip() if place < len(text) else 'nothing more'}`" if place else "" for text in lines
    ]
    return (
        f"rank {own} and rank {other} would exchange different things: rank {own} has "
        f"`{lines[0][0]}`{step[0]}; rank {other} has `{lines[1][0]}`{step[1]}"
    )
