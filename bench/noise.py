"""Streams that run beside a measurement, from a process of their own, until the block ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from bench.asking import request
from bench.servers import ROOT, stop


@contextmanager
def noise(port: int, model: str, streams: int) -> Iterator[None]:
    """The block begins when every stream runs."""
    command = [sys.executable, "-m", "bench.noise", str(port), model, str(streams)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"running\n":
                raise RuntimeError("the streams beside the measurement did not start")
            yield
        finally:
            stop(process)


async def make(port: int, model: str, streams: int) -> None:
    started = [asyncio.Event() for _ in range(streams)]
    async with asyncio.TaskGroup() as tasks:
        for event in started:
            tasks.create_task(_listen(port, model, event))
        for event in started:
            await event.wait()
        print("running", flush=True)


async def _listen(port: int, model: str, started: asyncio.Event) -> None:
    """Asks again as soon as it is answered, until somebody ends the process."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1000, "stream": True}
    question = request(port, json.dumps(asked).encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(question)
        if not (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("a stream beside the measurement was refused")
        started.set()
        await reader.readuntil(b"\r\n0\r\n\r\n")


if __name__ == "__main__":
    uvloop.run(make(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
