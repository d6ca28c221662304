"""The `modelyard` command: one file per command group."""

from modelyard.cli.app import main

__all__ = ["main"]
