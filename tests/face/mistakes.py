"""Typical mistakes as programs, run as a user would: what is printed is looked at by tests, and counted for the docs.

Each program is a script. ``compile`` is the compiler's, called as people call torch.compile. ``line`` is a part of the user's line
that the message must name, ``says`` what else must be in it.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Mistake:
    """A program with a mistake, and what a message about it has to say. ``raises``: the message is an error."""

    name: str
    program: str
    line: str
    says: tuple[str, ...]
    raises: str = ""


#: A package as pip installs it, with a call that breaks a graph.
_LIBRARY = """import json, zlib

def scaled(x, text):
    scale = json.loads(text)["scale"]
    zlib.crc32(text.encode())
    return x * scale
"""


def printed(mistake: Mistake, compiler: Callable[..., Any], folder: Path, *, ours: bool) -> str:
    """What a user sees on the terminal who runs the program: warnings, and the traceback of what it raises."""
    packages = folder / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / "json_helpers.py").write_text(_LIBRARY)
    script = folder / "train.py"
    script.write_text(mistake.program)
    linecache.checkcache()
    namespace = {"__name__": "train", "torch": torch, "compile": compiler, "OURS": ours}
    seen = io.StringIO()
    path = sys.path.copy()
    # torch.compile writes its log by handlers that have held the terminal since torch was imported.
    loggers = [each for name, each in logging.root.manager.loggerDict.items() if name.split(".")[0] == "torch"]
    handlers = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(seen),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.ExitStack() as streams,
    ):
        for handler in [each for each in handlers if type(each) is logging.StreamHandler]:
            streams.callback(handler.setStream, handler.stream)
            handler.setStream(seen)
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda *args: seen.write(warnings.formatwarning(*args[:4]))
        sys.path.insert(0, str(packages))
        try:
            exec(compile(mistake.program, str(script), "exec"), namespace)
        except Exception as error:
            trace = error.__traceback__
            traceback.print_exception(type(error), error, trace and trace.tb_next)
        finally:
            sys.path[:] = path
            sys.modules.pop("json_helpers", None)
    return seen.getvalue().replace(str(folder), "~")


def lines_of(text: str, columns: int = 100) -> int:
    """The lines that a text takes on a terminal."""
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


_MODEL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = torch.nn.Linear(4, 8)
        self.outward = torch.nn.Linear({width}, 2)
    def forward(self, x):
        x = self.inward(x).relu()
        return self.outward(x)
"""

