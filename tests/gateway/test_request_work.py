"""Work on a large request: in its own threads, stopped when the client leaves or the deadline passes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from modelyard.core.errors import Cancelled, ContextOverflow, Timeout
from modelyard.gateway.request_work import RequestWork, _threads, run_in_request_thread


def steps(work: RequestWork, started: threading.Event, ended: threading.Event) -> Callable[[], None]:
    """Endless work in steps; `ended` is set when it stops."""

    def run() -> None:
        started.set()
        try:
            while True:
                time.sleep(0.001)
                work.check()
        finally:
            ended.set()

    return run


async def running(work: RequestWork) -> tuple[asyncio.Task[None], threading.Event]:
    started, ended = threading.Event(), threading.Event()
    task = asyncio.create_task(work.run(steps(work, started, ended)))
    await asyncio.to_thread(started.wait, 10)
    return task, ended


async def test_a_client_that_leaves_stops_the_thread_and_ends_the_wait_at_once() -> None:
    work = RequestWork()
    task, ended = await running(work)
    work.cancel()
    with pytest.raises(Cancelled, match="the client disconnected"):
        await task
    assert await asyncio.to_thread(ended.wait, 10)
    with pytest.raises(Cancelled):
        await work.run(int)


async def test_the_deadline_stops_the_thread() -> None:
    work = RequestWork(deadline=time.monotonic() + 0.05)
    task, ended = await running(work)
    with pytest.raises(Timeout, match="the request's deadline passed"):
        await task
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_cancelled_task_stops_the_thread() -> None:
    work = RequestWork()
    task, ended = await running(work)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)


async def test_work_that_waits_for_a_thread_is_dropped_when_its_client_leaves() -> None:
    busy = [await running(RequestWork()) for _ in range(_threads()._max_workers)]
    ran: list[int] = []
    waiting = RequestWork()
    task = asyncio.create_task(waiting.run(ran.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(Cancelled):
        await task
    for one, _ in busy:
        one.cancel()
    await asyncio.gather(*(one for one, _ in busy), return_exceptions=True)
    await run_in_request_thread(int)
    assert ran == []


async def test_large_requests_leave_the_threads_of_other_work_free() -> None:
    busy = [await running(RequestWork()) for _ in range(_threads()._max_workers)]
    assert await asyncio.wait_for(asyncio.to_thread(int), 5) == 0
    for one, _ in busy:
        one.cancel()
    await asyncio.gather(*(one for one, _ in busy), return_exceptions=True)


def test_a_very_long_prompt_is_given_up_when_it_exceeds_the_window() -> None:
    on_progress = RequestWork().watch_window(20_000_000, 2048)
    on_progress(2000, 10_000)
    with pytest.raises(ContextOverflow) as caught:
        on_progress(4000, 20_000)
    assert (caught.value.prompt_tokens, caught.value.window) == (4_000_000, 2048)


def test_a_shorter_prompt_is_counted_to_its_end() -> None:
    RequestWork().watch_window(100_000, 2048)(4000, 20_000)
