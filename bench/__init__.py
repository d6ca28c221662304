"""Benchmarks: scripts on top of `modelyard_bench`; see bench/README.md."""
