"""`python -m modelyard.workers ENDPOINT [--hired]`: a worker as a child of a gateway, or hired by a scheduler."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from modelyard.workers.transport import read_keys
from modelyard.workers.worker_process import run_worker, worker_loop_factory

KEYS_VARIABLE = "MODELYARD_WORKER_KEYS"


def main() -> None:
    endpoint, *more = sys.argv[1:]
    file = os.environ.get(KEYS_VARIABLE)
    keys = read_keys(Path(file)) if file else None
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        runner.run(run_worker(endpoint, keys=keys, hired="--hired" in more))


if __name__ == "__main__":
    main()
