"""Debugging backends: they find, check and cut down what another backend does."""
