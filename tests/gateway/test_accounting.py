"""What a request costs its key: finished, failed, cancelled, with several choices, and never read to its end."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from modelyard.accounts.keys import Key
from modelyard.accounts.usage import Price, UsageCounts
from modelyard.core.errors import QuotaExceeded, Unavailable
from modelyard.core.events import BlockDelta, BlockStart, Started, Usage
from modelyard.core.request import Caller
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.output import ChatOutput
from modelyard.gateway.prepared_request import estimated_tokens
from tests.gateway.harness import GatewayHarness, ids, make_request, read_events

CALLER = Caller(trace="t1", endpoint="/v1/chat/completions", key="team")
HELLO = len(ids("Hello."))


def used(gateway: Gateway) -> UsageCounts:
    total = UsageCounts()
    for (_, key, model), counts in gateway.accounts.ledger.pending.items():
        assert (key, model) == ("team", "demo")
        total.add(counts)
    total.last = 0.0
    return total


async def test_a_finished_request_is_counted_with_its_cost() -> None:
    async with GatewayHarness() as harness:
        gateway = harness.gateway
        gateway.accounts.ledger.prices = {"demo": Price(input=1_000_000.0, output=2_000_000.0)}
        prepared = await gateway.prepare(make_request(), CALLER)
        stream = gateway.start(prepared)
        reading = read_events(stream)
        stream_events = asyncio.ensure_future(reading)
        (await harness.generation()).finish()
        await stream_events
        stream.close()
        prompt = len(prepared.prompts[0].ids)
        assert used(gateway) == UsageCounts(1, 0, prompt, 0, HELLO, 0, prompt + 2.0 * HELLO)
        (record,) = gateway.history.recent(1)
        assert record.cost == prompt + 2.0 * HELLO


async def test_a_request_cancelled_in_the_stream_costs_what_was_generated() -> None:
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request(), CALLER)
        stream = harness.gateway.start(prepared)
        started = asyncio.ensure_future(anext(stream))
        generation = await harness.generation()
        generation.accept()
        await started
        generation.write("Hello.")
        await anext(stream)
        stream.cancel()
        generation.end("cancelled")
        await read_events(stream)
        stream.close()
        assert used(harness.gateway) == UsageCounts(1, 0, len(prepared.prompts[0].ids), 0, HELLO)


async def test_a_request_that_no_engine_accepted_is_counted_and_free() -> None:
    async with GatewayHarness(start_error=Unavailable("no")) as harness:
        stream = harness.gateway.start(await harness.gateway.prepare(make_request(), CALLER))
        await read_events(stream)
        stream.close()
        assert used(harness.gateway) == UsageCounts(1, 1)


async def test_a_stream_that_is_closed_before_its_end_is_counted_once() -> None:
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request(), CALLER)
        stream = harness.gateway.start(prepared)
        started = asyncio.ensure_future(anext(stream))
        generation = await harness.generation()
        generation.accept()
        await started
        stream.close()
        stream.close()
        generation.end("cancelled")
        assert used(harness.gateway) == UsageCounts(1, 1, len(prepared.prompts[0].ids))


async def test_several_replies_to_one_prompt_pay_for_it_once() -> None:
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request(n=2), CALLER)
        stream = harness.gateway.start(prepared)
        reading = asyncio.ensure_future(read_events(stream))
        for number in range(2):
            (await harness.generation(number)).finish()
        await reading
        stream.close()
        assert used(harness.gateway) == UsageCounts(1, 0, len(prepared.prompts[0].ids), 0, 2 * HELLO)


async def test_a_key_without_budget_left_is_refused_before_anything_is_done() -> None:
    async with GatewayHarness() as harness:
        ledger = harness.gateway.accounts.ledger
        ledger.set_keys([Key(id="k", name="team", digest=b"", token_budget=10, budget_period="total")], 0.0)
        ledger.add("team", "demo", Usage(10), 0.0)
        with pytest.raises(QuotaExceeded):
            await harness.gateway.prepare(make_request(), CALLER)


async def test_the_usage_of_a_broken_upstream_is_estimated() -> None:
    """It would have told at the end."""
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request("four chars per token"), CALLER)
        output = ChatOutput(replace(prepared, prompts=()))
        output.feed([Started("", "", 0), BlockStart(0, "text"), BlockDelta(0, "a"), BlockDelta(0, "b")])
        output.fail(Unavailable("gone"))
        assert output.usage == Usage(estimated_tokens(prepared.request), 0, 2)
        assert output.usage.prompt == 5
