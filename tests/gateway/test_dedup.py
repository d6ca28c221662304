"""An identical resend reads the answer that runs already; nobody's leaving costs another one anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.errors import Cancelled, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.request import Caller, Message, Sampling, Text
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.dedup import RequestDeduplicator, SharedReader, is_same_request
from modelyard.gateway.gateway import ChoiceStream
from modelyard.gateway.prepared_request import PreparedRequest
from tests.gateway.harness import CALLER, GatewayHarness, make_request, read_events, wait_until

GREEDY = Sampling(temperature=0)


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


class Readers:
    """A stage, the readers that sit at it, and what each has heard."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.streams: list[ChoiceStream | MultiChoiceStream | SharedReader] = []
        self.tasks: list[asyncio.Task[list[Event]]] = []

    async def ask(self, *, caller: Caller = CALLER, **fields: Any) -> int:
        generation = await self.harness.gateway.prepare(make_request(**{"sampling": GREEDY} | fields), caller)
        self.streams.append(stream := self.harness.gateway.start(generation))
        self.tasks.append(asyncio.create_task(self._read(stream)))
        await asyncio.sleep(0)
        return len(self.streams) - 1

    async def _read(self, stream: ChoiceStream | MultiChoiceStream | SharedReader) -> list[Event]:
        try:
            return await read_events(stream)
        finally:
            stream.close()

    @property
    def joined(self) -> float:
        return sum(self.harness.gateway.metrics._joined._series.values())

    @property
    def open(self) -> int:
        return len(self.harness.gateway._dedup)


@asynccontextmanager
async def readers(**harness: Any) -> AsyncIterator[Readers]:
    async with GatewayHarness(**harness) as harness:
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


# --- who joins --------------------------------------------------------------------------------------------------------


async def test_a_resend_reads_the_running_answer_from_its_start() -> None:
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


async def test_a_resend_may_want_the_answer_whole() -> None:
    async with readers() as clients:
        await clients.send(stream=True, include_usage=True)
        await clients.send(stream=False)
        (await clients.harness.generation()).finish()
        assert [text(await task) for task in clients.tasks] == ["Hello.", "Hello."]
        assert clients.joined == 1


async def test_a_resend_joins_in_the_queue() -> None:
    async with readers(slots=1) as clients:
        await clients.send(text="something else")
        await clients.send()
        await clients.send()
        assert (clients.harness.waiting, clients.joined) == (1, 1)
        (await clients.harness.generation()).finish("Other.")
        (await clients.harness.generation(1)).finish()
        assert [text(await task) for task in clients.tasks] == ["Other.", "Hello.", "Hello."]


async def test_several_choices_are_joined_as_one() -> None:
    async with readers() as clients:
        await clients.send(n=2)
        await clients.send(n=2)
        for number, reply in enumerate(("One.", "Two.")):
            (await clients.harness.generation(number)).finish(reply)
        first, second = [await task for task in clients.tasks]
    assert first == second
    assert sorted(text(first)) == sorted("One.Two.")


