"""`uv run serve`, `uv run build` and `uv run optimize`: commands of Modelyard under the names that Llama-Bridge has."""

from __future__ import annotations

import sys

from modelyard.cli import main


def serve() -> None:
    _run("serve")


def build() -> None:
    """llama.cpp, compiled for this machine."""
    _run("setup", "--build")


def optimize() -> None:
    _run("optimize")


def _run(*command: str) -> None:
    sys.argv[1:1] = command
    main()
