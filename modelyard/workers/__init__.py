"""Engines in other processes and on other machines: token ids over ZeroMQ, behind the same seam as any engine."""
