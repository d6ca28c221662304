"""The `modelyard` command: one file per command group."""

from __future__ import annotations


def main() -> None:
    """Ctrl-C ends it without a traceback at any time, also while modules are imported."""
    try:
        from modelyard.cli.app import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
