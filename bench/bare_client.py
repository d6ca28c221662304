"""What the HTTP client of the remote engines costs alone: streamed requests to a server that costs nothing.

    python -m bench.bare_client URL SECONDS [CONNECTIONS]

Prints `{"responses": …, "cpu_s": …}`. `bench/gateway.py` compares the gateway as a proxy with it: both ask the same
server with the same client, so their ratio depends less on the machine than either figure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from bench.gateway import request_body
from modelyard.engines.upstream_client import UpstreamClient

_HEADERS = {"content-type": "application/json", "authorization": "Bearer bench"}


async def load(url: str, seconds: float, connections: int) -> int:
    """The number of responses that were read to their end."""
    body, until, responses = request_body(stream=True).encode(), time.monotonic() + seconds, 0
    client = UpstreamClient(url, headers=_HEADERS)

    async def repeat() -> None:
        nonlocal responses
        while time.monotonic() < until:
            response = await client.send("POST", "", body)
            if response.status != 200:
                raise SystemExit(f"{url} answered {response.status}")
            while await response.read():
                pass
            responses += 1

    await asyncio.gather(*(repeat() for _ in range(connections)))
    await client.close()
    return responses


def main(url: str, seconds: str, connections: str = "32") -> None:
    uvloop.run(load(url, 1.0, int(connections)))  # warm up
    before = time.process_time()
    responses = uvloop.run(load(url, float(seconds), int(connections)))
    print(json.dumps({"responses": responses, "cpu_s": time.process_time() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
