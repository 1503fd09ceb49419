"""Conformance: compiled functions must answer what eager answers, over torch's operator samples and real models."""
