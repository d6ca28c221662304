"""What another process costs: engines inline, apart and behind a scheduler, side by side. `python -m bench.workers`

Every figure is the median of several rounds in which the topologies take turns. Nothing here is a test: run it on a
machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from modelyard.core.engine import CacheInfo, EngineInfo, EngineSpec, EngineStats, Prompt, TokenRun, Tokens
from modelyard.core.lease import LeaseRequest
from modelyard.core.pool import ModelSpec
from modelyard.core.request import Sampling
from modelyard.engines import fake, llama_cpp
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.library.default_model import fetch
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store.memory import MemoryStore
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.messages import (
    AddRequest,
    EngineOpened,
    InferRequest,
    TokenStep,
    UpdateBatch,
    encode,
    open_engine_message,
)
from modelyard.workers.packing import pack_ids
from modelyard.workers.process_engine import create_process_engine
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.worker import HostedEngine, Worker
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine

Row = tuple[str, str, str]
PROMPT = list(range(100, 164))


def address(name: str = "s") -> str:
    return f"ipc://{Path(tempfile.mkdtemp(prefix='my-bench-')) / name}"


# --- an engine inline and apart --------------------------------------------------------------------------


def llama_spec(parallel: int = 8) -> EngineSpec:
    options = llama_cpp.Options(path=str(fetch()), n_threads=1, speculation="off")
    return EngineSpec("small", options, {"main": CacheInfo(512, parallel)})


def fake_spec(tokens: int, parallel: int = 64, delay: float = 0.0) -> EngineSpec:
    options = fake.Options(script=[{"when": ".*", "steps": [{"tokens": tokens}]}], token_delay=delay)
    return EngineSpec("demo", options, {"main": CacheInfo(1 << 20, parallel)})


def prompt(max_tokens: int) -> Prompt:
    free = Sampling(temperature=0, logit_bias={0: -100.0, 2: -100.0})
    return Prompt(parts=(TokenRun(PROMPT),), max_tokens=max_tokens, cache="main", sampling=free)


async def first_token(engine: Any) -> float:
    began = time.perf_counter()
    job, seen = engine.generate(prompt(2)), None
    async for batch in job:
        if seen is None and any(isinstance(chunk, Tokens) for chunk in batch):
            seen = time.perf_counter() - began
    return seen or 0.0


async def stream(engine: Any, tokens: int) -> int:
    return sum([len(c.ids) async for batch in engine.generate(prompt(tokens)) for c in batch if isinstance(c, Tokens)])


async def rate(engine: Any, streams: int, tokens: int) -> float:
    began = time.perf_counter()
    said = sum(await asyncio.gather(*(stream(engine, tokens) for _ in range(streams))))
    return said / (time.perf_counter() - began)


async def worked(child: int, engine: Any, streams: int, tokens: int) -> float:
    """CPU seconds of both processes."""
    family = [psutil.Process(), psutil.Process(child)]
    before = cpu_s(family)
    await rate(engine, streams, tokens)
    return cpu_s(family) - before


def cpu_s(family: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in family)


@asynccontextmanager
async def both(backend: str, spec: EngineSpec) -> AsyncIterator[tuple[Any, Any]]:
    module: Any = {"llama_cpp": llama_cpp, "fake": fake}[backend]
    inline, other = module.create(spec), create_process_engine(backend, spec, "text")
    for engine in (inline, other):
        await engine.open(lambda *_: None)
    try:
        yield inline, other
    finally:
        for engine in (inline, other):
            await engine.close()


async def in_turns(measure: Callable[[Any], Awaitable[float]], engines: tuple[Any, Any], rounds: int) -> list[float]:
    taken: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            taken[which].append(await measure(engines[which]))
    return [statistics.median(each) for each in taken]


async def latency(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for backend, spec in (("fake", fake_spec(4)), ("llama_cpp", llama_spec())):
        async with both(backend, spec) as engines:
            await in_turns(first_token, engines, 10)
            near, far = await in_turns(first_token, engines, rounds)
        rows.append((f"TTFT p50, {backend}: inline → apart", f"{near * 1e3:.2f} → {far * 1e3:.2f} ms", "≤ +1 ms"))
    return rows


async def busy(share: float, stop: asyncio.Event) -> None:
    """The gateway's own work on its loop, as rendering and writing would be: so much of the time."""
    while not stop.is_set():
        until = time.perf_counter() + 0.002 * share
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.002 * (1 - share))


