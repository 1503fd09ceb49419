"""``dovetail.list_backends``: the names of all backends, shown with a word on each."""

from __future__ import annotations

import html
from collections.abc import Iterator

import torch

from dovetail import backends

#: Of a user's interest first.
_WORDS = {
    "inductor": "generated kernels (C++, Triton); the default where a compiler is found",
    "aten": "the captured operators one by one, bitwise equal to eager; the default elsewhere",
    "cudagraphs": "GPU work recorded once and replayed, over the kernels of inductor or aten",
    "eager": "the program's own calls of torch: for finding out what capture alone does",
    "onnxruntime": "ONNX Runtime, for inference",
    "openvino": "OpenVINO, for inference",
    "check_operators": "debugging: the first operator whose result differs from eager's",
    "float64": "debugging: how much precision is lost, against the same graph in float64",
    "bisect": "debugging: the smallest part of a graph that fails, as a script",
}
_TORCHS = {
    "aot_eager": "torch's own, operators one by one",
    "tvm": "TVM, through torch",
    "openxla": "XLA, through torch",
    "dovetail": "this compiler as a backend of torch.compile",
}


class BackendNames(list[str]):
    """A list of names that prints as a table."""

    def _rows(self) -> Iterator[tuple[str, str]]:
        names = set(self)
        yield from ((name, words) for name, words in _WORDS.items() if name in names)
        torchs = set(torch.compiler.list_backends(None))
        for name in sorted(names - _WORDS.keys() - torchs):
            yield name, "registered with dovetail.register_backend, or by a package"
        yield from ((name, words) for name, words in _TORCHS.items() if name in names)
        rest = sorted((names & torchs) - _WORDS.keys() - _TORCHS.keys())
        if rest:
            yield "of torch", f"for debugging and testing: {', '.join(rest)}"

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {words}" for name, words in rows)

    def _repr_html_(self) -> str:
        cells = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(words)}</td></tr>" for name, words in self._rows())
        return f"<table>{''.join(cells)}</table>"


def list_backends(*, torch_backends: bool = True) -> BackendNames:
    """Return the sorted names of all backends; printed, it says a word on each. Loads none of them.

    ``torch_backends=False`` leaves torch's own out.

    >>> {"aten", "eager", "inductor"} <= set(list_backends(torch_backends=False))
    True
    >>> print(list_backends(torch_backends=False))  # doctest: +ELLIPSIS
    inductor         generated kernels (C++, Triton); the default where a compiler is found
    aten             ...
    """
    return BackendNames(backends.list_backends(torch_backends=torch_backends))
