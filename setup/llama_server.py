"""Puts a native llama-server into the cache folder, prints its path: `.venv/bin/python setup/llama_server.py`.

It is what the benchmarks measure us against, what the tests of the llama_server engine start, and a quick way to one
for a user of that engine. The work is done by modelyard/library/llama_server.py.
"""

from __future__ import annotations

import sys

from modelyard.core.errors import ModelyardError
from modelyard.library.llama_server import fetch_binary


def main() -> int:
    try:
        print(fetch_binary())
    except ModelyardError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
