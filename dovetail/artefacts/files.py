"""The files of an artefact: a folder with ``graph.json`` and ``tensors.safetensors``, which hold data and no code, and with
``kernels.bundle`` where kernels were asked for, which is code and is not read unless that is asked for too.

A damaged file, an unknown field, a checksum that does not fit, or another format version raises :class:`ArtefactError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dovetail.errors import ArtefactError

try:
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors
    from safetensors.torch import save as save_tensors
except ModuleNotFoundError as error:
    raise ArtefactError(
        "artefacts need safetensors, which is not installed", advice="pip install safetensors"
    ) from error

FORMAT = "dovetail-joint-graph"
VERSION = 4
GRAPH_FILE = "graph.json"
TENSOR_FILE = "tensors.safetensors"
KERNEL_FILE = "kernels.bundle"
MAXIMUM_GRAPH_BYTES = 1 << 28


def write_artefact(
    path: str | os.PathLike[str],
    payload: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    kernels: Iterable[bytes] = (),
) -> Path:
    """Write an artefact folder under a temporary name, then rename it, so that no reader sees half of it.

    ``kernels`` are the parts of a third file, which only :func:`open_kernels` opens.
    """
    target = Path(path)
    if target.exists():
        raise ArtefactError(f"{target} exists already", advice="choose another path, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        blob = save_tensors({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    except ModuleNotFoundError as error:
        # Safetensors does without it only where it reads.
        raise ArtefactError(
            "an artefact is written by NumPy, which is not installed", advice="pip install numpy"
        ) from error
    body = json.dumps(payload, sort_keys=True)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "graph_sha256": hashlib.sha256(body.encode()).hexdigest(),
        "tensors_sha256": hashlib.sha256(blob).hexdigest(),
        "graph": payload,
    }
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".artefact-") as folder:
        building = Path(folder) / "content"
        building.mkdir()
        (building / GRAPH_FILE).write_text(json.dumps(document, sort_keys=True), encoding="utf-8")
        (building / TENSOR_FILE).write_bytes(blob)
        parts = list(kernels)
        if parts:
            (building / KERNEL_FILE).write_bytes(b"".join(parts))
        building.rename(target)
    return target


def read_artefact(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read and check an artefact folder; raises :class:`ArtefactError` where it is not as it was written."""
    source = Path(path)
    try:
        for name in (GRAPH_FILE, TENSOR_FILE):
            _check_plain(source / name)
        if (source / GRAPH_FILE).stat().st_size > MAXIMUM_GRAPH_BYTES:
            raise ArtefactError(f"{source / GRAPH_FILE} is too large for a graph", advice="export it again")
        text = (source / GRAPH_FILE).read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
        blob = (source / TENSOR_FILE).read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ArtefactError):
            raise
        raise ArtefactError(f"{source} cannot be read as an artefact: {error}", advice="export it again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ArtefactError(f"{source} is not a Dovetail artefact", advice="export it again")
    if document.get("version") != VERSION:
        raise ArtefactError(
            f"{source} has format version {document.get('version')!r}, this Dovetail reads {VERSION}",
            advice="export it again with this version",
        )
    if set(document) != {"format", "version", "graph_sha256", "tensors_sha256", "graph"}:
        raise ArtefactError(f"{source} has fields that no artefact has, or lacks some", advice="export it again")
    payload = document.get("graph")
    body = json.dumps(payload, sort_keys=True)
    if hashlib.sha256(body.encode()).hexdigest() != document.get("graph_sha256") or not isinstance(payload, dict):
        raise ArtefactError(f"the graph in {source} is damaged", advice="export it again")
    if hashlib.sha256(blob).hexdigest() != document.get("tensors_sha256"):
        raise ArtefactError(f"the tensors in {source} are damaged", advice="export it again")
    try:
        tensors = load_tensors(blob)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ArtefactError(f"the tensors in {source} are damaged: {error}", advice="export it again") from error
    return payload, tensors


def open_kernels(path: str | os.PathLike[str]) -> BinaryIO:
    """The file of kernels, which are code; raises :class:`ArtefactError` where there is none."""
    file = Path(path) / KERNEL_FILE
    try:
        _check_plain(file)
        return file.open("rb")
    except OSError as error:
        raise ArtefactError(f"{path} carries no kernels", advice="export it with kernels=True") from error


def _check_plain(file: Path) -> None:
    # Reading a device or a pipe might never end.
    if not stat.S_ISREG(file.lstat().st_mode):
        raise ArtefactError(f"{file} is not a plain file", advice="export it again")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found
