"""The `modelyard` command: one file per command group."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Ctrl-C ends it without a traceback at any time. While modules are imported there is nothing to clean up, and an
    exception in the middle of an import may come out as another one."""
    if sys.argv[1:] == ["--version"]:  # at once, without the commands, which take half a second to import
        from modelyard import __version__

        print(__version__)
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if the shell ignores it, as for background jobs
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from modelyard.cli.app import app

    signal.signal(signal.SIGINT, before)
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
