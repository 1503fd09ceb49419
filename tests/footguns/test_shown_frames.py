"""Code that looks at its callers or at a traceback finds the program there, and nothing of the interpreter's."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import run_program

PROGRAMS = {
    "text of a traceback": """
import traceback
log = []
def fail(): raise KeyError("k")
def function(x):
    try:
        fail()
    except KeyError:
        log.append(traceback.format_exc())
    return x * 2
""",
    "text of a traceback that leads over a break": """
import traceback
log = []
def fail():
    print("fail")
    try:
        {}["a"]
    except KeyError as error:
        print("again")
        raise ValueError("v") from error
def function(x):
    try:
        fail()
    except ValueError:
        log.append(traceback.format_exc())
    return x * 2
""",
    "lines of a traceback": """
log = []
def fail(): raise KeyError("k")
def function(x):
    try:
        try:
            fail()
        finally:
            x = x + 1
    except KeyError as error:
        entry = error.__traceback__
        while entry:
            log.append((entry.tb_lineno, entry.tb_frame.f_code.co_name))
            entry = entry.tb_next
    return x * 2
""",
    "a traceback that was kept": """
import traceback
def function(x):
    try:
        1 / 0
    except ZeroDivisionError as error:
        kept = error
    print("between")
    print("".join(traceback.format_exception(kept)))
    try:
        raise kept
    except ZeroDivisionError as error:
        print("".join(traceback.format_exception(error)))
    return x * 2
""",
    "the caller of a function": """
import inspect, sys
log = []
def caller(): return sys._getframe(1).f_code.co_name, sys._getframe(1).f_lineno
def function(x):
    a = 5
    print("before")
    log.append(caller())
    log.append(sys._getframe().f_lineno)
    log.append(sorted(inspect.currentframe().f_locals))
    log.append([entry.function for entry in inspect.stack()[:1]])
    return x * 2
""",
    "the function that logs": """
import logging
records = []
class Handler(logging.Handler):
    def emit(self, record): records.append((self.format(record), record.funcName, record.lineno))
logger = logging.Logger("q")
logger.addHandler(Handler())
level = 0
def function(x):
    logger.setLevel(level)
    logger.warning("w %s", x.shape)
    print("here")
    logger.warning("again")
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("bad")
    return x * 2
""",
    "an exception that leaves the function": """
import torch, traceback
def fail(x):
    print("here")
    raise KeyError("k")
def function(x): return fail(x)
def call_0(run):
    try:
        run(torch.ones(3))
    except KeyError as error:
        entries = traceback.extract_tb(error.__traceback__)
        return [(entry.name, entry.lineno) for entry in entries if "fuzzed" in entry.filename]
""",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_seen(name: str) -> None:
    source = PROGRAMS[name]
    if "call_0" not in source:
        source += "import torch\ndef call_0(run): return run(torch.ones(2, requires_grad=True))\n"
    outcome = run_program(source)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_code_made_inside_has_the_features_of_the_program(future: str) -> None:
    program = """
def function(x):
    names = {}
    exec("a: int = 3\\ndef g(q: float) -> str: ...", names)
    code = compile("b: int = 1", "<made>", "exec")
    exec(code, names)
    return x * 2, str(names["__annotations__"]), str(names["g"].__annotations__), code.co_flags
import torch
def call_0(run): return run(torch.ones(2, requires_grad=True))
"""
    outcome = run_program(future + program)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure
