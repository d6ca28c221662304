"""What another process costs: engines in this process, in a child, and behind a scheduler. `python -m bench.workers`

Every figure is the median over rounds in which the topologies alternate. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop
from msgspec.structs import replace

import modelyard_fake as fake
from bench.prepared_load import COUNTER, LoadJob
from bench.servers import modelyard_server
from modelyard.core.engine import CacheInfo, End, EngineInfo, EngineSpec, EngineStats, Prompt, TokenRun, Tokens
from modelyard.core.pool import LeaseRequest
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.library.default_model import fetch
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store import MemoryStore
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.definitions import FixedDefinitions, define, message_spec
from modelyard.workers.messages import (
    AddRequest,
    EngineOpened,
    OpenEngine,
    TextChunks,
    UpdateBatch,
    encode,
)
from modelyard.workers.process_engine import create_process_engine
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.transport import ClusterKeys, generate_keys
from modelyard.workers.worker import HostedEngine, Worker
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine

Row = tuple[str, str, str]  # name, value, target
PROMPT_IDS = list(range(100, 164))


def ipc_endpoint(name: str = "s") -> str:
    return f"ipc://{Path(tempfile.mkdtemp(prefix='my-bench-')) / name}"


# --- an engine in this process and in a child -------------------------------------------------------------------------


def llama_spec(parallel: int = 8) -> EngineSpec:
    options = llama_cpp.Options(path=str(fetch()), n_threads=1, speculation="off")
    return EngineSpec("small", options, {"main": CacheInfo(512, parallel)})


def fake_spec(tokens: int, parallel: int = 64, delay: float = 0.0) -> EngineSpec:
    options = fake.Options.model_validate(
        {"script": [{"when": ".*", "steps": [{"tokens": tokens}]}], "token_delay": delay}
    )
    return EngineSpec("demo", options, {"main": CacheInfo(1 << 20, parallel)}, backend="fake")


def prompt(max_tokens: int) -> Prompt:
    sampling = Sampling(temperature=0, logit_bias={0: -100.0, 2: -100.0})
    return Prompt(parts=(TokenRun(PROMPT_IDS),), max_tokens=max_tokens, cache="main", sampling=sampling)


async def first_token_s(engine: Any) -> float:
    began = time.perf_counter()
    job, found = engine.generate(prompt(2)), None
    async for batch in job:
        if found is None and any(isinstance(chunk, Tokens) for chunk in batch):
            found = time.perf_counter() - began
    return found or 0.0


async def stream(engine: Any, tokens: int) -> int:
    return sum([len(c.ids) async for batch in engine.generate(prompt(tokens)) for c in batch if isinstance(c, Tokens)])


async def tokens_per_s(engine: Any, streams: int, tokens: int) -> float:
    began = time.perf_counter()
    count = sum(await asyncio.gather(*(stream(engine, tokens) for _ in range(streams))))
    return count / (time.perf_counter() - began)


async def cpu_s_of_both(child: int, engine: Any, streams: int, tokens: int) -> float:
    """CPU seconds of this process and the child."""
    processes = [psutil.Process(), psutil.Process(child)]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    await tokens_per_s(engine, streams, tokens)
    return sum(sum(process.cpu_times()[:2]) for process in processes) - before


@asynccontextmanager
async def both_engines(backend: str, spec: EngineSpec) -> AsyncIterator[tuple[Any, Any]]:
    """The engine in this process, and the same in a child."""
    module: Any = {"llama_cpp": llama_cpp, "fake": fake}[backend]
    inline, child = module.create(spec), create_process_engine(replace(spec, backend=backend))
    for engine in (inline, child):
        await engine.open(lambda *_: None)
    try:
        yield inline, child
    finally:
        for engine in (inline, child):
            await engine.close()


async def interleaved(measure: Callable[[Any], Awaitable[float]], engines: tuple[Any, Any], rounds: int) -> list[float]:
    """The median of each."""
    values: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            values[which].append(await measure(engines[which]))
    return [statistics.median(each) for each in values]


async def latency(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for backend, spec in (("fake", fake_spec(4)), ("llama_cpp", llama_spec())):
        async with both_engines(backend, spec) as engines:
            await interleaved(first_token_s, engines, 10)
            inline, child = await interleaved(first_token_s, engines, rounds)
        values = f"{inline * 1e3:.2f} → {child * 1e3:.2f} ms"
        rows.append((f"TTFT p50, {backend}: in process → child", values, "≤ +1 ms"))
    return rows


async def occupy_loop(share: float, stop: asyncio.Event) -> None:
    """Work on the loop for a share of the time, as rendering and writing in a gateway would."""
    while not stop.is_set():
        until = time.perf_counter() + 0.002 * share
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.002 * (1 - share))


async def decoding(rounds: int) -> list[Row]:
    rows: list[Row] = []
    async with both_engines("llama_cpp", llama_spec()) as engines:

        def cpu_s(engine: Any) -> Awaitable[float]:
            return cpu_s_of_both(engines[1].pid, engine, 8, 48)

        def rate(engine: Any) -> Awaitable[float]:
            return tokens_per_s(engine, 8, 48)

        inline, child = await interleaved(rate, engines, rounds)
        rows.append(
            ("8 streams, child / in process", f"{child / inline:.3f} ({child:.0f} / {inline:.0f} tok/s)", "≥ 0.98")
        )
        inline, child = await interleaved(cpu_s, engines, rounds)
        rows.append(("the same by CPU time, which other programs disturb less", f"{inline / child:.3f}", "≥ 0.98"))
        stop = asyncio.Event()
        busy = asyncio.create_task(occupy_loop(0.6, stop))
        inline, child = await interleaved(rate, engines, rounds)
        stop.set()
        await busy
        rows.append(("the same, gateway busy", f"{child / inline:.3f} ({child:.0f} / {inline:.0f} tok/s)", "≥ 1.0"))
    return rows


# --- the transport ----------------------------------------------------------------------------------------------------


class IdleEngine:
    """The common part of the engines below: they have one cache, and compute nothing."""

    name = "idle"

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.info = EngineInfo(self.name, {"main": CacheInfo(1 << 20, 64)})

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass


class StepEngine(IdleEngine):
    """Every running job gets one token per step, all in one iteration of the loop."""

    name = "stepper"

    def __init__(self) -> None:
        super().__init__()
        self._jobs: list[tuple[GenerationQueue[Any], list[int]]] = []

    def generate(self, prompt: Prompt) -> GenerationQueue[Any]:
        queue: GenerationQueue[Any] = GenerationQueue(loop=self._loop)
        if not self._jobs:
            self._loop.call_soon(self._step)
        self._jobs.append((queue, [prompt.max_tokens]))
        return queue

    def _step(self) -> None:
        remaining = []
        for queue, count in self._jobs:
            count[0] -= 1
            if count[0]:
                queue.put(Tokens([30_000]))
                remaining.append((queue, count))
            else:
                queue.put_many([Tokens([30_000]), End("length")], last=True)
        self._jobs = remaining
        if remaining:
            self._loop.call_soon(self._step)


_CLOCK_PERIOD = 1 << 31  # token ids have 32 bits: the clock wraps around after 36 minutes
_CLOCK_INTERVAL_S = 0.002


def clock_us() -> int:
    return time.perf_counter_ns() // 1000 % _CLOCK_PERIOD


class ClockEngine(IdleEngine):
    """Every token is the time at which it was made, in µs. The reader has the same clock, of which Linux has one: the
    latency of a token is measured alone, not between two tokens."""

    name = "clock"

    def generate(self, prompt: Prompt) -> GenerationQueue[Any]:
        queue: GenerationQueue[Any] = GenerationQueue(loop=self._loop)
        self._put(queue, prompt.max_tokens)
        return queue

    def _put(self, queue: GenerationQueue[Any], remaining: int) -> None:
        if remaining == 1:
            queue.put_many([Tokens([clock_us()]), End("length")], last=True)
            return
        queue.put(Tokens([clock_us()]))
        self._loop.call_later(_CLOCK_INTERVAL_S, self._put, queue, remaining - 1)


def _run_worker(engine: type[IdleEngine], endpoint: str, keys: ClusterKeys | None) -> None:
    """The child process: a worker that hosts one of the engines above."""

    async def work() -> None:
        spec = fake_spec(1)
        definitions = FixedDefinitions(define(spec))
        worker = Worker(endpoint, definitions, keys=keys)
        hosted = HostedEngine(OpenEngine("e", message_spec(spec)), definitions, lambda *_: None)
        hosted.engine = engine()  # type: ignore[assignment]
        worker._engines["e"] = hosted
        await asyncio.Event().wait()

    uvloop.run(work())


@asynccontextmanager
async def child_process(target: Callable[..., None], *args: Any) -> AsyncIterator[multiprocessing.Process]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process  # type: ignore[misc]
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def worker_engine(engine: type[IdleEngine], endpoint: str, keys: ClusterKeys | None = None) -> AsyncIterator[Any]:
    """One of the engines above in a worker process."""
    async with child_process(_run_worker, engine, endpoint, keys):
        session = WorkerSession(endpoint, "bench", keys=keys)
        await session.connect()
        yield remote_engine(session, EngineOpened("e", "text", EngineInfo(engine.name)))
        await session.close()


async def throughput(streams: int, tokens: int, rounds: int) -> list[Row]:
    async with worker_engine(StepEngine, ipc_endpoint("w")) as engine:
        rates = [await tokens_per_s(engine, streams, tokens) for _ in range(rounds)]
    return [(f"tokens/s over one connection, {streams} streams", f"{statistics.median(rates):,.0f}", "≥ 100,000")]


def sizes() -> list[Row]:
    ids = [30_000 + i for i in range(1024)]
    request = AddRequest("0123456789abcdef", 1, Prompt(parts=(TokenRun(ids),), sampling=Sampling(temperature=0.7)))
    batch = len(encode(UpdateBatch([TextChunks(i, [Tokens([30_000])]) for i in range(64)])))
    one = len(encode(UpdateBatch([TextChunks(7, [Tokens([30_000])])])))
    prompt_size = f"{len(encode(request)):,} bytes (as JSON ids {len(json.dumps(ids)):,})"
    return [
        ("a prompt of 1,024 tokens", prompt_size, "~4 KiB"),
        ("a token, 64 streams per message", f"{batch / 64:.1f} bytes", "4 bytes and the id of its stream"),
        ("a token, alone in its message", f"{one} bytes", ""),
    ]


async def token_latency_ms(engine: Any, tokens: int) -> float:
    """The median over all tokens but the first, which includes the request."""
    latencies: list[int] = []
    async for batch in engine.generate(prompt(tokens)):
        ids = [id for chunk in batch if isinstance(chunk, Tokens) for id in chunk.ids]
        latencies += [(clock_us() - id) % _CLOCK_PERIOD for id in ids]
    return statistics.median(latencies[1:]) / 1e3


async def median_ms(measure: Callable[[], Awaitable[float]], rounds: int) -> float:
    return statistics.median([await measure() for _ in range(rounds)]) * 1e3


async def leased_first_token_s(pool: RemotePool) -> float:
    began = time.perf_counter()
    lease = await pool.request(LeaseRequest(model="demo", cache="main")).lease()
    try:
        return time.perf_counter() - began + await first_token_s(lease.engine)
    finally:
        lease.release()


async def distances(rounds: int, tokens: int) -> list[Row]:
    """The latency that each topology adds to a request and to a token. With a scheduler the latency of a token is that
    of a child: the worker sends it to the gateway directly."""

    async def both(engine: Any) -> tuple[float, float]:
        return await median_ms(lambda: first_token_s(engine), rounds), await token_latency_ms(engine, tokens)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        tcp = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
    request, token = await both(ClockEngine())
    rows: list[Row] = []
    for name, endpoint, keys in (("b, a child", ipc_endpoint("w"), None), ("d, tcp and CURVE", tcp, generate_keys())):
        async with worker_engine(ClockEngine, endpoint, keys) as engine:
            request_there, token_there = await both(engine)
        rows.append((f"added to a request: {name}", f"+{request_there - request:.2f} ms", ""))
        rows.append((f"added to a token: {name}", f"+{token_there - token:.2f} ms", ""))
    async with remote_pool(64, 4, 0.0) as pool:
        await median_ms(lambda: leased_first_token_s(pool), 10)
        leased = await median_ms(lambda: leased_first_token_s(pool), rounds)
    return [*rows, ("added to a request: c, with the lease", f"+{leased - request:.2f} ms", "")]


# --- the scheduler ----------------------------------------------------------------------------------------------------


def _run_scheduler(endpoint: str, folder: str, parallel: int, tokens: int, delay: float, replicas: int) -> None:
    """The child process: a scheduler with a worker pool."""

    async def no_reload() -> None:
        pass

    async def work() -> None:
        workers = WorkerPool(Path(folder))
        scheduler = Scheduler(create=lambda spec, _: create_worker_engine(workers, spec))
        spec = replace(fake_spec(tokens, parallel, delay), identity="x", replicas=replicas, replica_max=8)
        scheduler.reconfigure({"demo": spec})
        server = SchedulerServer(endpoint, scheduler, workers, MemoryStore(1, 1, 1), no_reload)
        await scheduler.load("demo")
        await scheduler.scale("demo", replicas)
        server._publish()
        await asyncio.Event().wait()

    uvloop.run(work())


@asynccontextmanager
async def remote_pool(parallel: int, tokens: int, delay: float, replicas: int = 1) -> AsyncIterator[RemotePool]:
    with tempfile.TemporaryDirectory(prefix="my-bench-") as folder:
        endpoint = f"ipc://{folder}/s"
        arguments = (endpoint, f"{folder}/w", parallel, tokens, delay, replicas)
        async with child_process(_run_scheduler, *arguments) as process:
            pool = RemotePool(endpoint, "bench")
            while len(pool.engines("demo")) < replicas:  # noqa: ASYNC110  the pool has no event for it
                await asyncio.sleep(0.01)
            try:
                yield pool
            finally:
                children = psutil.Process(process.pid).children(recursive=True)
                await pool.close()
                for child in children:
                    child.kill()


async def leases(seconds: float) -> list[Row]:
    async with remote_pool(256, 1, 0.0) as pool:
        ended, granted = time.perf_counter() + seconds, 0

        async def request_leases() -> None:
            nonlocal granted
            while time.perf_counter() < ended:
                lease = await pool.request(LeaseRequest(model="demo", cache="main")).lease()
                granted += 1
                lease.release()

        await asyncio.gather(*(request_leases() for _ in range(64)))
    return [("leases/s of the scheduler", f"{granted / seconds:,.0f}", "≥ 5,000")]


async def scaling(tokens: int, delay: float) -> list[Row]:
    rates: dict[int, float] = {}
    for replicas in (1, 2, 4):
        async with remote_pool(4, tokens, delay, replicas) as pool:

            async def one(pool: RemotePool = pool) -> int:
                lease = await pool.request(LeaseRequest(model="demo", cache="main")).lease()
                try:
                    return await stream(lease.engine, tokens)
                finally:
                    lease.release()

            began = time.perf_counter()
            count = sum(await asyncio.gather(*(one() for _ in range(8 * replicas))))
            rates[replicas] = count / (time.perf_counter() - began)
    listed = ", ".join(f"{replicas}: {rate:,.0f}" for replicas, rate in rates.items())
    value = f"{rates[4] / rates[1] / 4:.3f} of linear ({listed} tok/s)"
    return [("scaling, 1 → 4 workers bound by a delay", value, "≥ 0.95")]


# --- whole servers ----------------------------------------------------------------------------------------------------

# A key with limits, so that the gateways need a shared scheduler.
_SERVER_CONFIG: dict[str, Any] = {
    "models": {
        "demo": {
            "backend": "fake",
            "token_delay": 0,
            "script": [{"steps": [{"text": "Hello there, this is a short answer."}]}],
        }
    },
    "caches": {"main": {"model": "demo", "n_ctx": 4096, "parallel": 64}},
    "routes": [{"match": "*", "cache": "main"}],
    "keys": [{"name": "bench", "key": "bench", "max_concurrent": 100_000}],
}


def whole_servers(rounds: int, seconds: float) -> list[Row]:
    """Requests per CPU-second of all processes of a server."""
    kinds = {"one process (a)": 1, "2 gateways, scheduler, worker (c)": 2}
    found: dict[str, list[float]] = {title: [] for title in kinds}
    for _ in range(rounds):
        for title, gateways in kinds.items():
            found[title].append(_requests_per_cpu_s(gateways, seconds))
    return [
        (f"requests per CPU-second: {title}", f"{statistics.median(values):,.0f}", "")
        for title, values in found.items()
    ]


def _requests_per_cpu_s(gateways: int, seconds: float) -> float:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": f"Hello {COUNTER}."}]})
    with modelyard_server(_SERVER_CONFIG, "--workers", str(gateways)) as server:
        LoadJob(url=server.url, body=body, key="bench", streams=32, seconds=1.0).run_in_process()
        before = server.cpu_s()
        found = LoadJob(url=server.url, body=body, key="bench", streams=32, seconds=seconds).run_in_process()
        cpu_s = server.cpu_s() - before
    if errors := [sample.error for sample in found.samples if sample.error is not None]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    return len(found.samples) / cpu_s


async def main(quick: bool) -> None:
    show(sizes())
    show(await throughput(64, 1000 if quick else 5000, 3 if quick else 7))
    show(await leases(2 if quick else 5))
    show(await scaling(100 if quick else 200, 0.01))
    show(await latency(50 if quick else 300))
    show(await distances(50 if quick else 300, 200 if quick else 1000))
    show(await decoding(3 if quick else 9))
    show(await asyncio.to_thread(whole_servers, 1 if quick else 3, 3 if quick else 10))


def show(rows: list[Row]) -> None:
    for name, value, target in rows:
        print(f"{name:56} {value:40} {target}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    asyncio.run(main(parser.parse_args().quick))
