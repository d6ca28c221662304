"""Jobs of a forwarding engine: each ends once, however its task ends."""

from __future__ import annotations

import asyncio
import threading

from modelyard.core.errors import Cancelled, Incomplete, Internal, Timeout, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Usage
from modelyard.engines.upstream.jobs import Emit, UpstreamJobs

DONE = Finished("end", Usage())


async def read(generation: object) -> list[Event]:
    return [event async for batch in generation for event in batch]  # type: ignore[attr-defined]


async def hang(_: Emit) -> None:
    await asyncio.Event().wait()


async def test_events_after_the_end_are_dropped() -> None:
    has_ended: list[bool] = []

    async def run(emit: Emit) -> None:
        has_ended.append(await emit([BlockDelta(0, "a")]))
        has_ended.append(await emit([DONE]))
        has_ended.append(await emit([BlockDelta(0, "late")]))

    jobs = UpstreamJobs()
    assert await read(jobs.start(run)) == [BlockDelta(0, "a"), DONE]
    await jobs.join()
    assert has_ended == [False, True, True]
    assert len(jobs) == 0


async def test_finished_answer_does_not_count_while_its_task_continues() -> None:
    release = asyncio.Event()

    async def run(emit: Emit) -> None:
        await emit([DONE])
        await release.wait()

    jobs = UpstreamJobs()
    assert await read(jobs.start(run)) == [DONE]
    assert len(jobs) == 0
    release.set()
    await jobs.join()


async def test_missing_end_and_every_kind_of_error_become_a_final_event() -> None:
    async def silent(_: Emit) -> None:
        pass

    async def known(_: Emit) -> None:
        raise Timeout("late")

    async def unknown(_: Emit) -> None:
        raise KeyError("x")

    jobs = UpstreamJobs()
    lasts = [(await read(jobs.start(run)))[-1] for run in (silent, known, unknown)]
    errors = [last.error for last in lasts if isinstance(last, Failed)]
    assert [type(error) for error in errors] == [Incomplete, Timeout, Internal]


async def test_cancel_works_before_the_first_step_later_and_from_a_thread() -> None:
    jobs = UpstreamJobs()
    early, late, threaded = jobs.start(hang), jobs.start(hang), jobs.start(hang)
    early.cancel()
    await asyncio.sleep(0)
    late.cancel()
    late.cancel()
    thread = threading.Thread(target=threaded.cancel)
    thread.start()
    for generation in (early, late, threaded):
        assert await read(generation) == [Failed(Cancelled("the job was cancelled"))]
    thread.join()
    assert len(jobs) == 0


async def test_close_fails_running_and_later_jobs() -> None:
    jobs = UpstreamJobs()
    running = jobs.start(hang)
    await asyncio.sleep(0)
    jobs.close(Unavailable("gone"))
    assert await read(running) == await read(jobs.start(hang)) == [Failed(Unavailable("gone"))]
    await jobs.join()


async def test_slow_reader_holds_the_upstream_back() -> None:
    emitted: list[int] = []

    async def run(emit: Emit) -> None:
        for n in range(5000):
            await emit([BlockDelta(0, str(n))])
            emitted.append(n)
        await emit([DONE])

    generation = UpstreamJobs().start(run)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(emitted) < 1100
    assert len(await read(generation)) == 5001
