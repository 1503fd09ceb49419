"""A machine that has torch and nothing else: training works, and what needs a package says which."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import layout

_OTHERS = ("numpy", "safetensors", "scipy", "matplotlib", "transformers", "hypothesis", "expecttest")
_PROGRAM = """
import sys
for name in {others}:
    sys.modules[name] = None  # to an import, a package that is not there
import torch
import dovetail

for backend in ("aten", "eager"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    @dovetail.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(torch.ones(5, 3)).item() for _ in range(3)]
    print(backend, losses)
joint = dovetail.capture(model, (torch.ones(5, 3),))
for needs, call in (("safetensors", lambda: dovetail.load("nowhere")), ("scipy", lambda: joint.compile("aten", memory_budget=0.5))):
    try:
        call()
    except dovetail.errors.DovetailError as error:
        assert needs in str(error) and "pip install" in str(error), error
    else:
        raise SystemExit(f"no error without {{needs}}")
"""


def test_training_needs_nothing_but_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", _PROGRAM.format(others=_OTHERS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (first, aten), (second, eager) = (line.split(" ", 1) for line in done.stdout.splitlines())
    assert (first, second) == ("aten", "eager") and aten == eager
