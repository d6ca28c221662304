"""How long a token and a request are on their way in each topology, beside an engine in the process itself.

An engine that says the time: each of its tokens is the clock when it was made, in µs, and the reader looks at the same
clock, which Linux has one of. So a token's way is measured alone, not between the tokens around it.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from bench import workers
from modelyard.core.engine import CacheInfo, End, EngineInfo, EngineStats, Prompt, Tokens
from modelyard.core.lease import LeaseRequest
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.messages import EngineOpened, open_engine_message
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.transport import ClusterKeys, generate_keys
from modelyard.workers.worker import HostedEngine, Worker

_EVERY_S = 0.002
_TURN = 1 << 31  # ids are 32 bits; the clock comes round after 36 minutes


def now_us() -> int:
    return time.perf_counter_ns() // 1000 % _TURN


class Clock:
    """Says the time, `max_tokens` times."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.info = EngineInfo("clock", {"main": CacheInfo(1 << 20, 64)})

    def generate(self, asked: Prompt) -> GenerationQueue[Any]:
        box: GenerationQueue[Any] = GenerationQueue(loop=self._loop)
        self._say(box, asked.max_tokens)
        return box

    def _say(self, box: GenerationQueue[Any], left: int) -> None:
        if left == 1:
            box.put_many([Tokens([now_us()]), End("length")], last=True)
            return
        box.put(Tokens([now_us()]))
        self._loop.call_later(_EVERY_S, self._say, box, left - 1)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass


def _telling(endpoint: str, keys: ClusterKeys | None) -> None:
    async def work() -> None:
        worker = Worker(endpoint, keys=keys)
        hosted = HostedEngine(open_engine_message("e", "fake", workers.fake_spec(1)), lambda *_: None)
        hosted.engine = Clock()  # type: ignore[assignment]
        worker._engines["e"] = hosted
        await asyncio.Event().wait()

    workers._looped(work)


@asynccontextmanager
async def far(endpoint: str, keys: ClusterKeys | None = None) -> AsyncIterator[Any]:
    async with workers.child(_telling, endpoint, keys):
        session = WorkerSession(endpoint, "bench", keys=keys)
        await session.connect()
        yield remote_engine(session, EngineOpened("e", "text", EngineInfo("clock")))
        await session.close()


async def ways(engine: Any, tokens: int) -> float:
    """The median token's, in ms. The first one is the request's."""
    took: list[int] = []
    async for batch in engine.generate(workers.prompt(tokens)):
        took += [(now_us() - id) % _TURN for chunk in batch if isinstance(chunk, Tokens) for id in chunk.ids]
    return statistics.median(took[1:]) / 1e3


async def asked(ask: Callable[[], Any], rounds: int) -> float:
    """The median time from a request to its first token, in ms."""
    return float(statistics.median([await ask() for _ in range(rounds)])) * 1e3


async def leased(pool: RemotePool) -> float:
    began = time.perf_counter()
    lease = await pool.request(LeaseRequest(model="demo", cache="main")).lease()
    try:
        granted = time.perf_counter() - began
        return granted + await workers.first_token(lease.engine)
    finally:
        lease.release()


def _free() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}"


async def both(engine: Any, rounds: int, tokens: int) -> tuple[float, float]:
    return await asked(lambda: workers.first_token(engine), rounds), await ways(engine, tokens)


async def rows(rounds: int, tokens: int) -> list[workers.Row]:
    """A token's way with a scheduler is a child's: the worker sends it to the gateway, and nobody stands between."""
    request, token = await both(Clock(), rounds, tokens)
    told: list[workers.Row] = []
    for name, endpoint, keys in (
        ("b, a child", workers.address("w"), None),
        ("d, tcp and CURVE", _free(), generate_keys()),
    ):
        async with far(endpoint, keys) as engine:
            more = await both(engine, rounds, tokens)
        told.append((f"added to a request: {name}", f"+{more[0] - request:.2f} ms", ""))
        told.append((f"added to a token: {name}", f"+{more[1] - token:.2f} ms", ""))
    async with workers.pool(64, 4, 0.0) as there:
        await asked(lambda: leased(there), 10)
        granted = await asked(lambda: leased(there), rounds)
    return [*told, ("added to a request: c, with the grant", f"+{granted - request:.2f} ms", "")]
