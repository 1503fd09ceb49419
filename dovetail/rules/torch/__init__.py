"""Rules for functions of torch."""
