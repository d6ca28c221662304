"""One answer: cancelled in every phase, tried again only where nobody noticed, and its lease given back once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from modelyard.core.errors import Cancelled, Incomplete, Internal, Overloaded, Unavailable
from modelyard.core.events import Event, Failed, Finished, Started, collect_reply
from tests.gateway.stage import Stage, read, until


async def ends(answer: Any, play: Any) -> list[Event]:
    """What is read from here on while the engine lets go of a cancelled job."""
    reading = asyncio.create_task(read(answer))
    await until(lambda: play.is_cancelled)
    play.end("cancelled")
    return await reading


def failures(events: list[Event]) -> list[Any]:
    return [event.error for event in events if isinstance(event, Failed)]


async def test_a_whole_answer_gives_its_place_back_when_it_is_closed() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        (await stage.job()).whole("Hello.")
        assert collect_reply(await reading).text == "Hello."
        assert stage.running == 1
        answer.close()
        assert stage.running == 0


# --- cancelled --------------------------------------------------------------------------------------------------------


async def test_cancelled_in_the_queue_it_never_reaches_the_engine() -> None:
    async with Stage(places=1) as stage:
        holder, waiter = await stage.start(), await stage.start()
        reading = asyncio.create_task(read(waiter))
        await until(lambda: stage.waiting == 1)
        waiter.cancel()
        assert failures(await reading) == [Cancelled("the request was cancelled while it waited")]
        waiter.close()
        assert (stage.waiting, stage.running, stage.engine.jobs) == (0, 1, [])
        holder.close()
        assert stage.running == 0


async def test_cancelled_before_it_was_read_it_never_reaches_the_engine() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        answer.cancel()
        events = await read(answer)
        assert [type(event) for event in events] == [Failed]
        answer.close()
        assert (stage.running, stage.engine.jobs) == (0, [])


async def test_cancelled_in_prefill_it_waits_for_the_engine_to_let_go() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(anext(answer))
        play = await stage.job()
        play.accept()
        _, events = await reading
        assert [type(event) for event in events] == [Started]
        answer.cancel()
        assert stage.running == 1
        assert [type(error) for error in failures(await ends(answer, play))] == [Cancelled]
        answer.close()
        assert stage.running == 0


async def test_cancelled_in_the_stream_it_ends_in_one_failure() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(anext(answer))
        play = await stage.job()
        play.accept()
        play.say("Hello")
        await reading
        answer.cancel()
        answer.cancel()
        assert [type(error) for error in failures(await ends(answer, play))] == [Cancelled]
        answer.close()
        assert stage.running == 0


async def test_whoever_cancels_may_say_why() -> None:
    why = Unavailable("the server is shutting down")
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        answer.cancel(why)
        play.end("cancelled")
        assert failures(await reading) == [why]
        answer.close()


async def test_cancelled_after_its_end_nothing_more_is_said() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        (await stage.job()).whole()
        assert isinstance((await reading)[-1], Finished)
        answer.cancel()
        assert await read(answer) == []
        answer.close()
        assert stage.running == 0


# --- closed before its end --------------------------------------------------------------------------------------------


async def test_a_reader_that_leaves_frees_the_place_when_the_engine_has() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(anext(answer))
        play = await stage.job()
        play.accept()
        await reading
        answer.close()
        answer.close()
        await until(lambda: play.is_cancelled)
        assert stage.running == 1
        play.end("cancelled")
        await until(lambda: stage.running == 0)


async def test_after_a_stop_string_the_place_is_free_when_the_engine_says_so() -> None:
    async with Stage() as stage:
        answer = await stage.start(stop=("STOP",))
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        play.accept()
        play.say("one STOP two")
        assert collect_reply(await reading).text == "one "
        answer.close()
        assert play.is_cancelled
        assert stage.running == 1
        play.say("three")
        play.end("length")
        await until(lambda: stage.running == 0)


# --- tried again ------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_lost_before_content_is_asked_once_more() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        first = await stage.job()
        first.accept()
        first.end("error", Unavailable("lost"))
        (await stage.job(1)).whole("Here.")
        events = await reading
        assert collect_reply(events).text == "Here."
        assert sum(isinstance(event, Started) for event in events) == 1
        assert stage.running == 1
        answer.close()
        assert stage.running == 0


async def test_an_engine_that_is_lost_twice_is_not_asked_a_third_time() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        for number in range(2):
            (await stage.job(number)).end("error", Unavailable(f"lost {number}"))
        assert failures(await reading) == [Unavailable("lost 1")]
        answer.close()
        assert (len(stage.engine.jobs), stage.running) == (2, 0)


async def test_after_content_nothing_is_tried_again() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        play.accept()
        play.say("Half")
        play.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        answer.close()
        assert (len(stage.engine.jobs), stage.running) == (1, 0)


@pytest.mark.parametrize("error", [Internal("out of memory", id="x"), Overloaded("busy")])
async def test_only_a_lost_engine_is_worth_a_second_try(error: Any) -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        (await stage.job()).end("error", error)
        assert failures(await reading) == [error]
        answer.close()
        assert (len(stage.engine.jobs), stage.running) == (1, 0)


async def test_nobody_tries_again_for_a_client_that_left() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        answer.cancel()
        play.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        answer.close()
        assert (len(stage.engine.jobs), stage.running) == (1, 0)


# --- engines that break their word ------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [False, True])
async def test_a_stream_without_a_last_word_is_one_failure(content: bool) -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        play.accept()
        if content:
            play.say("Half")
        play.close()
        assert [type(error) for error in failures(await reading)] == [Incomplete]
        answer.close()
        await until(lambda: stage.running == 0)


async def test_an_engine_that_raises_is_one_failure_and_no_lost_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Stage(fault=ZeroDivisionError("secret")) as stage:
        answer = await stage.start()
        (error,) = failures(await read(answer))
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        answer.close()
        assert stage.running == 0


async def test_a_stream_that_raises_is_one_failure_and_no_lost_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        play = await stage.job()
        monkeypatch.setattr(type(play), "__anext__", _breaks)
        play.accept()
        (error,) = failures(await reading)
        assert isinstance(error, Internal)
        answer.close()
        await until(lambda: stage.running == 0)


async def _breaks(_: object) -> None:
    raise ZeroDivisionError("secret")


async def test_the_last_word_tells_what_every_part_of_the_way_took() -> None:
    async with Stage() as stage:
        answer = await stage.start()
        reading = asyncio.create_task(read(answer))
        (await stage.job()).whole()
        last = (await reading)[-1]
        answer.close()
        assert isinstance(last, Finished)
        times = last.timings
        assert None not in (times.queue, times.tokenize, times.first_token, times.decode)
        assert times.backend is not None
        assert times.engine is not None
        assert 0 <= times.backend <= times.engine
        assert times.total == times.engine, "nobody said when the request came in"
