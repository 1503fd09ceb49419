"""Which local variables of a function may still be read from an instruction on: only those travel over a graph break.

The classical backward data-flow analysis (Aho, Lam, Sethi, Ullman, *Compilers*, section 9.2.5) over bytecode.
"""

from __future__ import annotations

import dis
import functools
import types

from dovetail.frontend.code.frame import Decoded, Instruction, decode

_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_NO_FALL_THROUGH = frozenset(
    {
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
        *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    }
)
# Functions that look at the variables of the frame that calls them.
_FRAME_READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})


def _may_read_frames(code: types.CodeType) -> bool:
    """Whether a function may look at variables otherwise than by their names; ``torch.stack`` is not ``inspect.stack``."""
    names = set(code.co_names)
    return bool(_FRAME_READERS & names) or {"inspect", "stack"} <= names


def _successors(decoded: Decoded, position: int) -> list[int]:
    """The instructions that may run after one, also as handlers of its exceptions."""
    instruction = decoded.instructions[position]
    following: list[int] = []
    if instruction.opname not in _NO_FALL_THROUGH and position + 1 < len(decoded.instructions):
        following.append(position + 1)
    if instruction.opcode in _JUMPS:
        following.append(decoded.index_of[instruction.argval])
    following += [entry.target for entry in decoded.exceptions if entry.start <= position < entry.end]
    return following


def _names(instruction: Instruction) -> tuple[str, ...]:
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


@functools.lru_cache(maxsize=1024)
def live_locals(code: types.CodeType) -> tuple[frozenset[str], ...]:
    """For each instruction of ``code``, the local variables that may be read when execution goes on there.

    >>> def function(a, b):
    ...     c = a + b
    ...     return c
    >>> sorted(live_locals(function.__code__)[0])
    ['a', 'b']
    """
    decoded = decode(code)
    everything = frozenset(code.co_varnames)
    if _may_read_frames(code):
        return (everything,) * len(decoded.instructions)
    # Zero-argument super() finds the first argument without an instruction that loads it.
    always = frozenset(code.co_varnames[:1]) if "super" in code.co_names else frozenset()
    reads: list[frozenset[str]] = []
    writes: list[frozenset[str]] = []
    for instruction in decoded.instructions:
        name = instruction.opname
        is_read = "LOAD_FAST" in name or name == "DELETE_FAST"
        reads.append(frozenset(_names(instruction)) if is_read else frozenset())
        writes.append(
            frozenset(_names(instruction)) if name in ("STORE_FAST", "STORE_FAST_STORE_FAST") else frozenset()
        )
    live: list[frozenset[str]] = [always] * len(reads)
    changed = True
    while changed:
        changed = False
        for position in range(len(reads) - 1, -1, -1):
            after = always.union(*(live[following] for following in _successors(decoded, position)))
            before = reads[position] | (after - writes[position])
            if before != live[position]:
                live[position] = before
                changed = True
    return tuple(live)
