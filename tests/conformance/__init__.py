"""Conformance: what eager answers is what a compiled function must answer, over torch's own operator samples and real models."""
