"""Jobs that are somebody else's work: each ends once, whatever becomes of its task."""

from __future__ import annotations

import asyncio
import threading

from modelyard.core.errors import Cancelled, Incomplete, Internal, Timeout, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Usage
from modelyard.engines.upstream.jobs import Jobs, Say

DONE = Finished("end", Usage())


async def read(generation: object) -> list[Event]:
    return [event async for batch in generation for event in batch]  # type: ignore[attr-defined]


async def test_what_is_said_is_heard_and_nothing_after_the_end() -> None:
    over: list[bool] = []

    async def work(say: Say) -> None:
        over.append(await say([BlockDelta(0, "a")]))
        over.append(await say([DONE]))
        over.append(await say([BlockDelta(0, "late")]))

    jobs = Jobs()
    assert await read(jobs.start(work)) == [BlockDelta(0, "a"), DONE]
    await jobs.settled()
    assert over == [False, True, True]
    assert len(jobs) == 0


async def test_an_answer_that_is_over_no_longer_counts_though_its_task_goes_on() -> None:
    go = asyncio.Event()

    async def work(say: Say) -> None:
        await say([DONE])
        await go.wait()

    jobs = Jobs()
    assert await read(jobs.start(work)) == [DONE]
    assert len(jobs) == 0
    go.set()
    await jobs.settled()


async def test_a_silent_end_and_every_kind_of_error_become_a_last_word() -> None:
    async def silent(say: Say) -> None:
        pass

    async def ours(say: Say) -> None:
        raise Timeout("late")

    async def foreign(say: Say) -> None:
        raise KeyError("x")

    jobs = Jobs()
    lasts = [(await read(jobs.start(work)))[-1] for work in (silent, ours, foreign)]
    errors = [last.error for last in lasts if isinstance(last, Failed)]
    assert [type(error) for error in errors] == [Incomplete, Timeout, Internal]


async def hang(say: Say) -> None:
    await asyncio.Event().wait()


async def test_cancelling_before_the_first_step_in_the_middle_and_from_a_thread() -> None:
    jobs = Jobs()
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


async def test_a_refusal_ends_what_runs_and_keeps_the_rest_out() -> None:
    jobs = Jobs()
    running = jobs.start(hang)
    await asyncio.sleep(0)
    jobs.refuse(Unavailable("gone"))
    assert await read(running) == await read(jobs.start(hang)) == [Failed(Unavailable("gone"))]
    await jobs.settled()


async def test_a_reader_that_lags_holds_the_upstream_back() -> None:
    said: list[int] = []

    async def work(say: Say) -> None:
        for n in range(5000):
            await say([BlockDelta(0, str(n))])
            said.append(n)
        await say([DONE])

    generation = Jobs().start(work)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(said) < 1100
    assert len(await read(generation)) == 5001
