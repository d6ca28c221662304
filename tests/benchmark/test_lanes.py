"""Rounds of load: how many conversations, how they end, and what is known before they have."""

from __future__ import annotations

import asyncio

import pytest

from modelyard.benchmark.lanes import Extent, Lanes, play
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.workload import Ask, named
from tests.benchmark.fakes import Scripted

AGENT = named("agent", prompt_tokens=20, turns=3)
CHAT = named("chat", prompt_tokens=20)


async def test_every_lane_has_its_conversations_with_all_their_turns() -> None:
    load = Scripted()
    found = await play(load, AGENT, Extent(conversations=2), streams=3)
    assert [len(asks) for asks in load.asked] == [3] * 6
    assert (len(found.samples), found.streams) == (18, 3)
    assert found.wall_s > 0
    assert all(0 <= sample.began_s <= found.wall_s for sample in found.samples)


async def test_no_two_conversations_of_a_run_ask_the_same() -> None:
    load = Scripted()
    for key in ("0/2/0", "1/2/0", "0/2/1"):
        await play(load, CHAT, Extent(conversations=2), streams=2, key=key)
    asked = [asks[0].words for asks in load.asked]
    assert len(set(asked)) == len(asked) == 12


async def test_a_seed_makes_a_round_anew() -> None:
    first, second, other = Scripted(), Scripted(), Scripted()
    for load, seed in ((first, 1), (second, 1), (other, 2)):
        await play(load, CHAT, streams=2, seed=seed)
    assert first.asked == second.asked != other.asked


async def test_streams_are_the_workloads_own_unless_others_are_asked_for() -> None:
    assert (await play(Scripted(), named("batch", prompt_tokens=4))).streams == 8


async def test_after_an_error_a_conversation_is_over() -> None:
    load = Scripted(Sample(output_tokens=1), Sample(error="gone"))
    found = await play(load, AGENT, Extent(conversations=1), streams=1)
    assert [sample.error for sample in found.samples] == [None, "gone"]


async def test_a_lane_that_only_fails_gives_up_for_the_round() -> None:
    load = Scripted(Sample(error="gone"))
    found = await play(load, CHAT, Extent(seconds=600.0), streams=2)
    assert len(found.samples) == 6


async def test_an_answer_in_between_keeps_a_lane_going() -> None:
    failed, good = Sample(error="gone"), Sample(output_tokens=1)
    load = Scripted(failed, failed, good)
    found = await play(load, CHAT, Extent(conversations=9), streams=1)
    assert len(found.samples) == 9


@pytest.mark.parametrize(
    ("extent", "done", "elapsed", "over"),
    [
        (Extent(conversations=2), 1, 99.0, False),
        (Extent(conversations=2), 2, 0.0, True),
        (Extent(seconds=5.0), 99, 4.9, False),
        (Extent(seconds=5.0), 0, 5.0, False),
        (Extent(seconds=5.0), 1, 5.0, True),
    ],
)
def test_a_round_is_as_long_as_it_was_asked_to_be(extent: Extent, done: int, elapsed: float, over: bool) -> None:
    assert extent.is_over(done, elapsed) is over


class Stuck:
    """Answers once, then never."""

    name = "stuck"

    def __init__(self) -> None:
        self.is_stuck = asyncio.Event()
        self._answered = False

    def begin(self) -> Stuck:
        return self

    async def ask(self, ask: Ask) -> Sample:
        if not self._answered:
            self._answered = True
            return Sample(output_tokens=ask.output_tokens)
        self.is_stuck.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_what_a_cancelled_round_had_measured_is_still_there() -> None:
    load, seen = Stuck(), []
    lanes = Lanes(load, CHAT, Extent(conversations=2), streams=1, seen=seen.append)
    running = asyncio.create_task(lanes.run())
    await load.is_stuck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert list(lanes.round().samples) == seen
    assert len(seen) == 1
