"""Rules for functions of Python and of its standard library."""
