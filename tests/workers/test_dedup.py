"""Identical requests of two gateways share one run of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.engine import Accepted, Chunk, End, Prompt, TokenRun, Tokens
from modelyard.core.errors import Unavailable
from modelyard.core.request import Sampling
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.workers.worker import RunDeduplicator
from tests.engines.reading import end, ids, read
from tests.engines.reading import until as read_until
from tests.workers.harness import connected, open_fake, running_worker, until
from tests.workers.harness import prompt as prompt_of


class Engine:
    """Returns queues that the test fills."""

    def __init__(self) -> None:
        self.jobs: list[GenerationQueue[Chunk]] = []
        self.cancelled: list[int] = []
        self.drained = 0

    def generate(self, prompt: Prompt) -> GenerationQueue[Chunk]:
        number = len(self.jobs)
        self.jobs.append(
            GenerationQueue(on_cancel=lambda: self.cancelled.append(number), on_drained=self._room, limit=4)
        )
        return self.jobs[-1]

    def _room(self) -> None:
        self.drained += 1


def prompt(*ids: int, **fields: Any) -> Prompt:
    chosen = {"dedup_key": "ann", "sampling": Sampling(temperature=0), "max_tokens": 9} | fields
    return Prompt(parts=(TokenRun(list(ids or (1, 2, 3))),), **chosen)


class Setup:
    def __init__(self) -> None:
        self.engine, self.deduplicator = Engine(), RunDeduplicator()

    def ask(self, *ids: int, **fields: Any) -> GenerationQueue[Chunk]:
        reader = self.deduplicator.generate(self.engine, prompt(*ids, **fields))  # type: ignore[arg-type]
        assert isinstance(reader, GenerationQueue)
        return reader


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def read_all(reader: GenerationQueue[Chunk]) -> list[Chunk]:
    return [chunk for batch in [batch async for batch in reader] for chunk in batch]


class Instant:
    """Its runs are done at once."""

    def generate(self, prompt: Prompt) -> GenerationQueue[Chunk]:
        queue: GenerationQueue[Chunk] = GenerationQueue()
        queue.put_many([Accepted(2), Tokens([5]), End("stop")], last=True)
        return queue


async def test_a_run_that_is_done_at_once_is_read_and_cannot_be_joined() -> None:
    deduplicator = RunDeduplicator()
    reader = deduplicator.generate(Instant(), prompt())  # type: ignore[arg-type]
    assert len(deduplicator) == 0
    assert [chunk async for batch in reader for chunk in batch] == [Accepted(2), Tokens([5]), End("stop")]


async def test_both_readers_get_everything_from_the_start(setup: Setup) -> None:
    first = setup.ask()
    setup.engine.jobs[0].put_many([Accepted(2), Tokens([5])])
    second = setup.ask(trace="other", priority="background")
    setup.engine.jobs[0].put_many([Tokens([6]), End("stop")], last=True)
    wanted = [Accepted(2), Tokens([5, 6]), End("stop")]
    assert [await read_all(first), await read_all(second)] == [wanted, wanted]
    assert (len(setup.engine.jobs), len(setup.deduplicator)) == (1, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"dedup_key": "bob"},
        {"dedup_key": None},
        {"sampling": Sampling(temperature=0, seed=1)},
        {"max_tokens": 8},
        {"cache": "fast"},
        {"session": "s"},
        {"stop_ids": (7,)},
        {"logprobs": 1},
    ],
)
async def test_a_different_request_is_another_run(setup: Setup, fields: dict[str, Any]) -> None:
    setup.ask()
    setup.ask(**fields)
    assert len(setup.engine.jobs) == 2


async def test_prompts_with_the_same_tail_are_distinguished(setup: Setup) -> None:
    tail = range(100, 120)
    setup.ask(1, *tail)
    setup.ask(2, *tail)
    assert len(setup.engine.jobs) == 2


async def test_another_engine_is_another_run(setup: Setup) -> None:
    setup.ask()
    other, setup.engine = setup.engine, Engine()
    setup.ask()
    assert (len(other.jobs), len(setup.engine.jobs)) == (1, 1)


@pytest.mark.parametrize("leaver", [0, 1])
async def test_one_reader_leaves_and_the_other_continues(setup: Setup, leaver: int) -> None:
    readers = [setup.ask(), setup.ask()]
    readers[leaver].cancel()
    assert [chunk.reason for chunk in await read_all(readers[leaver]) if isinstance(chunk, End)] == ["cancelled"]
    assert setup.engine.cancelled == []
    setup.engine.jobs[0].put_many([Tokens([5]), End("stop")], last=True)
    assert await read_all(readers[1 - leaver]) == [Tokens([5]), End("stop")]


async def test_the_last_reader_cancels_the_run(setup: Setup) -> None:
    readers = [setup.ask(), setup.ask()]
    for reader in readers:
        reader.cancel()
        reader.cancel()
    assert (setup.engine.cancelled, len(setup.deduplicator)) == ([0], 0)
    setup.ask()
    assert len(setup.engine.jobs) == 2  # a cancelled run cannot be joined
    setup.engine.jobs[0].put_many([End("cancelled")], last=True)
    assert await read_all(readers[1]) == [End("cancelled")]


async def test_an_error_reaches_both_readers(setup: Setup) -> None:
    readers, lost = [setup.ask(), setup.ask()], End("error", error=Unavailable("gone"))
    setup.engine.jobs[0].put_many([Tokens([5]), lost], last=True)
    assert [await read_all(reader) for reader in readers] == [[Tokens([5]), lost]] * 2


async def test_a_long_run_cannot_be_joined(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.workers.worker._MAX_CHUNKS", 2)
    first = setup.ask()
    for token in range(3):
        setup.engine.jobs[0].put_many([Tokens([token])])
    setup.ask()
    assert len(setup.engine.jobs) == 2
    setup.engine.jobs[0].put_many([End("stop")], last=True)
    assert await read_all(first) == [Tokens([0, 1, 2]), End("stop")]


async def test_the_engine_is_paused_while_no_reader_keeps_up(setup: Setup) -> None:
    reader, other = setup.ask(), setup.ask()
    reader.limit = other.limit = 2
    job = setup.engine.jobs[0]
    for token in range(6):
        job.put_many([Tokens([token])])
    assert job.full  # two were forwarded, four wait in the engine's queue
    assert await reader.__anext__() == [Tokens([0, 1])]
    assert (job.full, setup.engine.drained) == (False, 1)
    job.put_many([End("stop")], last=True)
    assert await read_all(reader) == [Tokens([2, 3, 4, 5]), End("stop")]
    assert await read_all(other) == [Tokens([0, 1, 2, 3, 4, 5]), End("stop")]


async def test_cancelling_a_paused_run_lets_it_end(setup: Setup) -> None:
    reader = setup.ask()
    reader.limit = 1
    job = setup.engine.jobs[0]
    job.put_many([Tokens([0])])
    job.put_many([Tokens([1])])
    reader.cancel()
    job.put_many([End("cancelled")], last=True)
    assert await read_all(reader) == [Tokens([0, 1]), End("cancelled")]


# --- over the wire ----------------------------------------------------------------------------------------------------


async def test_two_gateways_share_one_run_in_a_worker() -> None:
    """The second request joins while the first one hangs; another dedup key gets its own run."""
    script = [{"steps": [{"text": "so far"}, {"hang": True}]}]
    async with running_worker() as worker, connected(worker, "a") as one, connected(worker, "b") as two:
        first = await open_fake(one, "e", script=script)
        second = await open_fake(two, "e")
        (engine,) = [hosted.engine for hosted in worker.engines]
        assert engine is not None
        jobs = [first.generate(replace(prompt_of("Hi."), dedup_key="ann"))]
        first_ids = ids(await read_until(jobs[0], Tokens))
        jobs.append(second.generate(replace(prompt_of("Hi."), dedup_key="ann")))
        again = ids(await read_until(jobs[1], Tokens))
        assert again[: len(first_ids)] == first_ids[: len(again)]
        assert engine.stats().running == 1
        jobs.append(second.generate(replace(prompt_of("Hi."), dedup_key="bob")))
        await read_until(jobs[2], Tokens)
        assert engine.stats().running == 2
        jobs[0].cancel()
        assert end(await read(jobs[0])).reason == "cancelled"
        assert engine.stats().running == 2
        for job in jobs[1:]:
            job.cancel()
            assert end(await read(job)).reason == "cancelled"
        await until(lambda: engine.stats().running == 0)
