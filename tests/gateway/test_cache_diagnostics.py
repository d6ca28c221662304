"""A changed system prompt that was not cached is logged as a warning with its position and counted; nothing else is."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from modelyard.core.engine import Accepted
from modelyard.core.request import Caller, Message, Text
from modelyard.telemetry.cache_diagnostics import fingerprint
from tests.gateway.harness import CALLER, GatewayHarness, ids, make_request, read_events
from tests.telemetry.prometheus_text import sample_values

LONG = "You are a careful helper who answers in short sentences. "


def conversation(system: str | None, *more: str) -> tuple[Message, ...]:
    head = (Message("system", (Text(system),)),) if system is not None else ()
    return (*head, *(Message("user", (Text(text),)) for text in more))


async def run(
    harness: GatewayHarness, messages: tuple[Message, ...], divergence: int | None, elsewhere: int = 0
) -> list[int]:
    """Returns the ids of the prompt."""
    index = len(harness.engine.generations)
    caller = Caller(trace=f"t{index}", endpoint="/v1/chat/completions")
    stream = harness.gateway.start(await harness.gateway.prepare(make_request(messages=messages), caller))
    reading = asyncio.create_task(read_events(stream))
    generation = await harness.generation(index)
    generation.put(Accepted(divergence or 0, divergence, elsewhere=elsewhere))
    generation.write("Hello.")
    generation.end()
    await reading
    stream.close()
    return generation.prompt.ids


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_changed_system_prompt_is_a_warning_with_token_and_message(caplog: pytest.LogCaptureFixture) -> None:
    one, two = conversation(LONG + "It is Monday.", "hi"), conversation(LONG + "It is Tuesday.", "hi")
    async with GatewayHarness() as harness:
        before = await run(harness, one, 0)
        after = (await harness.gateway.prepare(make_request(messages=two), CALLER)).prompts[0].ids
        shared = next(position for position, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        await run(harness, two, shared)
        counted = harness.gateway.metrics.render().decode()
    (warning,) = warnings(caplog)
    assert f"changed from {fingerprint(one[0])} to {fingerprint(two[0])}" in warning
    assert f"token {shared} of {len(after)} at character" in warning
    assert "in message 0 (system), is the first that was not cached" in warning
    assert re.search(r'system_prompt_changes_total\{cache="\w+"\} 1\.0', counted)


async def test_a_prefix_of_another_sequence_that_was_not_copied_is_counted() -> None:
    async with GatewayHarness() as harness:
        ids = await run(harness, conversation(LONG * 4, "hi"), 0)
        await run(harness, conversation(LONG * 4, "hi"), 0, elsewhere=len(ids) - 1)
        await run(harness, conversation(LONG * 4, "hi"), 0)
        counted = sample_values(harness.gateway.metrics.render(), "cache_requests_total")
    assert {cause: count for (_, cause), count in counted.items()} == {"new_session": 1, "not_copied": 1, "evicted": 1}


async def test_an_unchanged_system_prompt_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation(LONG, "hi"), 0)
        await run(harness, conversation(LONG, "hi", "and now?"), 3)
        await run(harness, conversation(None, "no system prompt"), 0)
    assert warnings(caplog) == []


async def test_a_changed_prompt_that_another_sequence_has_cached_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation("Be kind.", "hi"), 0)
        ids = (
            (await harness.gateway.prepare(make_request(messages=conversation("Be brief.", "hi there")), CALLER))
            .prompts[0]
            .ids
        )
        await run(harness, conversation("Be brief.", "hi there"), len(ids) - 1)
        await run(harness, conversation("Be kind.", "hi"), None)
    assert warnings(caplog) == []


async def test_the_output_tokens_are_recorded_with_the_prompt() -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation(LONG, "hi"), 0)
        await run(harness, conversation(LONG, "again"), 0)
        (prompts,) = harness.gateway._diagnostics._sessions._prompts.values()
    assert [one.output for one in prompts] == [len(ids("Hello."))] * 2


async def test_key_and_session_are_separate_parts_of_the_session_id() -> None:
    async with GatewayHarness() as harness:
        for index, (key, session) in enumerate((("ann", "b/c"), ("ann/b", "c"))):
            caller = Caller(trace=f"t{index}", endpoint="/v1/chat/completions", key=key)
            stream = harness.gateway.start(await harness.gateway.prepare(make_request(session=session), caller))
            reading = asyncio.create_task(read_events(stream))
            (await harness.generation(index)).finish()
            await reading
            stream.close()
        assert len(harness.gateway._diagnostics._sessions) == 2
