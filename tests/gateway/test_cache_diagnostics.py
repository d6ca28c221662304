"""A system prompt that changed and was not cached is a warning with its place, and counted; nothing else is."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from modelyard.core.engine import Accepted
from modelyard.core.request import Caller, Message, Text
from modelyard.telemetry.cache_diagnostics import fingerprint
from tests.gateway.harness import CALLER, GatewayHarness, ids, make_request, read
from tests.telemetry.prometheus_text import sample_values

LONG = "You are a careful helper who answers in short sentences. "


def talk(system: str | None, *more: str) -> tuple[Message, ...]:
    head = (Message("system", (Text(system),)),) if system is not None else ()
    return (*head, *(Message("user", (Text(text),)) for text in more))


async def run(
    stage: GatewayHarness, messages: tuple[Message, ...], divergence: int | None, elsewhere: int = 0
) -> list[int]:
    """The prompt's ids."""
    number = len(stage.engine.jobs)
    caller = Caller(trace=f"t{number}", endpoint="/v1/chat/completions")
    answer = stage.gateway.start(await stage.gateway.prepare(make_request(messages=messages), caller))
    reading = asyncio.create_task(read(answer))
    job = await stage.job(number)
    job.put(Accepted(divergence or 0, divergence, elsewhere=elsewhere))
    job.say("Hello.")
    job.end()
    await reading
    answer.close()
    return job.prompt.ids


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_changed_prompt_is_a_warning_with_token_and_message(caplog: pytest.LogCaptureFixture) -> None:
    one, two = talk(LONG + "It is Monday.", "hi"), talk(LONG + "It is Tuesday.", "hi")
    async with GatewayHarness() as stage:
        before = await run(stage, one, 0)
        after = (await stage.gateway.prepare(make_request(messages=two), CALLER)).prompts[0].ids
        shared = next(at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        await run(stage, two, shared)
        counted = stage.gateway.metrics.render().decode()
    (said,) = warnings(caplog)
    assert f"changed from {fingerprint(one[0])} to {fingerprint(two[0])}" in said
    assert f"token {shared} of {len(after)} at character" in said
    assert "in message 0 (system), is the first that was not cached" in said
    assert re.search(r'system_prompt_changes_total\{cache="\w+"\} 1\.0', counted)


async def test_what_another_sequence_had_and_was_not_copied_is_counted_as_that() -> None:
    async with GatewayHarness() as stage:
        ids = await run(stage, talk(LONG * 4, "hi"), 0)
        await run(stage, talk(LONG * 4, "hi"), 0, elsewhere=len(ids) - 1)
        await run(stage, talk(LONG * 4, "hi"), 0)
        counted = sample_values(stage.gateway.metrics.render(), "cache_requests_total")
    assert {cause: count for (_, cause), count in counted.items()} == {"new_session": 1, "not_copied": 1, "evicted": 1}


async def test_a_prompt_that_stays_is_none_however_the_talk_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness() as stage:
        await run(stage, talk(LONG, "hi"), 0)
        await run(stage, talk(LONG, "hi", "and now?"), 3)
        await run(stage, talk(None, "no system prompt"), 0)
    assert warnings(caplog) == []


async def test_a_changed_prompt_that_another_sequence_holds_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness() as stage:
        await run(stage, talk("Be kind.", "hi"), 0)
        ids = (await stage.gateway.prepare(make_request(messages=talk("Be brief.", "hi there")), CALLER)).prompts[0].ids
        await run(stage, talk("Be brief.", "hi there"), len(ids) - 1)
        await run(stage, talk("Be kind.", "hi"), None)
    assert warnings(caplog) == []


async def test_what_came_of_a_prompt_is_noted_with_it() -> None:
    async with GatewayHarness() as stage:
        await run(stage, talk(LONG, "hi"), 0)
        await run(stage, talk(LONG, "again"), 0)
        (prompts,) = stage.gateway._diagnostics._sessions._prompts.values()
    assert [one.output for one in prompts] == [len(ids("Hello."))] * 2


async def test_keys_and_sessions_that_spell_the_same_together_do_not_meet() -> None:
    async with GatewayHarness() as stage:
        for number, (key, session) in enumerate((("ann", "b/c"), ("ann/b", "c"))):
            caller = Caller(trace=f"t{number}", endpoint="/v1/chat/completions", key=key)
            answer = stage.gateway.start(await stage.gateway.prepare(make_request(session=session), caller))
            reading = asyncio.create_task(read(answer))
            (await stage.job(number)).whole()
            await reading
            answer.close()
        assert len(stage.gateway._diagnostics._sessions) == 2
