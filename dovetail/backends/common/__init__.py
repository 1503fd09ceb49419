"""Tools for backends: safe outputs, memory that values share, inputs written in place."""
