"""oneDNN's layer of an LSTM, called in a training step."""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.backends.inductor.workarounds import example
from dovetail.backends.protocol import CompiledCallable
from dovetail.quirks.registry import quirk
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import operators as private_operators


def _recurrent(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.lstm(x, (state, state), (weight, weight, bias, bias), True, 1, 0.0, True, False, False)[0] * 2


@quirk(WORKAROUNDS, example=example(_recurrent, (5, 1, 3), (1, 1, 3), (12, 3), (12,), order=1))
def train_recurrent_layers_by_kernel(job: Job) -> None:
    """Call oneDNN's layer of an LSTM as eager does where its backward follows: Inductor takes what it leaves for it for a float.

    Only oneDNN knows the size of that, so no size is looked at, and it is there only where gradients are enabled.
    """
    layer, backward = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
    nodes = job.graph.graph.find_nodes(op="call_function", target=layer)
    if any(part.target is operator.getitem and part.args[1] == 3 for node in nodes for part in node.users):
        job.before.append(lambda: private_inductor.inductor_runs_as_is({layer}, instead=True))
        job.wrappers.append(_with_gradients_enabled)
    elif not job.graph.graph.find_nodes(op="call_function", target=backward):
        return
    job.settings["size_asserts"] = False


def _with_gradients_enabled(call: CompiledCallable) -> CompiledCallable:
    def run(inputs: list[Any]) -> Any:
        with private_operators.BelowAutograd(), torch.enable_grad():
            return call(inputs)

    return run
