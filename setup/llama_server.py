"""Installs a native llama-server into the cache folder and prints its path: `python setup/llama_server.py`.

Benchmarks and the tests of the llama_server engine use it. See modelyard/library/llama_server.py.
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
