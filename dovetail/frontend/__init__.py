"""Bytecode to a capture: the interpreter, its instruction sets, calls, sources and effects."""
