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
from tests.gateway.harness import CALLER, GatewayHarness, make_request, read, until

GREEDY = Sampling(temperature=0)


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockDelta))


class Table:
    """A stage, the readers that sit at it, and what each has heard."""

    def __init__(self, stage: GatewayHarness) -> None:
        self.stage = stage
        self.answers: list[ChoiceStream | MultiChoiceStream | SharedReader] = []
        self.reading: list[asyncio.Task[list[Event]]] = []

    async def ask(self, *, caller: Caller = CALLER, **fields: Any) -> int:
        job = await self.stage.gateway.prepare(make_request(**{"sampling": GREEDY} | fields), caller)
        self.answers.append(answer := self.stage.gateway.start(job))
        self.reading.append(asyncio.create_task(self._read(answer)))
        await asyncio.sleep(0)
        return len(self.answers) - 1

    async def _read(self, answer: ChoiceStream | MultiChoiceStream | SharedReader) -> list[Event]:
        try:
            return await read(answer)
        finally:
            answer.close()

    @property
    def joined(self) -> float:
        return sum(self.stage.gateway.metrics._joined._series.values())

    @property
    def open(self) -> int:
        return len(self.stage.gateway._dedup)


@asynccontextmanager
async def table(**stage: Any) -> AsyncIterator[Table]:
    async with GatewayHarness(**stage) as made:
        seated = Table(made)
        try:
            yield seated
        finally:
            for task in seated.reading:
                task.cancel()
            await asyncio.gather(*seated.reading, return_exceptions=True)
            for job in made.engine.jobs:
                if not job.closed:
                    job.end()


# --- who joins --------------------------------------------------------------------------------------------------------


async def test_a_resend_reads_the_running_answer_from_its_start() -> None:
    async with table() as at:
        await at.ask()
        job = await at.stage.job()
        job.accept()
        job.say("Hello")
        await until(lambda: not job._items)
        await at.ask()
        job.say(" there")
        job.end()
        first, second = [await task for task in at.reading]
    assert first == second
    assert (text(first), at.joined, len(at.stage.engine.jobs)) == ("Hello there", 1, 1)
    assert (at.open, at.stage.running) == (0, 0)


async def test_a_resend_may_want_the_answer_whole() -> None:
    async with table() as at:
        await at.ask(stream=True, include_usage=True)
        await at.ask(stream=False)
        (await at.stage.job()).whole()
        assert [text(await task) for task in at.reading] == ["Hello.", "Hello."]
        assert at.joined == 1


async def test_a_resend_joins_in_the_queue() -> None:
    async with table(places=1) as at:
        await at.ask(text="something else")
        await at.ask()
        await at.ask()
        assert (at.stage.waiting, at.joined) == (1, 1)
        (await at.stage.job()).whole("Other.")
        (await at.stage.job(1)).whole()
        assert [text(await task) for task in at.reading] == ["Other.", "Hello.", "Hello."]


async def test_several_choices_are_joined_as_one() -> None:
    async with table() as at:
        await at.ask(n=2)
        await at.ask(n=2)
        for number, said in enumerate(("One.", "Two.")):
            (await at.stage.job(number)).whole(said)
        first, second = [await task for task in at.reading]
    assert first == second
    assert sorted(text(first)) == sorted("One.Two.")


async def test_what_is_over_is_not_joined() -> None:
    async with table() as at:
        await at.ask()
        (await at.stage.job()).whole()
        await at.reading[0]
        await at.ask()
        (await at.stage.job(1)).whole("Again.")
        assert text(await at.reading[1]) == "Again."
        assert at.joined == 0