async def test_what_is_over_is_not_joined() -> None:
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
        # another user, however alike the words are
        ((ANN, {}), (BOB, {}), False),
        ((KEYED, {"sampling": WARM}), (replace(KEYED, key="bob"), {"sampling": WARM}), False),
        # chance decides
        ((ANN, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": Sampling()}), (ANN, {"sampling": Sampling()}), False),
        ((KEYED, {"sampling": WARM}), (OTHER_KEY, {"sampling": WARM}), False),
        ((KEYED, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": WARM}), (KEYED, {"sampling": WARM}), False),
        # something else is asked
        ((ANN, {}), (ANN, {"text": "ho"}), False),
        ((KEYED, {"text": "hi"}), (KEYED, {"text": "ho"}), False),
        ((ANN, {}), (ANN, {"max_tokens": 7}), False),
        ((ANN, {}), (ANN, {"stop": ("END",)}), False),
        ((ANN, {}), (ANN, {"n": 2}), False),
        ((ANN, {}), (ANN, {"session": "s"}), False),
        ((ANN, {}), (ANN, {"model": "demo-haiku"}), False),
        ((ANN, {}), (ANN, {"sampling": Sampling(temperature=0, seed=1)}), False),
        ((ANN, {}), (ANN, {"messages": (Message("user", (Text("hi"),)), Message("user", ()))}), False),
        # a deadline is one client's own
        ((replace(ANN, deadline=4e9), {}), (ANN, {}), False),
        ((ANN, {}), (replace(ANN, deadline=4e9), {}), False),
    ],
)
async def test_only_the_very_same_request_of_the_same_key_joins(
    first: tuple[Caller, Any], second: tuple[Caller, Any], joined: bool
) -> None:
    async with readers() as clients:
        for caller, fields in (first, second):
            await clients.send(caller=caller, **fields)
        assert clients.joined == joined


async def test_two_prompts_that_look_alike_are_told_apart_by_more_than_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever finds the candidate, the whole is compared."""
    monkeypatch.setattr("modelyard.gateway.dedup._key", lambda generation: ("all the same",))
    async with readers() as clients:
        for reply in ("hi", "ho", "hi"):
            await clients.send(text=reply)
        assert clients.joined == 0  # the second has taken the first one's place at the door
        assert clients.open == 1
        for number in range(3):
            (await clients.harness.generation(number)).finish()
        await asyncio.gather(*clients.tasks)
        assert clients.open == 0


# --- who leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 1])
async def test_one_of_two_readers_leaves_and_the_other_reads_on(leaver: int) -> None:
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


async def test_a_reader_who_does_not_fetch_hears_at_once_that_it_left() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.streams[1].cancel()
        assert await _failed(clients.tasks[1])
        assert (generation.is_cancelled, clients.tasks[0].done()) == (False, False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_work_is_cancelled_when_the_last_reader_leaves(order: tuple[int, int]) -> None:
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
        assert clients.joined == 1  # nobody joins what was cancelled
    assert clients.harness.running == 0


async def test_a_task_that_is_cancelled_while_it_fetches_leaves_the_fetching_to_another() -> None:
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


async def test_a_reader_that_closes_while_one_that_left_still_fetches_ends_the_work() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.streams[0].cancel()  # it fetches, and stays until something comes
        clients.tasks[1].cancel()
        await asyncio.wait([clients.tasks[1]])
        assert generation.is_cancelled
        generation.end("cancelled")
        assert await _failed(clients.tasks[0])
    assert (clients.open, clients.harness.running) == (0, 0)


async def test_waiting_readers_leave_the_queue_only_together() -> None:
    async with readers(slots=1) as clients:
        await clients.send(text="something else")
        await clients.send()
        await clients.send()
        clients.streams[1].cancel()
        assert clients.harness.waiting == 1
        clients.streams[2].cancel()
        assert clients.harness.waiting == 0
        assert [await _failed(task) for task in clients.tasks[1:]] == [True, True]


async def test_leaving_with_several_choices_is_told_for_each() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send(n=2)
        clients.streams[1].cancel()
        events = await clients.tasks[1]
    assert [type(event) for event in events] == [Failed, Failed]


# --- how it ends ------------------------------------------------------------------------------------------------------


async def test_an_error_in_the_middle_reaches_every_reader() -> None:
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


async def test_a_server_that_stops_tells_every_reader_why() -> None:
    async with readers() as clients:
        for _ in range(2):
            await clients.send()
        generation = await clients.harness.generation()
        clients.harness.gateway.stop(error := Unavailable("the server stops"))
        generation.end("cancelled")
        assert [(await task)[-1] for task in clients.tasks] == [Failed(error), Failed(error)]


async def test_an_answer_that_grew_too_long_is_not_joined_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_cancelling_and_closing_again_changes_nothing() -> None:
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


def test_a_table_that_nobody_opened_has_no_seat() -> None:
    generation = PreparedRequest(
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
    assert (generation.is_deterministic(), generation.is_shareable(), is_same_request(generation, generation)) == (True, True, True)
    assert RequestDeduplicator().find(generation) is None
