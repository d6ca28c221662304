"""Two hostile keys beside three honest ones: `python -m bench.hostile [--minutes 10] [--engine llama_cpp|fake]`

The honest keys ask short questions all the time, first alone, then beside the hostile ones. These send every bomb that
once froze or filled a server: batches of millions of lines, a file named many times, PDF files, 30 MB to tokenize,
prompts of 1 MB that wait and are left, parallel requests beyond a budget, slow bodies, floods of WebSockets. The server
may take 4 GiB. Every honest request must be answered, their p99 may at most double, and memory and open files must
return; the exit code is 1 otherwise. Five honest keys are measured, too: what as many well-behaved keys would cost. The
report names the p99 beside each kind of bomb.

The clients of the hostile keys run at the lowest priority: they stand for other machines, and to make a bomb of 30 MB
takes more CPU than to refuse it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import websockets
from msgspec import Struct, field

from bench.report import console
from bench.resources import Usage, usage
from bench.servers import Server, modelyard_server
from modelyard.library import default_model
from tests.prompt.test_pdf_pages import pdf

HONEST, MORE, HOSTILE = ("ada", "bob", "cyd"), ("dan", "fay"), ("eve", "mallory")
MAX_MEMORY = 4 << 30
_CHAT, _TIMEOUT_S = "/v1/chat/completions", 120.0
_MAX_RATIO = 2.0  # of the honest keys' p99, beside the hostile ones and alone
_SLACK_S = 0.25  # a p99 of a few milliseconds may grow by a stall that nobody notices
_MAX_GROWTH = 1.2  # of the memory, when the hostile keys have left
_MAX_FILES = 8  # more, as connections come and go

Span = tuple[float, float]  # of time.monotonic, which all processes of a machine share
Bomb = Callable[[httpx.AsyncClient, int], Coroutine[Any, Any, object]]


def configuration(engine: str) -> dict[str, Any]:
    model: dict[str, Any] = {"backend": "fake", "token_delay": 0.001, "echo": True}
    if engine != "fake":
        model = {"backend": engine, "path": str(default_model.fetch()), "n_threads": 1}
    keys = [{"name": name, "key": f"sk-{name}"} for name in (*HONEST, *MORE, *HOSTILE)]
    keys[-1] |= {"token_budget": 100_000, "budget_period": "day"}  # type: ignore[dict-item]
    return {
        "models": {"demo": model},
        "caches": {"main": {"model": "demo", "n_ctx": 4096, "parallel": 4}},
        "routes": [{"match": "*", "cache": "main"}],
        "keys": keys,
    }


class Measured(Struct):
    """What the honest keys saw: begin and end of each answer, and what became of the others."""

    spans: list[Span] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def quantile(self, share: float, beside: Sequence[Span] = ()) -> float:
        """Of the seconds of an answer; of those that were there at the same time as one of these."""
        spans = [one for one in self.spans if not beside or any(one[0] < b and a < one[1] for a, b in beside)]
        seconds = sorted(end - begin for begin, end in spans)
        return seconds[int(share * (len(seconds) - 1))] if seconds else 0.0

    def p99(self) -> float:
        return self.quantile(0.99)

    def __str__(self) -> str:
        return f"{len(self.spans)} answers, p50 {self.quantile(0.5):.3f} s, p99 {self.p99():.3f} s"


class Verdict(Struct):
    alone: Measured
    five: Measured  # as many keys as with the hostile ones
    beside: Measured
    bombs: dict[str, list[Span]]
    before: Usage
    after: Usage

    def faults(self) -> list[str]:
        found = [f"{count} honest requests: {what}" for what, count in self.beside.outcomes.items() if what != "200"]
        if self.beside.p99() > _MAX_RATIO * self.alone.p99() + _SLACK_S:
            found.append(f"the p99 is {self.beside.p99():.2f} s, and {self.alone.p99():.2f} s alone")
        if _has_grown(self.before, self.after):
            found.append(f"the server has grown: {_grown(self.before, self.after)}")
        if not self.beside.spans or not self.bombs:
            found.append("nothing was measured")
        return found


def _has_grown(before: Usage, after: Usage) -> bool:
    return after.rss_mb > _MAX_GROWTH * before.rss_mb or after.files > before.files + _MAX_FILES


def _grown(before: Usage, after: Usage) -> str:
    return f"{before.rss_mb:.0f} → {after.rss_mb:.0f} MiB, {before.files} → {after.files} open files"


# --- the honest keys --------------------------------------------------------------------------------------------------


async def ask(server: Server, key: str, until: float, measured: Measured) -> None:
    async with client_of(server.url, key) as client:
        for number in range(sys.maxsize):
            if time.monotonic() >= until:
                return
            body = chat(f"{key} asks question {number}", max_tokens=16)
            began = time.monotonic()
            try:
                outcome = str((await client.post(_CHAT, json=body)).status_code)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            measured.outcomes[outcome] += 1
            if outcome == "200":
                measured.spans.append((began, time.monotonic()))
            await asyncio.sleep(0.05)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


@asynccontextmanager
async def client_of(url: str, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers, limits = {"authorization": f"Bearer sk-{key}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_TIMEOUT_S) as client:
        yield client


# --- the hostile keys -------------------------------------------------------------------------------------------------


async def batch_of_lines(client: httpx.AsyncClient, size: int) -> None:
    data = {"purpose": "batch"}
    made = await client.post("/v1/files", files={"file": ("bomb.jsonl", b"x\n" * (size >> 1))}, data=data)
    if made.status_code == 200:
        body = {"input_file_id": made.json()["id"], "endpoint": _CHAT, "completion_window": "24h"}
        await client.post("/v1/batches", json=body)


async def file_many_times(client: httpx.AsyncClient, size: int) -> None:
    data = {"purpose": "user_data"}
    made = await client.post("/v1/files", files={"file": ("a.txt", b"words " * (size // 6))}, data=data)
    if made.status_code == 200:
        parts = [{"type": "input_file", "file_id": made.json()["id"]}] * 120
        await client.post("/v1/responses", json={"model": "demo", "input": [{"role": "user", "content": parts}]})
        await client.delete(f"/v1/files/{made.json()['id']}")


async def documents(client: httpx.AsyncClient, size: int) -> None:
    pages = [f"page {random.random()} " + "x" * (size >> 12) for _ in range(40)]
    data = f"data:application/pdf;base64,{base64.b64encode(pdf(*pages)).decode()}"
    part = {"type": "file", "file": {"file_data": data, "filename": "a.pdf"}}
    await asyncio.gather(*(client.post(_CHAT, json=chat([part])) for _ in range(10)))  # type: ignore[arg-type]


async def pieces(client: httpx.AsyncClient, size: int) -> None:
    await client.post("/tokenize", json={"content": "some words " * (size // 11), "with_pieces": True})


async def prompts_that_leave(client: httpx.AsyncClient, size: int) -> None:
    sent = [asyncio.create_task(client.post(_CHAT, json=chat(f"{n} " + "word " * (size // 50)))) for n in range(10)]
    await asyncio.sleep(1)
    for one in sent:
        one.cancel()
    await asyncio.gather(*sent, return_exceptions=True)


async def beyond_the_budget(client: httpx.AsyncClient, _size: int) -> None:
    await asyncio.gather(*(client.post(_CHAT, json=chat(f"number {n}", max_tokens=64)) for n in range(20)))


async def slow_body(client: httpx.AsyncClient, _size: int) -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" "
            await asyncio.sleep(0.05)

    await asyncio.gather(*(client.post(_CHAT, content=drip()) for _ in range(20)))


async def sockets(client: httpx.AsyncClient, _size: int) -> None:
    url = f"ws://{client.base_url.host}:{client.base_url.port}/v1/responses"

    async def flood() -> None:
        headers = {"authorization": client.headers["authorization"]}
        async with websockets.connect(url, additional_headers=headers) as socket:
            for _ in range(40):
                await socket.send(json.dumps({"type": "response.create", "model": "demo", "input": "hi"}))
            await asyncio.sleep(0.5)

    await asyncio.gather(*(flood() for _ in range(10)), return_exceptions=True)


BOMBS: Sequence[Bomb] = (
    batch_of_lines,
    file_many_times,
    documents,
    pieces,
    prompts_that_leave,
    beyond_the_budget,
    slow_body,
    sockets,
)


async def attack(url: str, key: str, seconds: float, size: int) -> None:
    """All bombs in turn, at least once. Whatever the server answers is right."""
    until = time.monotonic() + seconds
    async with client_of(url, key) as client:
        for number in range(sys.maxsize):
            if number >= len(BOMBS) and time.monotonic() >= until:
                return
            bomb, began = BOMBS[number % len(BOMBS)], time.monotonic()
            with contextlib.suppress(httpx.HTTPError, OSError):
                await bomb(client, size)
            print(bomb.__name__, began, time.monotonic(), flush=True)


@asynccontextmanager
async def attackers(
    url: str, seconds: float, size: int, bombs: dict[str, list[Span]]
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """In processes of their own: to make a bomb takes time, too."""

    async def one(key: str) -> None:
        command = (
            "nice",
            "-n",
            "19",
            sys.executable,
            "-m",
            "bench.hostile",
            "--attack",
            url,
            key,
            str(seconds),
            str(size),
        )
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        for line in output.decode().splitlines():
            name, began, ended = line.split()
            bombs.setdefault(name, []).append((float(began), float(ended)))

    tasks = [asyncio.create_task(one(key)) for key in HOSTILE]
    try:
        yield tasks
    finally:
        await asyncio.gather(*tasks)


# --- the run ----------------------------------------------------------------------------------------------------------


async def run(server: Server, seconds: float, size: int = 30 << 20, *, fills_caches: bool = True) -> Verdict:
    """An eighth of the time three honest keys are alone, an eighth five. `size` is that of a bomb in bytes.
    `fills_caches`: a first round of bombs is not measured; caches of tokens and pages are bounded, and full then."""
    process = psutil.Process(server.process.pid)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    alone, five, beside, bombs = Measured(), Measured(), Measured(), dict[str, list[Span]]()
    for keys, measured in ((HONEST, alone), ((*HONEST, *MORE), five)):
        until = time.monotonic() + seconds / 8
        await asyncio.gather(*(ask(server, key, until, measured) for key in keys))
    if fills_caches:
        async with attackers(server.url, 0.0, size, {}):
            pass
    before = usage(process)
    async with attackers(server.url, 3 * seconds / 4, size, bombs) as running:
        while not all(one.done() for one in running):
            await asyncio.gather(*(ask(server, key, time.monotonic() + 1, beside) for key in HONEST))
    for _ in range(30 if fills_caches else 3):
        if not _has_grown(before, usage(process)):
            break
        await asyncio.sleep(1)
    return Verdict(alone, five, beside, bombs, before, usage(process))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engine", default="llama_cpp", choices=("llama_cpp", "fake"))
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.attack:
        url, key, seconds, size = parsed.attack
        asyncio.run(attack(url, key, float(seconds), int(size)))
        return 0
    with modelyard_server(configuration(parsed.engine)) as server:
        verdict = asyncio.run(run(server, 60 * parsed.minutes))
    out = console()
    out.print(f"three honest keys: {verdict.alone}")
    out.print(f"five honest keys: {verdict.five}")
    out.print(f"three honest and two hostile keys: {verdict.beside}; {_grown(verdict.before, verdict.after)}")
    for name, spans in verdict.bombs.items():
        p50, p99 = (verdict.beside.quantile(share, spans) for share in (0.5, 0.99))
        mean = sum(end - begin for begin, end in spans) / len(spans)
        out.print(f"  beside {name} ({len(spans)} of {mean:.1f} s): p50 {p50:.3f} s, p99 {p99:.3f} s")
    for fault in verdict.faults():
        out.print(f"FAULT {fault}")
    return 1 if verdict.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
