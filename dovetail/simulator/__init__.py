"""A training step on machines that are not here: time of a step, waiting for exchanges, and memory, from the captured graph.

:func:`simulated_world` is a process group of any size in one process; what is compiled in it has the graph that each rank would
have, with all exchanges in it. :func:`simulate` runs that graph on a :class:`Cluster` by the clock: operators one after the other,
by measured times or by what the cluster's processors reach, and exchanges beside them, by bandwidth and latency of links.
:func:`plan` does it for all ways to train a model on that many ranks, and says which is best. Nothing is sent anywhere.

>>> import torch
>>> from dovetail.simulator import CLUSTERS, Training, plan
>>> def build():
...     model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
...     loss = lambda model, x, y: torch.nn.functional.mse_loss(model(x), y)
...     batch = torch.randn(32, 64), torch.randn(32, 64)
...     return Training(model, torch.optim.AdamW(model.parameters()), loss, batch)
>>> found = plan(build, 16, CLUSTERS["h100"])
>>> [row.way for row in found.rows]
['data parallel', 'sharded', 'sharded 8 x data parallel 2']
>>> found.best.way
'sharded 8 x data parallel 2'
"""

from __future__ import annotations

from dovetail.simulator.clusters import CLUSTERS, Cluster, Link
from dovetail.simulator.plans import Plans, Training, plan
from dovetail.simulator.step import Prediction, simulate
from dovetail.simulator.worlds import simulated_world

__all__ = ["CLUSTERS", "Cluster", "Link", "Plans", "Prediction", "Training", "plan", "simulate", "simulated_world"]
