"""Deduplication: an identical request reads the running reply, and a reader that leaves does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.errors import BY_ADMINISTRATOR, Cancelled, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.request import Caller, Message, Sampling, Text
from modelyard.gateway.dedup import RequestDeduplicator, is_same_request
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.stream import Stream
from tests.gateway.harness import CALLER, GatewayHarness, make_request, read_events, wait_until

GREEDY = Sampling(temperature=0)


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


class Readers:
    """A gateway and its clients: the stream of each, and a task that reads it."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.streams: list[Stream] = []
        self.tasks: list[asyncio.Task[list[Event]]] = []

    async def send(self, *, caller: Caller = CALLER, **fields: Any) -> int:
        prepared = await self.harness.gateway.prepare(make_request(**{"sampling": GREEDY} | fields), caller)
        self.streams.append(stream := self.harness.gateway.start(prepared))
        self.tasks.append(asyncio.create_task(self._read(stream)))
        await asyncio.sleep(0)
        return len(self.streams) - 1

    async def _read(self, stream: Stream) -> list[Event]:
        try:
            return await read_events(stream)
        finally:
            stream.close()

    @property
    def joined(self) -> float:
        return sum(self.harness.gateway.metrics.joined._series.values())

    @property
    def open(self) -> int:
        return len(self.harness.gateway.running.dedup)


@asynccontextmanager
async def readers(**options: Any) -> AsyncIterator[Readers]:
    async with GatewayHarness(**options) as harness:
        clients = Readers(harness)
        try:
            yield clients
        finally:
            for task in clients.tasks:
                task.cancel()
            await asyncio.gather(*clients.tasks, return_exceptions=True)
            for generation in harness.engine.generations:
                if not generation.closed:
                    generation.end()


# --- joining ----------------------------------------------------------------------------------------------------------


async def test_a_resend_reads_the_running_reply_from_its_start() -> None:
    async with readers() as clients:
        await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        generation.write("Hello")
        await wait_until(lambda: not generation._items)
        await clients.send()
        generation.write(" there")
        generation.end()
        first, second = [await task for task in clients.tasks]
    assert first == second
    assert (text(first), clients.joined, len(clients.harness.engine.generations)) == ("Hello there", 1, 1)
    assert (clients.open, clients.harness.running) == (0, 0)


async def test_a_resend_can_be_unstreamed() -> None:
    async with readers() as clients:
        await clients.send(stream=True, include_usage=True)
        await clients.send(stream=False)
        (await clients.harness.generation()).finish()
        assert [text(await task) for task in clients.tasks] == ["Hello.", "Hello."]
        assert clients.joined == 1


async def test_a_resend_joins_a_queued_request() -> None:
    async with readers(slots=1) as clients:
        await clients.send(text="something else")
        await clients.send()
        await clients.send()
        assert (clients.harness.waiting, clients.joined) == (1, 1)
        (await clients.harness.generation()).finish("Other.")
        (await clients.harness.generation(1)).finish()
        assert [text(await task) for task in clients.tasks] == ["Other.", "Hello.", "Hello."]


async def test_a_resend_joins_a_request_with_several_choices() -> None:
    async with readers() as clients:
        await clients.send(n=2)
        await clients.send(n=2)
        for number, reply in enumerate(("One.", "Two.")):
            (await clients.harness.generation(number)).finish(reply)
        first, second = [await task for task in clients.tasks]
    assert first == second
    assert sorted(text(first)) == sorted("One.Two.")


async def test_a_finished_request_is_not_joined() -> None:
    async with readers() as clients:
        await clients.send()
        (await clients.harness.generation()).finish()
        await clients.tasks[0]
        await clients.send()
        (await clients.harness.generation(1)).finish("Again.")
        assert text(await clients.tasks[1]) == "Again."
        assert clients.joined == 0


