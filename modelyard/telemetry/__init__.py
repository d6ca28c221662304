"""Observability: logs, metrics, request history, request capture, cache diagnostics and system readings."""