MISTAKES = (
    Mistake(
        "print in the model",
        """
def step(x):
    y = x.sin()
    print("mean", y.mean())
    return y + 1
compile(step)(torch.ones(3))
""",
        'print("mean", y.mean())',
        ("print writes to the terminal",),
    ),
    Mistake(
        "print in the model, fullgraph",
        """
def step(x):
    y = x.sin()
    print("mean", y.mean())
    return y + 1
compile(step, fullgraph=True)(torch.ones(3))
""",
        'print("mean", y.mean())',
        ("print writes to the terminal",),
        "GraphBreakError",
    ),
    Mistake(
        "branch on data, fullgraph",
        """
def step(x):
    if x.sum() > 0:
        return x
    return -x
compile(step, fullgraph=True)(torch.ones(3))
""",
        "if x.sum() > 0:",
        ("a branch depends on the values of a tensor", "torch.where"),
        "GraphBreakError",
    ),
    Mistake(
        "shapes that do not fit, in a model",
        _MODEL.format(width=9) + "compile(Model())(torch.ones(3, 4))\n",
        "return self.outward(x)",
        ("mat1 and mat2 shapes cannot be multiplied (3x8 and 9x2)",),
        "RuntimeError",
    ),
    Mistake(
        "shapes that do not fit, in a model, fullgraph",
        _MODEL.format(width=9) + "compile(Model(), fullgraph=True)(torch.ones(3, 4))\n",
        "return self.outward(x)",
        ("mat1 and mat2 shapes cannot be multiplied (3x8 and 9x2)",),
        "RuntimeError",
    ),
    Mistake(
        "a misspelt attribute",
        _MODEL.format(width=8).replace("self.outward(x)", "self.outwards(x)")
        + "compile(Model(), fullgraph=True)(torch.ones(3, 4))\n",
        "return self.outwards(x)",
        ("'Model' object has no attribute 'outwards'",),
        "AttributeError",
    ),
    Mistake(
        "a name that is not defined",
        """
def step(x):
    return x * scale
compile(step, fullgraph=True)(torch.ones(3))
""",
        "return x * scale",
        ("name 'scale' is not defined",),
        "NameError",
    ),
    Mistake(
        "a dtype that does not fit",
        _MODEL.format(width=8) + "compile(Model(), fullgraph=True)(torch.ones(3, 4, dtype=torch.float64))\n",
        "x = self.inward(x).relu()",
        ("mat1 and mat2 must have the same dtype",),
        "RuntimeError",
    ),
    Mistake(
        "an argument too few",
        """
def step(x, y):
    return x + y
compile(step, fullgraph=True)(torch.ones(3))
""",
        "compile(step, fullgraph=True)(torch.ones(3))",
        ("missing 1 required positional argument: 'y'",),
        "TypeError",
    ),
    Mistake(
        "item() in a condition, fullgraph",
        """
def step(x):
    loss = x.square().sum()
    if loss.item() > 10:
        loss = loss / 2
    return loss
compile(step, fullgraph=True)(torch.ones(3))
""",
        "if loss.item() > 10:",
        ("torch.where",),
        "GraphBreakError",
    ),
    Mistake(
        "numpy writes in the middle, fullgraph",
        """
def step(x):
    y = x.detach().numpy()
    y[0] = 2
    return torch.from_numpy(y).sin()
compile(step, fullgraph=True)(torch.ones(3))
""",
        "y[0] = 2",
        ("array",),
        "GraphBreakError",
    ),
    Mistake(
        "a file read inside",
        """
import os, tempfile
path = os.path.join(tempfile.mkdtemp(), "scale.txt")
with open(path, "w") as file:
    file.write("2.0")
def step(x):
    with open(path) as file:
        scale = float(file.read())
    return x * scale
compile(step)(torch.ones(3))
""",
        "with open(path) as file:",
        ("open reads or writes a file", "3 more in this call"),
    ),
    Mistake(
        "input() inside, fullgraph",
        """
def step(x):
    answer = input("go on?")
    return x + len(answer)
compile(step, fullgraph=True)(torch.ones(3))
""",
        'answer = input("go on?")',
        ("input",),
        "GraphBreakError",
    ),
    Mistake(
        "time measured inside",
        """
import time
def step(x):
    begin = time.time()
    y = x.sin()
    elapsed = time.time() - begin
    return y, elapsed
compile(step)(torch.ones(3))
""",
        "begin = time.time()",
        ("time",),
    ),
    Mistake(
        "logging inside",
        """
import logging
log = logging.getLogger("train")
def step(x):
    y = x.sin()
    log.warning("mean %s", y.mean())
    return y
compile(step)(torch.ones(3))
""",
        'log.warning("mean %s", y.mean())',
        ("a message with an object in it",),
    ),
    Mistake(
        "a random number of Python's",
        """
import random
def step(x):
    return x * random.choice([1, 2, 3])
compile(step, fullgraph=True)(torch.ones(3))
""",
        "return x * random.choice([1, 2, 3])",
        ("random.getrandbits() is another number at each call",),
        "GraphBreakError",
    ),
    Mistake(
        "sizes made of data, fullgraph",
        """
def step(x):
    kept = x[x > 0]
    return torch.zeros(kept.shape[0], 2) if kept.shape[0] > 1 else kept
compile(step, fullgraph=True)(torch.ones(3))
""",
        "kept",
        (),
        "GraphBreakError",
    ),
    Mistake(
        "a number that changes at every call",
        """
def step(x, name):
    return x + len(name)
run = compile(step, recompile_limit=4) if OURS else compile(step)
for number in range(10):
    run(torch.ones(3), "a" * number + "b")
""",
        "return x + len(name)",
        ("recompile_limit", "`name` was"),
    ),
    Mistake(
        "a Python list as an argument that grows",
        """
history = []
def step(x):
    history.append(x.sum().item())
    return x * len(history)
run = compile(step)
for _ in range(3):
    run(torch.ones(3))
""",
        "",
        (),
    ),
    Mistake(
        "in-place write to a leaf that needs a gradient",
        """
weight = torch.ones(3, requires_grad=True)
def step(x):
    weight.add_(x)
    return weight.sum()
compile(step, fullgraph=True)(torch.ones(3))
""",
        "weight.add_(x)",
        ("a leaf Variable that requires grad is being used in an in-place operation",),
        "RuntimeError",
    ),
    Mistake(
        "backward twice",
        """
def step(x):
    return (x * x).sum()
x = torch.ones(3, requires_grad=True)
loss = compile(step)(x)
loss.backward()
loss.backward()
""",
        "loss.backward()",
        ("backward through the graph a second time",),
        "RuntimeError",
    ),
    Mistake(
        "an assertion that fails",
        """
def step(x):
    assert x.shape[0] == 4, f"four rows, not {x.shape[0]}"
    return x + 1
compile(step, fullgraph=True)(torch.ones(3))
""",
        "assert x.shape[0] == 4",
        ("four rows, not 3",),
        "AssertionError",
    ),
    Mistake(
        "an index out of range",
        """
def step(x, rows):
    return x[rows[5]]
compile(step, fullgraph=True)(torch.ones(3), [0, 1])
""",
        "return x[rows[5]]",
        ("list index out of range",),
        "IndexError",
    ),
    Mistake(
        "a backend that does not exist",
        """
def step(x):
    return x + 1
compile(step, backend="inducter")(torch.ones(3))
""",
        'compile(step, backend="inducter")(torch.ones(3))',
        ("no backend named 'inducter'", "did you mean 'inductor'?"),
        "Error",
    ),
    Mistake(
        "an operator without a rule, in a helper of a helper",
        """
import zlib
def digest(text):
    return zlib.crc32(text.encode())
def salted(x, text):
    return x * (digest(text) % 7)
def step(x):
    return salted(x, "seed") + 1
compile(step, fullgraph=True)(torch.ones(3))
""",
        "return zlib.crc32(text.encode())",
        ("zlib.crc32",),
        "GraphBreakError",
    ),
    Mistake(
        "a break in a library",
        """
import json_helpers
def step(x):
    return json_helpers.scaled(x, '{"scale": 2}')
compile(step)(torch.ones(3))
""",
        "return json_helpers.scaled(x",
        ("  in json_helpers.py:4", "1 more in this call"),
    ),
    Mistake(
        "a hook that prints",
        _MODEL.format(width=8)
        + """
model = Model()
model.inward.register_forward_hook(lambda module, args, result: print("shape", result.shape))
compile(model)(torch.ones(3, 4))
""",
        'print("shape", result.shape)',
        ("print writes to the terminal",),
    ),
    Mistake(
        "thirty prints in a loop",
        """
def step(x):
    for number in range(30):
        x = x.sin() + number
        print(end="")
    return x
compile(step)(torch.ones(3))
""",
        'print(end="")',
        ("print writes to the terminal",),
    ),
    Mistake(
        "an exception of the program's own",
        """
class Diverged(Exception):
    pass
def step(x, limit):
    if limit < 1:
        raise Diverged("the limit is too low")
    return x * limit
compile(step, fullgraph=True)(torch.ones(3), 0)
""",
        'raise Diverged("the limit is too low")',
        ("the limit is too low",),
        "Diverged",
    ),
    Mistake(
        "a device that is not there",
        """
def step(x):
    return x + torch.ones(3, device="cuda")
compile(step, fullgraph=True)(torch.ones(3))
""",
        'return x + torch.ones(3, device="cuda")',
        (),
        "Error",
    ),
    Mistake(
        "a mark that the program does not keep",
        """
def step(x):
    return x.reshape(2, 3)
x = torch.ones(6)
torch._dynamo.mark_dynamic(x, 0)
compile(step)(x)
""",
        "compile(step)(x)",
        ("dimension 0 of `x` was marked as dynamic", "holds it to 6"),
        "InputError",
    ),
)

#: No error in a part of a line is shorter: the heading, the place, the line, the marks below it, the error. The docs say so below
#: their table.
SHORTEST = Mistake(
    "an option that does not exist",
    """
def step(x):
    return x + 1
compile(step, full_graph=True)(torch.ones(3))
""",
    "compile(step, full_graph=True)(torch.ones(3))",
    ("full_graph", "did you mean 'fullgraph'?"),
    "Error",
)
