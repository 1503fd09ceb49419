"""One exception class per cause, so that a caller can tell what happened and what to do.

Every message says three things: what happened, where in the user's code (when a place is known), and what to do about it.

>>> from dovetail.errors import UnknownBackendError, DovetailError
>>> issubclass(UnknownBackendError, DovetailError)
True
"""

from __future__ import annotations

import difflib
import linecache
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar


def did_you_mean(name: object, known: Iterable[str], otherwise: str) -> str:
    """Advice on a name that is not known: the names near it, else ``otherwise``.

    >>> did_you_mean("brakes", ["breaks", "guards"], "there are two topics")
    "did you mean 'breaks'?"
    """
    near = difflib.get_close_matches(str(name), list(known))
    return f"did you mean {', '.join(map(repr, near))}?" if near else otherwise


@dataclass(frozen=True)
class UserLocation:
    """A place in the user's source: file name, line number (from 1), function name and the line's text.

    ``module`` is the path of the module that runs there (``blocks.3.attn``); ``stack``, at a graph break, all frames up to there.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""
    module: str = field(default="", compare=False)
    stack: tuple[UserLocation, ...] = field(default=(), compare=False, repr=False)
    #: Functions that give a file's name for readers, the last one decides; the cells of a notebook have names.
    names: ClassVar[list[Callable[[str], str]]] = [str]

    @classmethod
    def of(cls, code: types.CodeType, line: int, module: str = "") -> UserLocation:
        """The place of a line of code."""
        return cls(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip(), module)

    def __str__(self) -> str:
        place = f"{self.names[-1](self.file)}:{self.line}"
        return f"{place} `{self.text}`" if self.text else place


class Interruption(BaseException):
    """Ends a capture from inside; the face of Dovetail catches it. Not an ``Exception``: no handler of the program sees it."""


class DovetailError(Exception):
    """Root of all errors that Dovetail raises on its own account.

    ``what`` is the problem in one sentence, ``where`` the user's line if one is known, ``advice`` what to do.
    """

    def __init__(self, what: str, *, where: UserLocation | None = None, advice: str = "") -> None:
        self.what = what
        self.where = where
        self.advice = advice
        place = "" if where is None else f"\n  at {where}"
        super().__init__(what + place + (f"\n  what to do: {advice}" if advice else ""))


class UnsupportedVersionError(DovetailError, ImportError):
    """This Python or torch version is outside the supported range, or torch is not installed whole."""


class UnknownBackendError(DovetailError, ValueError):
    """No backend is registered under the name asked for."""


class OptionError(DovetailError, ValueError):
    """An option that does not exist, or a value it cannot take."""


class NotCallableError(DovetailError, TypeError):
    """The object handed to ``compile`` or ``capture`` cannot be called."""


class InputError(DovetailError, ValueError):
    """An argument or parameter that cannot be trained on: a meta tensor, a device that is not there, a sparse tensor."""


class UninitialisedError(InputError):
    """A parameter of a lazy module that gets its size at the first call; that call runs eagerly."""


class GraphBreakError(DovetailError, RuntimeError):
    """The program does something that cannot be part of one graph, and one graph was asked for."""


class CaptureError(DovetailError, RuntimeError):
    """The program cannot be captured as a graph (raised by ``capture``, which has no eager fall-back)."""


class UnbuildableError(CaptureError):
    """An object that the program has made leaves it, at its end or at a graph break, and cannot be built again outside."""


class ModuleMadeError(UnbuildableError):
    """The program makes a module and keeps it. A first call often does so once and for all; that call runs eagerly."""


class GraphInvalidError(DovetailError, ValueError):
    """A graph was edited into one that does not lint."""


class BackendError(DovetailError, RuntimeError):
    """A backend raised while compiling, or returned something that does not fit the graph."""


class UnsupportedGraphError(BackendError):
    """A backend says that it cannot take a graph: the graph holds an operator, a dtype or a size that it does not have."""


class HigherOrderGradientError(DovetailError, RuntimeError):
    """A derivative of an order that this compiled function cannot give."""


class PartialGradientError(DovetailError, RuntimeError):
    """A hook or ``retain_grad`` asks for the gradient of an output of which only a part is known outside of the graph."""


class ChangedReadError(DovetailError, RuntimeError):
    """A value that a hook or a custom backward reads was changed between the forward and the backward of a compiled function."""


class OutgrownError(DovetailError, RuntimeError):
    """Data-dependent results of a call are not such as the graph was compiled for (in a forward the call then runs eagerly)."""


class DistributedError(DovetailError, RuntimeError):
    """Something that a program of several processes cannot do, or does wrongly."""


class RanksDifferError(DistributedError):
    """The graphs of two ranks exchange different things. It is noticed before the first of them is exchanged."""


class CollectiveError(DistributedError):
    """An exchange between the ranks has failed: another rank is gone, or does not answer in time."""


class NotReducedError(DistributedError):
    """A parameter would get a value that is computed from this rank's own data, other than through a reduced gradient."""


class ShardedOperationError(DistributedError):
    """An operator needs the whole of a tensor of which this rank has a part."""


class ShardedModuleError(DistributedError, TypeError):
    """A module whose parameters another library has spread over the ranks (DTensor, FSDP), and Dovetail would too."""


class ArtefactError(DovetailError, ValueError):
    """An artefact on disk is damaged, of another version, or holds something that is not allowed."""


class StageError(DovetailError, RuntimeError):
    """A stage was called with a state that is closed or belongs to another capture."""


class RecompileLimitError(DovetailError, RuntimeError):
    """A function has been compiled as often as it may, and was told to raise then."""


class RecompileError(DovetailError, RuntimeError):
    """A call would have to be compiled where a stance or a setting of torch's forbids it."""


class RecompileLimitWarning(UserWarning):
    """A function has been compiled so often that Dovetail runs it eagerly from now on."""


class EagerFallbackWarning(UserWarning):
    """A function (or one call of it) runs eagerly, with the reason and the user's line."""


class GraphBreakWarning(EagerFallbackWarning):
    """One instruction runs eagerly between two compiled graphs, with the reason, the user's line and what to do."""


class RecordingWarning(UserWarning):
    """Something that CUDA graphs cannot record, or can no longer, runs as it would without them: the reason and what to do."""


MISTAKES = (InputError, OptionError, NotCallableError, UnsupportedVersionError, GraphInvalidError, DistributedError)
"""Mistakes of callers, passes and other processes, which eager would hide."""
