"""Reads a joint graph from disk, without the user's code.

A file is data that is checked: first against the schema, then against the list of operators, then by running the graph on fake
tensors (shapes only, no memory), then by ``JointGraph.lint``. A file that fails a check raises :class:`ArtefactError`.
"""

from __future__ import annotations

import os

from dovetail.artefacts.build import build
from dovetail.artefacts.files import read_artefact
from dovetail.artefacts.kernels import with_kernels
from dovetail.artefacts.loaded_graph import LoadedGraph
from dovetail.artefacts.schema import validate
from dovetail.errors import ArtefactError, DovetailError


def load(path: str | os.PathLike[str], *, kernels: bool = False) -> LoadedGraph:
    """Read an artefact that ``joint.export`` wrote. Raises :class:`ArtefactError`; no code from the file is executed, unless
    ``kernels`` is true.

    With ``kernels=True`` the graph runs on the kernels that were exported with it. They are machine code and Python bytecode: load
    them from where you would install a program from. Where they are damaged, or were made for another machine, version or number of
    threads, the graph is compiled here; where that is not possible, it runs by ATen operators, with a warning.

    The calling tree::

        load
        +-- read_artefact        checks format, version and checksums
        +-- validate             checks the form of the document
        +-- build
        |   +-- GraphReader.add  makes each node, and runs it on fake tensors
        |   +-- _joint_graph     decodes descriptors and spec
        |   +-- evaluate         checks the guards on sizes
        |   +-- JointGraph.lint
        |   +-- _state           checks the values of inputs
        +-- with_kernels
    """
    payload, tensors = read_artefact(path)
    try:
        validate(payload)
        loaded = build(payload, tensors)
    except ArtefactError:
        raise
    except Exception as error:
        reason = error.what if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{path} does not hold a graph: {reason}", advice="export it again") from error
    return with_kernels(loaded, path) if kernels else loaded
