"""Small Hugging Face models of each family on the emulated device, against eager there; their graphs are looked through.

``python -m tests.gpu.emulated.families --models bert,gpt2 --autocast``; all families take about 10 minutes. A graph for a GPU has
no tensor on the CPU but numbers without dimensions, none of the CPU's own attention kernels, and with ``--autocast`` its products
of matrices by weights are in the dtype that the GPU's rules want.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.gpu.emulated import device


def faults(graph: Any, autocast: bool) -> Iterator[str]:
    """What in a graph is not as on a GPU."""
    import torch

    products = {"mm", "addmm", "convolution"}
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "placeholder":
            continue
        if "_for_cpu" in name or "mkldnn" in name:
            yield f"{node.name}: {name}"
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor) and value.device.type != "cuda" and value.dim() > 0:
                yield f"{node.name}: {name} is on {value.device}"
        value = node.meta.get("val")
        kind = getattr(node.target, "_opname", "")
        if autocast and kind in products and isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            yield f"{node.name}: {name} is in float32"


def graphs_of(compiled: Any) -> Iterator[Any]:
    """The graphs of a compiled module and of what it goes on with."""
    from dovetail.reports.explanation import compiled_function

    for entry in compiled_function(compiled).entries:
        if entry.compiled is not None:
            yield entry.compiled.joint.graph


def main() -> int:
    """Check the families that the command line names, each in train mode."""
    device.load()
    import torch

    torch.set_default_device("cuda")
    from tests.conformance import model_runner
    from tests.conformance.compilers import COMPILERS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(model_runner.FACTORIES))
    parser.add_argument("--autocast", action="store_true")
    chosen = parser.parse_args()
    bad, step = 0, model_runner._step
    for name in chosen.models.split(","):
        made: list[Any] = []

        def compiler(module: Any, made: list[Any] = made) -> Any:
            made.append(COMPILERS["dovetail"](module))
            return made[0]

        def in_autocast(model: Any, call: Any, batch: Any, seed: int) -> Any:
            return step(model, torch.autocast("cuda", torch.bfloat16)(call), batch, seed)

        try:
            with mock.patch.object(model_runner, "_step", in_autocast) if chosen.autocast else contextlib.nullcontext():
                (result,) = model_runner.run_here([name], ["train"], compiler)
            verdict, reason = result.verdict, result.reason
            found = [text for graph in graphs_of(made[0]) for text in faults(graph, chosen.autocast)] if made else []
        except Exception as error:  # noqa: BLE001  (eager itself may not run there)
            verdict, reason, found = "no eager", f"{type(error).__name__}: {error}", []
        bad += bool(found) or verdict in ("wrong", "error")
        print(
            f"{name:22} {verdict:8} {'; '.join(found[:3])} {reason.splitlines()[0][:300] if reason else ''}", flush=True
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
