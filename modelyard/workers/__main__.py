"""`python -m modelyard.workers ENDPOINT [--hired]`: a worker as a child of a gateway, or hired by a scheduler."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from modelyard.workers.link import read_keys
from modelyard.workers.run import quiet_loop, run_worker

KEYS_VARIABLE = "MODELYARD_WORKER_KEYS"


def main() -> None:
    endpoint, *more = sys.argv[1:]
    file = os.environ.get(KEYS_VARIABLE)
    keys = read_keys(Path(file)) if file else None
    with asyncio.Runner(loop_factory=quiet_loop()) as runner:
        runner.run(run_worker(endpoint, keys=keys, hired="--hired" in more))


if __name__ == "__main__":
    main()
