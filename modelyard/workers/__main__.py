"""`python -m modelyard.workers ENDPOINT [--exit-when-orphaned]`: the worker process of a gateway or a scheduler."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from modelyard.workers.transport import read_keys
from modelyard.workers.worker_process import KEYS_VARIABLE, run_worker, worker_loop_factory


def main() -> None:
    endpoint, *options = sys.argv[1:]
    file = os.environ.get(KEYS_VARIABLE)
    keys = read_keys(Path(file)) if file else None
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        runner.run(run_worker(endpoint, keys=keys, exit_when_orphaned="--exit-when-orphaned" in options))


if __name__ == "__main__":
    main()
