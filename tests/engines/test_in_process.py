"""The life cycle that the in-process engines share, on an engine that counts instead of computing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    Control,
    EngineInfo,
    EngineSpec,
    Media,
    Prompt,
    TokenRun,
    Tokens,
)
from modelyard.core.errors import (
    ContextOverflow,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.core.request import Constraint
from modelyard.engines.in_process import InProcessJob, ThreadedEngine, warn_about_trained_length
from tests.engines.reading import accepted, end, ids, read, until

DEADLINE_S = 60.0


class CountingEngine(ThreadedEngine[InProcessJob]):
    """Generates 0, 1, 2 … for each job. The hooks of a test run where the library would."""

    library = "Counter"

    def __init__(self, caches: dict[str, CacheInfo] | None = None) -> None:
        caches = caches or {"main": CacheInfo(100, 4), "small": CacheInfo(10)}
        super().__init__(EngineSpec("m", None, caches), EngineInfo("counter", caches))
        self.before_load: Callable[..., Any] = lambda report: None
        self.before_step: Callable[[], Any] = lambda: None
        self.before_admit: Callable[[InProcessJob], None] = lambda job: None
        self.jobs: list[InProcessJob] = []
        self.events: list[str] = []
        self.pool = ThreadPoolExecutor(1)
        self.prepare: Callable[[], None] | None = None

    def _load_model(self, report: Callable[[float], bool]) -> None:
        self.before_load(report)
        self.n_vocab = 50
        self.events.append("loaded")

    def _unload_model(self) -> None:
        self.events.append("unloaded")

    def _after_shutdown(self) -> None:
        self.events.append("saved")

    def _release(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _create_job(self, prompt: Prompt, cache: str, window: int) -> InProcessJob:
        job = InProcessJob(prompt, self._loop, cache, window)
        if prompt.constraint is not None and self.prepare is not None:
            job.preparing = self.pool.submit(self.prepare)
        return job

    def _has_work(self) -> bool:
        return bool(self.jobs)

    def _admit(self, job: InProcessJob) -> None:
        self.before_admit(job)
        self.jobs.append(job)
        self._dispatch.put(job, [Accepted()])
        self._dispatch.flush()

    def _step(self) -> None:
        self.before_step()
        for job in list(self.jobs):
            if job.cancelled:
                self._end(job, "cancelled")
                continue
            self._dispatch.put(job, [Tokens([job.output_tokens])])
            job.count_output()
            if job.output_tokens == job.max_output:
                self._end(job, job.limit_reason)
        self._dispatch.flush()

    def _end(self, job: InProcessJob, reason: str) -> None:
        self.jobs.remove(job)
        self._dispatch.put(job, [job.end(reason)], True)

    def _fail_all(self, error: ModelyardError) -> None:
        for job in self.jobs:
            self._dispatch.put(job, [job.end("error", error)], True)
        self.jobs = []


@asynccontextmanager
async def running(caches: dict[str, CacheInfo] | None = None) -> AsyncIterator[CountingEngine]:
    engine = CountingEngine(caches)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


def prompt(length: int = 3, **fields: Any) -> Prompt:
    return Prompt(**{"parts": (TokenRun([1] * length),), "max_tokens": 4} | fields)


def wait_for_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Lets the event loop run before each step: steps that cost nothing would flood it."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(DEADLINE_S)


def raiser(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


# --- opening and closing ----------------------------------------------------------------------------------------------


async def test_progress_runs_from_0_to_1() -> None:
    engine, seen = CountingEngine(), list[float]()
    engine.before_load = lambda report: [report(fraction) for fraction in (0.5, 1.0)]
    await engine.open(lambda fraction, _: seen.append(fraction))
    await engine.close()
    assert seen == [0.0, 0.5, 0.99, 1.0]
    assert engine.events == ["loaded", "saved", "unloaded"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (AssertionError("bad tensor"), InvalidRequest, "cannot be loaded: bad tensor"),
        (NotFound("no file"), NotFound, "no file"),
    ],
)
async def test_failed_load_is_raised_and_leaves_the_engine_unavailable(
    error: Exception, kind: type[ModelyardError], message: str
) -> None:
    engine = CountingEngine()
    engine.before_load = raiser(error)
    with pytest.raises(kind, match=message):
        await engine.open(lambda *_: None)
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
    await engine.close()
    assert engine.events == ["unloaded"]


async def test_close_waits_for_a_load_whose_caller_is_gone_and_aborts_it() -> None:
    engine, started, proceed = CountingEngine(), threading.Event(), threading.Event()

    def load(report: Callable[[float], bool]) -> None:
        started.set()
        assert proceed.wait(DEADLINE_S)
        if not report(0.5):
            raise Unavailable("aborted")

    engine.before_load = load
    opening = asyncio.create_task(engine.open(lambda *_: None))
    assert await asyncio.to_thread(started.wait, DEADLINE_S)
    opening.cancel()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    proceed.set()
    await closing
    assert engine.events == ["unloaded"]
    with pytest.raises(asyncio.CancelledError):
        await opening


async def test_close_ends_running_jobs_and_may_be_called_twice() -> None:
    async with running({"main": CacheInfo(1 << 40, 4)}) as engine:
        engine.before_step = partial(wait_for_loop, asyncio.get_running_loop())
        endless = engine.generate(prompt(max_tokens=1 << 39))
        await until(endless, Accepted)
        other = engine.generate(prompt(max_tokens=1 << 39))
        await engine.close()
        for job in (endless, other):
            assert isinstance(end(await read(job)).error, Unavailable)
        await engine.close()
    assert not engine.lost.done()
    assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)


async def test_what_waits_for_a_dead_thread_is_rejected() -> None:
    async with running() as engine:
        stepping, block = threading.Event(), threading.Event()

        def die() -> None:
            stepping.set()
            block.wait(DEADLINE_S)
            raise RuntimeError("device lost")

        engine.before_step = die
        engine.generate(prompt())
        assert await asyncio.to_thread(stepping.wait, DEADLINE_S)
        queued = engine.generate(prompt())
        call = asyncio.create_task(engine.run_on_thread(lambda: None))
        await asyncio.sleep(0)
        block.set()
        assert isinstance(end(await read(queued)).error, Unavailable)
        with pytest.raises(Unavailable, match="device lost"):
            await call


# --- jobs -------------------------------------------------------------------------------------------------------------


async def test_job_streams_tokens_with_its_usage_and_timings() -> None:
    async with running() as engine:
        chunks = await read(engine.generate(prompt()))
    accepted(chunks)
    last = end(chunks)
    assert (ids(chunks), last.reason) == ([0, 1, 2, 3], "length")
    assert (last.usage.prompt, last.usage.output) == (3, 4)
    assert last.timings.first_token is not None
    assert last.timings.total is not None
    assert last.timings.total >= last.timings.first_token


async def test_output_is_limited_by_the_window() -> None:
    async with running() as engine:
        chunks = await read(engine.generate(prompt(8, cache="small", max_tokens=5)))
    assert (len(ids(chunks)), end(chunks).reason) == (2, "window")


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (prompt(100), ContextOverflow, "100"),
        (prompt(10, cache="small"), ContextOverflow, "10"),
        (prompt(cache="none"), NotFound, "it has main, small"),
        (prompt(0), InvalidRequest, "empty"),
        (prompt(parts=(TokenRun([50]),)), InvalidRequest, "outside 0…49"),
        (prompt(parts=(TokenRun([-1]),)), InvalidRequest, "outside 0…49"),
        (prompt(parts=(TokenRun([1]), Media("image", "0", b"", 1))), Unsupported, "takes no image"),
        (prompt(deadline=1.0), Timeout, "deadline"),
    ],
)
async def test_prompt_that_cannot_run_is_refused(refused: Prompt, kind: type[ModelyardError], message: str) -> None:
    async with running() as engine:
        error = end(await read(engine.generate(refused))).error
    assert isinstance(error, kind)
    assert message in error.message


async def test_cancelled_job_ends_before_it_is_admitted_and_while_it_runs() -> None:
    async with running() as engine:
        block = threading.Event()
        engine.before_step = lambda: block.wait(DEADLINE_S)
        runs = engine.generate(prompt(max_tokens=90))
        await until(runs, Accepted)
        queued = engine.generate(prompt())
        runs.cancel()
        queued.cancel()
        block.set()
        assert end(await read(runs)).reason == "cancelled"
        assert [end(await read(queued)).reason, engine.jobs] == ["cancelled", []]


async def test_error_in_admission_ends_only_that_job(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as engine:
        engine.before_admit = raiser(RuntimeError("secret"))
        with caplog.at_level(logging.ERROR):
            error = end(await read(engine.generate(prompt()))).error
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        assert "secret" in caplog.text
        engine.before_admit = lambda job: None
        assert end(await read(engine.generate(prompt()))).error is None


async def test_job_is_prepared_on_another_thread_before_the_engine_gets_it() -> None:
    async with running() as engine:
        threads: list[str] = []
        engine.prepare = lambda: threads.append(threading.current_thread().name)
        engine.before_admit = lambda job: threads.append(threading.current_thread().name)
        constrained = prompt(constraint=Constraint("json_object"))
        assert end(await read(engine.generate(constrained))).error is None
        assert threads[0].startswith("ThreadPoolExecutor")
        assert threads[1] == "counter:m"
        engine.prepare = raiser(InvalidRequest("bad grammar"))
        assert "bad grammar" in str(end(await read(engine.generate(constrained))).error)


# --- death and calls --------------------------------------------------------------------------------------------------


async def test_error_in_a_step_ends_all_jobs_and_reports_the_engine_lost() -> None:
    async with running() as engine:
        engine.before_step = raiser(RuntimeError("device lost"))
        first, second = engine.generate(prompt()), engine.generate(prompt())
        for job in (first, second):
            error = end(await read(job)).error
            assert isinstance(error, Unavailable)
            assert "the engine died: device lost" in error.message
        assert "device lost" in (await asyncio.wait_for(engine.lost, DEADLINE_S)).message
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)
        with pytest.raises(Unavailable):
            await engine.run_on_thread(lambda: None)
    assert engine.events == ["loaded", "unloaded"], "nothing is saved after a death"


async def test_call_runs_on_the_engines_thread_and_its_error_is_the_callers() -> None:
    async with running() as engine:
        assert await engine.run_on_thread(lambda: threading.current_thread().name) == "counter:m"
        with pytest.raises(NotFound):
            await engine.run_on_thread(raiser(NotFound("no such thing")))
        with pytest.raises(Internal):
            await engine.run_on_thread(raiser(RuntimeError("secret")))
        assert end(await read(engine.generate(prompt()))).error is None


async def test_calls_do_not_hold_up_streams() -> None:
    """One call runs per step, however many wait."""
    async with running() as engine:
        block, order = threading.Event(), list[str]()
        engine.before_step = lambda: block.wait(DEADLINE_S) and order.append("step")
        job = engine.generate(prompt(max_tokens=10))
        await until(job, Accepted)
        calls = [asyncio.create_task(engine.run_on_thread(lambda: order.append("call"))) for _ in range(3)]
        await asyncio.sleep(0)
        block.set()
        await asyncio.gather(*calls)
        await read(job)
    assert order.count("call") == 3
    assert "call, call" not in ", ".join(order)


async def test_unsupported_control_names_the_library() -> None:
    assert "Counter does not support 'save'" in CountingEngine()._unsupported_control(Control("save")).message


async def test_window_beyond_the_trained_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_about_trained_length(CountingEngine().spec, 50)
    assert "the cache 'main' has a window of 100 tokens, but the model 'm' was trained on 50" in caplog.text
    assert "small" not in caplog.text
