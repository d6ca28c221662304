"""One generation: cancellation, retries, release of the lease, and its times."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import msgspec
import pytest

from modelyard.core.engine import Capabilities, Progress, Tokens
from modelyard.core.errors import (
    ENGINE_DIED,
    Cancelled,
    Incomplete,
    Internal,
    Overloaded,
    Unavailable,
)
from modelyard.core.events import (
    Event,
    Failed,
    Finished,
    Started,
    Timings,
    collect_reply,
)
from modelyard.core.tokenizer import IdLogprob
from modelyard.gateway.stream import gateway_timings
from tests.gateway.harness import (
    GatewayHarness,
    ids,
    read_events,
    wait_until,
)


async def read_until_cancelled(stream: Any, generation: Any) -> list[Event]:
    """The remaining events; the engine ends its generation after the cancel."""
    reading = asyncio.create_task(read_events(stream))
    await wait_until(lambda: generation.is_cancelled)
    generation.end("cancelled")
    return await reading


def failures(events: list[Event]) -> list[Any]:
    return [event.error for event in events if isinstance(event, Failed)]


async def test_a_complete_reply_releases_its_slot_when_closed() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish("Hello.")
        assert collect_reply(await reading).text == "Hello."
        assert harness.running == 1
        stream.close()
        assert harness.running == 0


# --- cancelled --------------------------------------------------------------------------------------------------------


async def test_a_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    async with GatewayHarness(slots=1) as harness:
        holder, waiter = await harness.start(), await harness.start()
        reading = asyncio.create_task(read_events(waiter))
        await wait_until(lambda: harness.waiting == 1)
        waiter.cancel()
        assert failures(await reading) == [Cancelled("the request was cancelled while it waited")]
        waiter.close()
        assert (harness.waiting, harness.running, harness.engine.generations) == (0, 1, [])
        holder.close()
        assert harness.running == 0


async def test_a_request_cancelled_before_it_is_read_never_reaches_the_engine() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        stream.cancel()
        events = await read_events(stream)
        assert [type(event) for event in events] == [Failed]
        stream.close()
        assert (harness.running, harness.engine.generations) == (0, [])


async def test_a_request_cancelled_in_prefill_keeps_its_slot_until_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        _, events = await reading
        assert [type(event) for event in events] == [Started]
        stream.cancel()
        assert harness.running == 1
        assert [type(error) for error in failures(await read_until_cancelled(stream, generation))] == [Cancelled]
        stream.close()
        assert harness.running == 0


async def test_a_request_cancelled_twice_in_the_stream_ends_with_one_failure() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("Hello")
        await reading
        stream.cancel()
        stream.cancel()
        assert [type(error) for error in failures(await read_until_cancelled(stream, generation))] == [Cancelled]
        stream.close()
        assert harness.running == 0


async def test_cancel_accepts_a_reason() -> None:
    error = Unavailable("the server is shutting down")
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        stream.cancel(error)
        generation.end("cancelled")
        assert failures(await reading) == [error]
        stream.close()


async def test_a_cancel_after_the_end_adds_no_event() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish()
        assert isinstance((await reading)[-1], Finished)
        stream.cancel()
        assert await read_events(stream) == []
        stream.close()
        assert harness.running == 0


# --- closed before its end --------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_the_slot_when_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        await reading
        stream.close()
        stream.close()
        await wait_until(lambda: generation.is_cancelled)
        assert harness.running == 1
        generation.end("cancelled")
        await wait_until(lambda: harness.running == 0)


async def test_after_a_stop_string_the_slot_is_free_when_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(stop=("STOP",))
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("one STOP two")
        assert collect_reply(await reading).text == "one "
        stream.close()
        assert generation.is_cancelled
        assert harness.running == 1
        generation.write("three")
        generation.end("length")
        await wait_until(lambda: harness.running == 0)


# --- retries ----------------------------------------------------------------------------------------------------------


DIED = Unavailable("the process was killed by SIGSEGV", code=ENGINE_DIED)


async def test_a_request_is_retried_once_if_the_engine_is_lost_before_content() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        first = await harness.generation()
        first.accept()
        first.end("error", Unavailable("lost"))
        (await harness.generation(1)).finish("Here.")
        events = await reading
        assert collect_reply(events).text == "Here."
        assert sum(isinstance(event, Started) for event in events) == 1
        assert harness.running == 1
        stream.close()
        assert harness.running == 0


async def test_a_request_is_not_retried_twice() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        for number in range(2):
            (await harness.generation(number)).end("error", Unavailable(f"lost {number}"))
        assert failures(await reading) == [Unavailable("lost 1")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (2, 0)


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_request_that_may_have_killed_the_engine_is_not_retried(is_accepted: bool) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        if is_accepted:
            generation.accept()
        generation.end("error", DIED)
        assert failures(await reading) == [DIED]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


async def test_a_request_that_ran_before_the_one_that_killed_the_engine_is_retried() -> None:
    async with GatewayHarness() as harness:
        earlier, later = await harness.start(), await harness.start()
        reading = [asyncio.create_task(read_events(stream)) for stream in (earlier, later)]
        first, second = await harness.generation(), await harness.generation(1)
        first.accept()
        second.accept()
        for generation in (second, first):
            generation.end("error", DIED)
        (await harness.generation(2)).finish("Here.")
        assert collect_reply(await reading[0]).text == "Here."
        assert failures(await reading[1]) == [DIED]
        earlier.close()
        later.close()


async def test_a_request_that_outlasted_the_later_ones_may_have_killed_the_engine() -> None:
    async with GatewayHarness() as harness:
        earlier, later = await harness.start(), await harness.start()
        reading = [asyncio.create_task(read_events(stream)) for stream in (earlier, later)]
        first, second = await harness.generation(), await harness.generation(1)
        first.accept()
        second.finish()
        assert collect_reply(await reading[1]).text == "Hello."
        first.end("error", DIED)
        await wait_until(lambda: reading[0].done() or len(harness.engine.generations) > 2)
        assert len(harness.engine.generations) == 2
        assert failures(await reading[0]) == [DIED]
        earlier.close()
        later.close()


async def test_a_request_for_an_engine_that_was_dead_already_is_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        lost, harness.engine.lost = harness.engine.lost, asyncio.get_running_loop().create_future()
        harness.engine.lost.set_result(DIED)  # after the lease was granted; the scheduler watches the other one
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        harness.engine.lost = lost  # as the engine of the second attempt is
        generation.end("error", DIED)
        (await harness.generation(1)).finish("Here.")
        assert collect_reply(await reading).text == "Here."
        stream.close()


async def test_a_request_with_content_is_not_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("Half")
        generation.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


@pytest.mark.parametrize("error", [Internal("out of memory", id="x"), Overloaded("busy")])
async def test_other_errors_are_not_retried(error: Any) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).end("error", error)
        assert failures(await reading) == [error]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


async def test_a_cancelled_request_is_not_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        stream.cancel()
        generation.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


# --- engines that violate the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [False, True])
async def test_a_stream_without_an_end_is_one_failure(content: bool) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        if content:
            generation.write("Half")
        generation.close()
        assert [type(error) for error in failures(await reading)] == [Incomplete]
        stream.close()
        await wait_until(lambda: harness.running == 0)


async def test_an_engine_that_raises_is_one_failure_and_leaks_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with GatewayHarness(start_error=ZeroDivisionError("secret")) as harness:
        stream = await harness.start()
        (error,) = failures(await read_events(stream))
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        stream.close()
        assert harness.running == 0


async def test_a_stream_that_raises_is_one_failure_and_leaks_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        monkeypatch.setattr(type(generation), "__anext__", _breaks)
        generation.accept()
        (error,) = failures(await reading)
        assert isinstance(error, Internal)
        stream.close()
        await wait_until(lambda: harness.running == 0)


async def _breaks(_: object) -> None:
    raise ZeroDivisionError("secret")


async def test_the_last_event_has_the_timings() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish()
        last = (await reading)[-1]
        stream.close()
        assert isinstance(last, Finished)
        times = last.timings
        assert None not in (times.queue, times.tokenize, times.first_token, times.decode)
        assert times.backend is not None
        assert times.engine is not None
        assert 0 <= times.backend <= times.engine
        assert times.total == times.engine, "the arrival time is unknown"


async def test_echo_of_token_ids_is_their_text_with_log_probabilities() -> None:
    async with GatewayHarness() as gateway:
        prompt, stop = ids("one two"), IdLogprob(7, -0.5)
        gateway.engine.info = msgspec.structs.replace(
            gateway.engine.info, capabilities=Capabilities(logprobs=True, prompt_logprobs=True)
        )
        asked = {"messages": (), "echo": True, "logprobs": 0, "prompt_logprobs": 0}
        reading = asyncio.create_task(read_events(await gateway.start(prompts=(tuple(prompt),), **asked)))
        generation = await gateway.generation()
        assert generation.prompt.prompt_logprobs == 0
        generation.accept()
        generation.put(Progress(len(prompt), len(prompt), [IdLogprob(token, -1.0) for token in prompt[1:]]))
        generation.put(Tokens([], [stop]))
        generation.end()
        reply = collect_reply(await reading)
        assert reply.started.prompt == "one two"
        tokens = reply.started.prompt_logprobs
        assert "".join(token.token for token in tokens) == "one two"
        assert math.isnan(tokens[0].logprob)
        assert {token.logprob for token in tokens[1:]} == {-1.0}
        assert [token.logprob for block in reply.blocks for token in block.logprobs] == [-0.5]
        assert reply.text == ""


# --- timings ----------------------------------------------------------------------------------------------------------


MEASURED: dict[str, Any] = {
    "now": 15.0,
    "arrived": 9.5,
    "started": 10.0,
    "engine_started": 12.0,
    "first_output": 13.0,
    "queue_s": 1.75,
    "tokenize_s": 0.25,
    "remote": False,
}


def test_timings_of_the_engine_are_kept_and_completed() -> None:
    engine = Timings(prefill=0.5, first_token=0.6, decode=2.0, backend=2.6, total=2.6)
    assert gateway_timings(engine, **MEASURED) == Timings(
        queue=1.75, tokenize=0.25, prefill=0.5, first_token=0.6, decode=2.0, backend=3.0, engine=5.25, total=5.5
    )


def test_an_engine_without_timings_is_timed_by_the_gateway() -> None:
    timings = gateway_timings(Timings(), **MEASURED)
    assert (timings.prefill, timings.first_token, timings.decode) == (None, 1.0, 2.0)


@pytest.mark.parametrize("change", [{"remote": True}, {"first_output": None}], ids=["remote", "no output"])
def test_an_unknown_first_token_time_is_not_guessed(change: dict[str, Any]) -> None:
    timings = gateway_timings(Timings(), **MEASURED | change)
    assert (timings.first_token, timings.decode, timings.backend) == (None, None, 3.0)


def test_without_an_arrival_time_the_total_starts_in_the_gateway() -> None:
    assert gateway_timings(Timings(), now=15.0, started=10.0, tokenize_s=0.25, remote=False) == Timings(
        queue=0.0, tokenize=0.25, engine=5.25, total=5.25
    )
