"""Benchmark harness and results ledger for LLM serving."""

__version__ = "0.1.0"

MEASUREMENT = 1
"""Raised only when the meaning of timing or counting changes; runs of different numbers never match."""
