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

import aiohttp
import uvloop

from bench.gateway import request_body

_HEADERS = {"content-type": "application/json", "authorization": "Bearer bench"}


async def load(url: str, seconds: float, connections: int) -> int:
    """The number of responses that were read to their end."""
    body, until, responses = request_body(stream=True).encode(), time.monotonic() + seconds, 0

    async def repeat(session: aiohttp.ClientSession) -> None:
        nonlocal responses
        while time.monotonic() < until:
            async with session.post(url, data=body, headers=_HEADERS) as response:
                response.raise_for_status()
                async for _ in response.content.iter_any():
                    pass
            responses += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        await asyncio.gather(*(repeat(session) for _ in range(connections)))
    return responses


def main(url: str, seconds: str, connections: str = "32") -> None:
    uvloop.run(load(url, 1.0, int(connections)))  # warm up
    before = time.process_time()
    responses = uvloop.run(load(url, float(seconds), int(connections)))
    print(json.dumps({"responses": responses, "cpu_s": time.process_time() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
