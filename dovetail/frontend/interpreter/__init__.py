"""The bytecode interpreter: running frames, calls, attributes and operators on real objects."""
