"""Which errors lead to the next model of a route, and what a client reads if no model answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core import errors
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Failed, Finished, Started
from modelyard.gateway.fallbacks import Attempt, leads_on, no_answer
from modelyard.router.router import build_router
from modelyard.router.settings import RouteSettings
from modelyard.scheduler.settings import SchedulerOptions
from tests.gateway.harness import CALLER, GatewayHarness, config, make_request, read_events


@pytest.mark.parametrize(
    ("error", "leads"),
    [
        (errors.Conflict("not loaded"), True),
        (errors.Overloaded("full"), True),
        (errors.Unavailable("lost"), True),
        (errors.Timeout("waited"), True),
        (errors.RateLimited("an upstream's limit", retry_after=1.0), True),
        (errors.Internal("a bug"), True),
        (errors.Incomplete("cut"), True),
        (errors.Unsupported("no images"), True),
        (errors.ContextOverflow(9, 5), True),
        (errors.OutputOverflow(1, 9, 5), True),
        (errors.Forbidden("a remote model"), True),
        (errors.InvalidRequest("wrong for every model"), False),
        (errors.KeyLimited("the key's limit", retry_after=1.0), False),
        (errors.QuotaExceeded("the key's budget"), False),
        (errors.Cancelled("the client left"), False),
        (errors.Unavailable("the server is shutting down", code="shutting_down"), False),
    ],
)
def test_what_leads_to_the_next_model(error: ModelyardError, leads: bool) -> None:
    assert leads_on(error) is leads


def test_the_error_of_all_attempts_names_each_and_can_be_retried() -> None:
    found = no_answer(
        [Attempt("a", errors.Unsupported("no images")), Attempt("b", errors.Overloaded("full", retry_after=7.0))]
    )
    assert isinstance(found, errors.Overloaded)
    assert found.retry_after == 7.0
    assert found.message == "no model of this route could answer: a: no images; b: full"


def test_the_clients_own_error_stays_what_it_is() -> None:
    found = no_answer([Attempt("a", errors.Unavailable("lost")), Attempt("b", errors.InvalidRequest("bad", param="x"))])
    assert isinstance(found, errors.InvalidRequest)
    assert found.param == "x"


# --- the stream -------------------------------------------------------------------------------------------------------


class TwoPlaces(GatewayHarness):
    """The cache `main` with one slot and no queue, then the cache `fast`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(slots=1, options=SchedulerOptions(max_waiting=0), **more)
        route = RouteSettings(match=["x"], cache="main", fallback=["fast"])
        self.gateway.lookup.router = build_router(config().models, config().caches, [route])

    async def open(self) -> Any:
        return self.gateway.start(await self.gateway.prepare(make_request(model="x"), CALLER))


async def test_a_full_queue_leads_to_the_next_model() -> None:
    async with TwoPlaces() as harness:
        first, second = await harness.open(), await harness.open()
        reading = [asyncio.ensure_future(read_events(stream)) for stream in (first, second)]
        for number, cache in enumerate(("main", "fast")):
            generation = await harness.generation(number)
            assert generation.prompt.cache == cache
            generation.finish()
        for events in await asyncio.gather(*reading):
            assert isinstance(events[-1], Finished)
        assert first.prepared.skipped == ()
        assert [(each.model, each.reason) for each in second.prepared.skipped] == [("demo", "server_is_overloaded")]
        first.close()
        second.close()


async def test_nothing_of_a_failed_answer_is_seen_and_its_slot_is_free() -> None:
    async with TwoPlaces() as harness:
        stream = await harness.open()
        reading = asyncio.ensure_future(read_events(stream))
        failing = await harness.generation()
        failing.accept()
        failing.end("error", errors.Internal("broken"))
        (await harness.generation(1)).finish("Hello.")
        events = await reading
        assert [type(event) for event in events].count(Started) == 1
        assert isinstance(events[-1], Finished)
        stream.close()
        assert harness.running == 0


async def test_a_client_that_leaves_between_two_models_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TwoPlaces(start_error=errors.Unavailable("lost")) as harness:
        stream, prepare = await harness.open(), harness.gateway.preparer.attempt

        async def leave(*args: Any, **more: Any) -> Any:
            stream.cancel()
            return await prepare(*args, **more)

        monkeypatch.setattr(harness.gateway.preparer, "attempt", leave)
        (last,) = await read_events(stream)
        assert isinstance(last, Failed)
        assert isinstance(last.error, errors.Cancelled)
        stream.close()
        assert (harness.running, harness.waiting, harness.engine.generations) == (0, 0, [])


async def test_a_server_that_stops_tries_no_other_model() -> None:
    async with TwoPlaces() as harness:
        stream = await harness.open()
        reading = asyncio.ensure_future(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        harness.gateway.running.end(errors.Unavailable("the server is shutting down", code="shutting_down"))
        generation.end("cancelled")
        (last,) = await reading
        assert isinstance(last, Failed)
        assert last.error.code == "shutting_down"
        stream.close()