ANN, BOB = (Caller(trace="t", endpoint="/v1/messages", key=key) for key in ("ann", "bob"))
KEYED, OTHER_KEY = (replace(ANN, idempotency=name) for name in ("one", "two"))
WARM = Sampling(temperature=0.8)


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ((ANN, {}), (ANN, {}), True),
        ((ANN, {}), (replace(ANN, trace="u", arrived=1.0), {}), True),
        (
            (ANN, {"sampling": Sampling(temperature=0.8, seed=7)}),
            (ANN, {"sampling": WARM.over(Sampling(seed=7))}),
            True,
        ),
        ((ANN, {"sampling": Sampling(top_k=1)}), (ANN, {"sampling": Sampling(top_k=1)}), True),
        ((KEYED, {"sampling": WARM}), (KEYED, {"sampling": WARM}), True),
        ((KEYED, {}), (OTHER_KEY, {}), True),
        # another user
        ((ANN, {}), (BOB, {}), False),
        ((KEYED, {"sampling": WARM}), (replace(KEYED, key="bob"), {"sampling": WARM}), False),
        # not deterministic
        ((ANN, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": Sampling()}), (ANN, {"sampling": Sampling()}), False),
        ((KEYED, {"sampling": WARM}), (OTHER_KEY, {"sampling": WARM}), False),
        ((KEYED, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": WARM}), (KEYED, {"sampling": WARM}), False),
        # a different request
        ((ANN, {}), (ANN, {"text": "ho"}), False),
        ((KEYED, {"text": "hi"}), (KEYED, {"text": "ho"}), False),
        ((ANN, {}), (ANN, {"max_tokens": 7}), False),
        ((ANN, {}), (ANN, {"stop": ("END",)}), False),
        ((ANN, {}), (ANN, {"n": 2}), False),
        ((ANN, {}), (ANN, {"session": "s"}), False),
        ((ANN, {}), (ANN, {"model": "demo-haiku"}), False),
        ((ANN, {}), (ANN, {"sampling": Sampling(temperature=0, seed=1)}), False),
        ((ANN, {}), (ANN, {"messages": (Message("user", (Text("hi"),)), Message("user", ()))}), False),
        # a deadline belongs to one client
        ((replace(ANN, deadline=4e9), {}), (ANN, {}), False),
        ((ANN, {}), (replace(ANN, deadline=4e9), {}), False),
    ],
)
async def test_only_an_identical_request_of_the_same_key_joins(
    first: tuple[Caller, Any], second: tuple[Caller, Any], joined: bool
) -> None:
    async with readers() as clients:
        for caller, fields in (first, second):
            await clients.send(caller=caller, **fields)
        assert clients.joined == joined


async def test_requests_with_the_same_hash_key_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key only finds a candidate; then the whole requests are compared."""
    monkeypatch.setattr("modelyard.gateway.dedup._key", lambda generation: ("all the same",))
    async with readers() as clients:
        for reply in ("hi", "ho", "hi"):
            await clients.send(text=reply)
        assert clients.joined == 0  # the second replaced the first in the table
        assert clients.open == 1
        for number in range(3):
            (await clients.harness.generation(number)).finish()
        await asyncio.gather(*clients.tasks)
        assert clients.open == 0


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 1])
async def test_one_of_two_readers_cancels_and_the_other_reads_on(leaver: int) -> None:
    async with readers() as clients:
        await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        await clients.send()
        generation.write("Hello")
        await wait_until(lambda: not generation._items)
        clients.streams[leaver].cancel()
        generation.write(" there")
        assert await _failed(clients.tasks[leaver])
        assert not generation.is_cancelled
        generation.end()
        remaining = await clients.tasks[1 - leaver]
        assert (text(remaining), isinstance(remaining[-1], Finished)) == ("Hello there", True)
    assert (clients.open, clients.harness.running) == (0, 0)


async def test_a_reader_that_does_not_fetch_is_cancelled_at_once() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.streams[1].cancel()
        assert await _failed(clients.tasks[1])
        assert (generation.is_cancelled, clients.tasks[0].done()) == (False, False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_generation_is_cancelled_with_its_last_reader(order: tuple[int, int]) -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        clients.streams[order[0]].cancel()
        assert not generation.is_cancelled
        clients.streams[order[1]].cancel()
        assert generation.is_cancelled
        generation.end("cancelled")
        assert [await _failed(task) for task in clients.tasks] == [True, True]
        await clients.send()
        assert clients.joined == 1  # a cancelled reply is not joined
    assert clients.harness.running == 0


async def test_another_reader_fetches_if_the_fetching_task_is_cancelled() -> None:
    async with readers() as clients:
        for _ in range(3):
            await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        clients.tasks[0].cancel()
        await asyncio.wait([clients.tasks[0]])
        assert not generation.is_cancelled
        generation.write("Hello")
        generation.end()
        assert [text(await task) for task in clients.tasks[1:]] == ["Hello", "Hello"]
    assert clients.harness.running == 0


async def test_the_generation_is_cancelled_if_only_a_cancelled_reader_fetches() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.streams[0].cancel()  # it fetches and stays until a batch arrives
        clients.tasks[1].cancel()
        await asyncio.wait([clients.tasks[1]])
        assert generation.is_cancelled
        generation.end("cancelled")
        assert await _failed(clients.tasks[0])
    assert (clients.open, clients.harness.running) == (0, 0)


async def test_a_queued_request_is_removed_with_its_last_reader() -> None:
    async with readers(slots=1) as clients:
        await clients.send(text="something else")
        await clients.send()
        await clients.send()
        clients.streams[1].cancel()
        assert clients.harness.waiting == 1
        clients.streams[2].cancel()
        assert clients.harness.waiting == 0
        assert [await _failed(task) for task in clients.tasks[1:]] == [True, True]


async def test_cancelling_several_choices_gives_one_failure_each() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send(n=2)
        clients.streams[1].cancel()
        events = await clients.tasks[1]
    assert [type(event) for event in events] == [Failed, Failed]


# --- ending -----------------------------------------------------------------------------------------------------------


async def test_an_error_reaches_every_reader() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        generation.write("Hel")
        await wait_until(lambda: not generation._items)
        generation.end("error", Unavailable("segmentation fault"))
        first, second = [await task for task in clients.tasks]
    assert first == second
    assert (text(first), isinstance(first[-1], Failed)) == ("Hel", True)
    assert clients.open == 0


async def test_stop_reaches_every_reader_with_its_reason() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.harness.gateway.running.end(error := Unavailable("the server stops"))
        generation.end("cancelled")
        assert [(await task)[-1] for task in clients.tasks] == [Failed(error), Failed(error)]


async def test_a_reply_that_grew_too_long_is_neither_joined_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.gateway.dedup._MAX_BATCHES", 3)
    async with readers() as clients:
        await clients.send()
        generation = await clients.harness.generation()
        generation.accept()
        for _ in range(6):
            generation.write("a b")
            await wait_until(lambda: not generation._items)
        await asyncio.sleep(0)
        assert clients.open == 0
        shared = clients.streams[0]._shared  # type: ignore[union-attr]
        assert len(shared.batches) == 0
        await clients.send()
        assert clients.joined == 0
        generation.end()
        assert text(await clients.tasks[0]) == "a b" * 6


async def test_cancel_and_close_are_idempotent() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        for _ in range(2):
            clients.streams[1].cancel()
        await clients.tasks[1]
        clients.streams[1].close()
        clients.streams[1].cancel()
        (await clients.harness.generation()).finish()
        assert text(await clients.tasks[0]) == "Hello."


async def _failed(task: asyncio.Task[list[Event]]) -> bool:
    last = (await task)[-1]
    return isinstance(last, Failed) and isinstance(last.error, Cancelled)


def test_an_empty_deduplicator_finds_nothing() -> None:
    prepared = PreparedRequest(
        request=make_request(),
        caller=CALLER,
        target=None,  # type: ignore[arg-type]
        model=None,  # type: ignore[arg-type]
        prompts=(),
        sampling=GREEDY,
        constraint=None,
        created=0,
        tokenize_s=0.0,
    )
    assert (prepared.is_deterministic(), prepared.is_shareable(), is_same_request(prepared, prepared)) == (
        True,
        True,
        True,
    )
    assert RequestDeduplicator().find(prepared) is None


async def test_an_administrator_cancels_a_request_that_joined_and_the_first_one_goes_on() -> None:
    async with readers() as clients:
        await clients.send()
        joined = await clients.send(caller=replace(CALLER, trace="joined"))
        reason = Cancelled(BY_ADMINISTRATOR)
        assert clients.harness.gateway.running.cancel("joined", reason) == 1
        assert (await clients.tasks[joined])[-1] == Failed(reason)
        assert not clients.tasks[0].done()
        assert clients.harness.gateway.running.cancel("joined", reason) == 0  # it has ended