ANN, BOB = (Caller(trace="t", endpoint="/v1/messages", key=key) for key in ("ann", "bob"))
NAMED, OTHERWISE = (replace(ANN, idempotency=name) for name in ("one", "two"))
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
        ((NAMED, {"sampling": WARM}), (NAMED, {"sampling": WARM}), True),
        ((NAMED, {}), (OTHERWISE, {}), True),
        # another user, however alike the words are
        ((ANN, {}), (BOB, {}), False),
        ((NAMED, {"sampling": WARM}), (replace(NAMED, key="bob"), {"sampling": WARM}), False),
        # chance decides
        ((ANN, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": Sampling()}), (ANN, {"sampling": Sampling()}), False),
        ((NAMED, {"sampling": WARM}), (OTHERWISE, {"sampling": WARM}), False),
        ((NAMED, {"sampling": WARM}), (ANN, {"sampling": WARM}), False),
        ((ANN, {"sampling": WARM}), (NAMED, {"sampling": WARM}), False),
        # something else is asked
        ((ANN, {}), (ANN, {"text": "ho"}), False),
        ((NAMED, {"text": "hi"}), (NAMED, {"text": "ho"}), False),
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
    async with table() as at:
        for caller, fields in (first, second):
            await at.ask(caller=caller, **fields)
        assert at.joined == joined


async def test_two_prompts_that_look_alike_are_told_apart_by_more_than_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever finds the candidate, the whole is compared."""
    monkeypatch.setattr("modelyard.gateway.dedup._key", lambda job: ("all the same",))
    async with table() as at:
        for said in ("hi", "ho", "hi"):
            await at.ask(text=said)
        assert at.joined == 0  # the second has taken the first one's place at the door
        assert at.open == 1
        for number in range(3):
            (await at.stage.job(number)).whole()
        await asyncio.gather(*at.reading)
        assert at.open == 0


# --- who leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 1])
async def test_one_of_two_readers_leaves_and_the_other_reads_on(leaver: int) -> None:
    async with table() as at:
        await at.ask()
        job = await at.stage.job()
        job.accept()
        await at.ask()
        job.say("Hello")
        await until(lambda: not job._items)
        at.answers[leaver].cancel()
        job.say(" there")
        assert await _failed(at.reading[leaver])
        assert not job.is_cancelled
        job.end()
        left = await at.reading[1 - leaver]
        assert (text(left), isinstance(left[-1], Finished)) == ("Hello there", True)
    assert (at.open, at.stage.running) == (0, 0)


async def test_a_reader_who_does_not_fetch_hears_at_once_that_it_left() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        job = await at.stage.job()
        at.answers[1].cancel()
        assert await _failed(at.reading[1])
        assert (job.is_cancelled, at.reading[0].done()) == (False, False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_work_is_cancelled_when_the_last_reader_leaves(order: tuple[int, int]) -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        job = await at.stage.job()
        job.accept()
        at.answers[order[0]].cancel()
        assert not job.is_cancelled
        at.answers[order[1]].cancel()
        assert job.is_cancelled
        job.end("cancelled")
        assert [await _failed(task) for task in at.reading] == [True, True]
        await at.ask()
        assert at.joined == 1  # nobody joins what was cancelled
    assert at.stage.running == 0


async def test_a_task_that_is_cancelled_while_it_fetches_leaves_the_fetching_to_another() -> None:
    async with table() as at:
        for _ in range(3):
            await at.ask()
        job = await at.stage.job()
        job.accept()
        at.reading[0].cancel()
        await asyncio.wait([at.reading[0]])
        assert not job.is_cancelled
        job.say("Hello")
        job.end()
        assert [text(await task) for task in at.reading[1:]] == ["Hello", "Hello"]
    assert at.stage.running == 0


async def test_a_reader_that_closes_while_one_that_left_still_fetches_ends_the_work() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        job = await at.stage.job()
        at.answers[0].cancel()  # it fetches, and stays until something comes
        at.reading[1].cancel()
        await asyncio.wait([at.reading[1]])
        assert job.is_cancelled
        job.end("cancelled")
        assert await _failed(at.reading[0])
    assert (at.open, at.stage.running) == (0, 0)


async def test_waiting_readers_leave_the_queue_only_together() -> None:
    async with table(places=1) as at:
        await at.ask(text="something else")
        await at.ask()
        await at.ask()
        at.answers[1].cancel()
        assert at.stage.waiting == 1
        at.answers[2].cancel()
        assert at.stage.waiting == 0
        assert [await _failed(task) for task in at.reading[1:]] == [True, True]


async def test_leaving_with_several_choices_is_told_for_each() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask(n=2)
        at.answers[1].cancel()
        gone = await at.reading[1]
    assert [type(event) for event in gone] == [Failed, Failed]


# --- how it ends ------------------------------------------------------------------------------------------------------


async def test_an_error_in_the_middle_reaches_every_reader() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        job = await at.stage.job()
        job.accept()
        job.say("Hel")
        await until(lambda: not job._items)
        job.end("error", Unavailable("segmentation fault"))
        first, second = [await task for task in at.reading]
    assert first == second
    assert (text(first), isinstance(first[-1], Failed)) == ("Hel", True)
    assert at.open == 0


async def test_a_server_that_stops_tells_every_reader_why() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        job = await at.stage.job()
        at.stage.gateway.stop(why := Unavailable("the server stops"))
        job.end("cancelled")
        assert [(await task)[-1] for task in at.reading] == [Failed(why), Failed(why)]


async def test_an_answer_that_grew_too_long_is_not_joined_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.gateway.dedup._MAX_BATCHES", 3)
    async with table() as at:
        await at.ask()
        job = await at.stage.job()
        job.accept()
        for _ in range(6):
            job.say("a b")
            await until(lambda: not job._items)
        await asyncio.sleep(0)
        assert at.open == 0
        shared = at.answers[0]._shared  # type: ignore[union-attr]
        assert len(shared.batches) == 0
        await at.ask()
        assert at.joined == 0
        job.end()
        assert text(await at.reading[0]) == "a b" * 6


async def test_cancelling_and_closing_again_changes_nothing() -> None:
    async with table() as at:
        for _ in range(2):
            await at.ask()
        for _ in range(2):
            at.answers[1].cancel()
        await at.reading[1]
        at.answers[1].close()
        at.answers[1].cancel()
        (await at.stage.job()).whole()
        assert text(await at.reading[0]) == "Hello."


async def _failed(task: asyncio.Task[list[Event]]) -> bool:
    last = (await task)[-1]
    return isinstance(last, Failed) and isinstance(last.error, Cancelled)


def test_a_table_that_nobody_opened_has_no_seat() -> None:
    job = PreparedRequest(
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
    assert (job.is_deterministic(), job.is_shareable(), is_same_request(job, job)) == (True, True, True)
    assert RequestDeduplicator().find(job) is None
