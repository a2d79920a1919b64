"""Decompose the weights of trained networks into causally important rank-one components (SPEC.md)."""

__version__ = "0.1.0"
