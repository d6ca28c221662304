"""Benchmarks: run by hand, never timed by a test."""
