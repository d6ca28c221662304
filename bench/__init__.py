"""Benchmarks: scripts on top of `modelyard.benchmark`; see bench/README.md."""
