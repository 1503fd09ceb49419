"""Decisions of Dovetail in Python's ``logging``: by ``DOVETAIL_LOG=breaks,recompiles``, ``TORCH_LOGS=graph_breaks``, or levels.

Each topic is a logger below ``dovetail``: ``dovetail.breaks``, ``dovetail.recompiles`` ... A program sets their levels like any
other's. Topics that ``DOVETAIL_LOG`` or ``TORCH_LOGS`` asks for are written to stderr where the program has set up no logging.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.steps import Lowering, after_partition
from dovetail.errors import OptionError, did_you_mean
from dovetail.events import Event, EventLog
from dovetail.guards.checker import ACCELERATORS, Checker
from dovetail.torch_private import dynamo as private_dynamo

ROOT = logging.getLogger("dovetail")


@dataclass(frozen=True)
class Topic:
    """The content of a topic, its level, and the word for it in ``TORCH_LOGS``."""

    says: str
    level: int = logging.DEBUG
    in_torch: str = ""


TOPICS = {
    "breaks": Topic(
        "graph breaks, and calls that run eagerly, with the reason and the line", logging.INFO, "graph_breaks"
    ),
    "recompiles": Topic("why no entry took a call", logging.INFO, "recompiles"),
    "decisions": Topic("other decisions: a backend that is given up, a strategy that is changed", logging.INFO),
    "stages": Topic("how long capture, partition and compilation took"),
    "graphs": Topic("the joint graph of forward and backward", in_torch="aot_joint_graph"),
    "guards": Topic("what each entry asks of a call", in_torch="guards"),
    "kernels": Topic("the code that Inductor generates"),
    "cache": Topic("what was found in a cache"),
}
_BREAKS = ("graph break", "left to eager", "runs as torch captured it")


class _ToStderr(logging.StreamHandler[Any]):
    """Writes where the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def set_logs(*topics: str) -> None:
    """Show these topics and no others; "all" shows all. The same as ``DOVETAIL_LOG=topic,topic`` in the environment.

    The topics are breaks, recompiles, decisions, stages, graphs, guards, kernels and cache. Raises :class:`OptionError` for
    another one.

    >>> import torch, dovetail
    >>> dovetail.set_logs("brakes")
    Traceback (most recent call last):
        ...
    dovetail.errors.OptionError: there is no topic 'brakes' to log
      what to do: did you mean 'breaks'?
    """
    for name in topics:
        if name not in (*TOPICS, "all"):
            advice = did_you_mean(name, TOPICS, f"the topics are: {', '.join(TOPICS)}")
            raise OptionError(f"there is no topic {name!r} to log", advice=advice)
    for name in TOPICS:
        is_shown = name in topics or "all" in topics
        logging.getLogger(f"dovetail.{name}").setLevel(logging.DEBUG if is_shown else logging.NOTSET)
    if "kernels" in topics or "all" in topics:
        private_dynamo.show_generated_code()


def _say(name: str, text: str) -> None:
    logger, topic = logging.getLogger(f"dovetail.{name}"), TOPICS[name]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        text = "\n".join(f"[rank{torch.distributed.get_rank()}] {line}" for line in text.splitlines())
    logger.handle(logger.makeRecord(logger.name, topic.level, "", 0, text, (), None))


def _is_on(name: str) -> bool:
    topic = TOPICS[name]
    if logging.getLogger(f"dovetail.{name}").isEnabledFor(topic.level):
        return True
    return bool(topic.in_torch) and private_dynamo.shows_artifact(topic.in_torch)


def _topic_of(event: Event) -> str:
    if event.name in _BREAKS:
        return "breaks"
    if event.name == "recompile":
        return "recompiles"
    if "cache" in event.name or "cache" in event.details:
        return "cache"
    return "decisions" if event.duration is None else "stages"


def _on_event(log: EventLog, event: Event) -> None:
    name = _topic_of(event)
    if not _is_on(name):
        return
    if name not in ("breaks", "recompiles"):
        return _say(name, f"{log.owner}: {event}")
    text = f"{log.owner}: {event.name}: {event.details.get('reason')}"
    if event.details.get("where") is not None:
        text += f"\n  at {event.details['where']}"
    _say(name, text)


def _on_guards(checker: Checker, tree: Any) -> None:
    if _is_on("guards"):
        guards = "".join(f"\n  {guard}" for guard in checker.guards.guards)
        _say("guards", f"{len(checker.guards.guards)} guards, {len(checker.guards.tensors)} tensors{guards}")


@after_partition
def _on_graph(lowering: Lowering) -> Lowering:
    if _is_on("graphs"):
        _say("graphs", str(lowering.joint))
    return lowering


EventLog.listeners.append(_on_event)
ACCELERATORS.append(_on_guards)
ROOT.addHandler(_ToStderr())
if os.environ.get("DOVETAIL_LOG"):
    set_logs(*filter(None, (item.strip() for item in os.environ["DOVETAIL_LOG"].split(","))))
