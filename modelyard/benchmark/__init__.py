"""Measuring engines and URLs: workloads, the load, and what its samples come to; for `bench` and the optimizer."""