async def decoding(rounds: int) -> list[Row]:
    rows: list[Row] = []
    async with both("llama_cpp", llama_spec()) as engines:
        near, far = await in_turns(lambda engine: rate(engine, 8, 48), engines, rounds)
        rows.append(("8 streams, apart / inline", f"{far / near:.3f} ({far:.0f} / {near:.0f} tok/s)", "≥ 0.98"))
        near, far = await in_turns(lambda engine: worked(engines[1].pid, engine, 8, 48), engines, rounds)
        rows.append(("the same by CPU time, whoever else is busy", f"{near / far:.3f}", "≥ 0.98"))
        stop = asyncio.Event()
        working = asyncio.create_task(busy(0.6, stop))
        near, far = await in_turns(lambda engine: rate(engine, 8, 48), engines, rounds)
        stop.set()
        await working
        rows.append(("the same, gateway busy", f"{far / near:.3f} ({far:.0f} / {near:.0f} tok/s)", "≥ 1.0"))
    return rows


# --- the wire --------------------------------------------------------------------------


class Stepper:
    """An engine that does nothing but step: every running job gets one token a step, all in one turn of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.info = EngineInfo("stepper", {"main": CacheInfo(1 << 20, 64)})
        self._jobs: list[tuple[GenerationQueue[Any], list[int]]] = []

    def generate(self, asked: Prompt) -> GenerationQueue[Any]:
        box: GenerationQueue[Any] = GenerationQueue(loop=self._loop)
        if not self._jobs:
            self._loop.call_soon(self._step)
        self._jobs.append((box, [asked.max_tokens]))
        return box

    def _step(self) -> None:
        from modelyard.core.engine import End

        left = []
        for box, count in self._jobs:
            count[0] -= 1
            if count[0]:
                box.put(Tokens([30_000]))
                left.append((box, count))
            else:
                box.put_many([Tokens([30_000]), End("length")], last=True)
        self._jobs = left
        if left:
            self._loop.call_soon(self._step)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass


def _stepping(endpoint: str) -> None:
    async def work() -> None:
        worker = Worker(endpoint)
        hosted = HostedEngine(open_engine_message("e", "fake", fake_spec(1)), lambda *_: None)
        hosted.engine = Stepper()  # type: ignore[assignment]
        worker._engines["e"] = hosted
        await asyncio.Event().wait()

    _looped(work)


def _looped(work: Callable[[], Any]) -> None:
    import uvloop

    uvloop.run(work())


@asynccontextmanager
async def child(target: Callable[..., None], *args: Any) -> AsyncIterator[multiprocessing.Process]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process  # type: ignore[misc]
    finally:
        process.kill()
        process.join()


async def throughput(streams: int, tokens: int, rounds: int) -> list[Row]:
    endpoint = address("w")
    async with child(_stepping, endpoint):
        session = WorkerSession(endpoint, "bench")
        await session.connect()
        engine: Any = remote_engine(session, EngineOpened("e", "text", EngineInfo("stepper")))
        rates = [await rate(engine, streams, tokens) for _ in range(rounds)]
        await session.close()
    made = statistics.median(rates)
    return [(f"tokens/s over one link, {streams} streams", f"{made:,.0f}", "≥ 100,000")]


def sizes() -> list[Row]:
    ids = [30_000 + i for i in range(1024)]
    asked = len(encode(AddRequest("0123456789abcdef", InferRequest(1, pack_ids(ids), Sampling(temperature=0.7)))))
    frame = len(encode(UpdateBatch([TokenStep(i, pack_ids([30_000])) for i in range(64)])))
    one = len(encode(UpdateBatch([TokenStep(7, pack_ids([30_000]))])))
    return [
        ("a prompt of 1,024 tokens", f"{asked:,} bytes (as JSON ids {len(json.dumps(ids)):,})", "~4 KB"),
        ("a token, 64 streams a frame", f"{frame / 64:.1f} bytes", "4 bytes and who it is for"),
        ("a token, alone in its frame", f"{one} bytes", ""),
    ]


# --- the scheduler --------------------------------------------------------------------------


def _dispatching(endpoint: str, workers: str, parallel: int, tokens: int, delay: float, replicas: int) -> None:
    async def work() -> None:
        crew = WorkerPool(Path(workers))
        scheduler = Scheduler()
        spec = fake_spec(tokens, parallel, delay)
        make = lambda: create_worker_engine(crew, "fake", spec, "x")  # noqa: E731
        print_ = ModelSpec(name="demo", caches=spec.caches, make=make, identity="x", replicas=replicas, replica_max=8)
        scheduler.reconfigure({"demo": print_})
        desk = SchedulerServer(endpoint, scheduler, crew, MemoryStore(1, 1, 1), _nothing)
        await scheduler.load("demo")
        await scheduler.scale("demo", replicas)
        desk._publish()
        await asyncio.Event().wait()

    _looped(work)


async def _nothing() -> None:
    pass


@asynccontextmanager
async def pool(parallel: int, tokens: int, delay: float, replicas: int = 1) -> AsyncIterator[RemotePool]:
    with tempfile.TemporaryDirectory(prefix="my-bench-") as folder:
        endpoint = f"ipc://{folder}/s"
        async with child(_dispatching, endpoint, f"{folder}/w", parallel, tokens, delay, replicas) as process:
            made = RemotePool(endpoint, "bench")
            while len(made.engines("demo")) < replicas:  # noqa: ASYNC110  it hears of them in a moment
                await asyncio.sleep(0.01)
            try:
                yield made
            finally:
                family = psutil.Process(process.pid).children(recursive=True)
                await made.close()
                for each in family:
                    each.kill()


async def grants(seconds: float) -> list[Row]:
    async with pool(256, 1, 0.0) as there:
        ended, granted = time.perf_counter() + seconds, 0

        async def ask() -> None:
            nonlocal granted
            while time.perf_counter() < ended:
                lease = await there.request(LeaseRequest(model="demo", cache="main")).lease()
                granted += 1
                lease.release()

        await asyncio.gather(*(ask() for _ in range(64)))
    return [("grants/s of the scheduler", f"{granted / seconds:,.0f}", "≥ 5,000")]


async def scaling(tokens: int, delay: float) -> list[Row]:
    rates: dict[int, float] = {}
    for replicas in (1, 2, 4):
        async with pool(4, tokens, delay, replicas) as there:

            async def one(there: RemotePool = there) -> int:
                lease = await there.request(LeaseRequest(model="demo", cache="main")).lease()
                try:
                    return await stream(lease.engine, tokens)
                finally:
                    lease.release()

            began = time.perf_counter()
            said = sum(await asyncio.gather(*(one() for _ in range(8 * replicas))))
            rates[replicas] = said / (time.perf_counter() - began)
    told = ", ".join(f"{count}: {made:,.0f}" for count, made in rates.items())
    return [("scaling, 1 → 4 delay-bound workers", f"{rates[4] / rates[1] / 4:.3f} of linear ({told} tok/s)", "≥ 0.95")]


# --- the whole: gateways, scheduler, worker --------------------------------------------------------------------------


def whole(rounds: int, seconds: float) -> list[Row]:
    from bench.whole import measure

    return [
        (f"requests per CPU second: {title}", f"{made:,.0f}", "") for title, made in measure(rounds, seconds).items()
    ]


async def main(quick: bool) -> None:
    from bench import distances  # which is made of what stands here

    show(sizes())
    show(await throughput(64, 1000 if quick else 5000, 3 if quick else 7))
    show(await grants(2 if quick else 5))
    show(await scaling(100 if quick else 200, 0.01))
    show(await latency(50 if quick else 300))
    show(await distances.rows(50 if quick else 300, 200 if quick else 1000))
    show(await decoding(3 if quick else 9))
    show(await asyncio.to_thread(whole, 1 if quick else 3, 3 if quick else 10))


def show(rows: list[Row]) -> None:
    for title, value, target in rows:
        print(f"{title:52} {value:40} {target}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    asyncio.run(main(parser.parse_args().quick))
