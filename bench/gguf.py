"""GGUF metadata for the benchmarks: the library's own reader."""

from __future__ import annotations

from modelyard.library.gguf import read_metadata

__all__ = ["read_metadata"]
