"""The mailbox between an engine and its one reader."""

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted, Chunk, End, IdLogprob, Tokens
from modelyard.engines.mailbox import Mailbox, Whole, merged


async def everything(box: Mailbox[Chunk]) -> list[Chunk]:
    return [item async for batch in box for item in batch]


async def test_reader_takes_all_that_waits_at_once() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put_many([2, 3])
    assert await anext(box) == [1, 2, 3]


async def test_reader_waits_only_when_there_is_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.ensure_future(anext(box))
    await asyncio.sleep(0)
    assert not reading.done()
    box.put(7)
    assert await reading == [7]


async def test_closed_mailbox_gives_what_waits_and_then_ends() -> None:
    box: Mailbox[int] = Mailbox()
    box.put_many([1], last=True)
    assert await anext(box) == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(box)


def filled_and_closed() -> Mailbox[int]:
    box: Mailbox[int] = Mailbox()
    box.put_many([1, 2], last=True)
    return box


ALIKE = [filled_and_closed, lambda: Whole([1, 2])]


@pytest.mark.parametrize("made", ALIKE)
async def test_a_whole_job_reads_like_a_mailbox_that_was_filled_and_closed(
    made: Callable[[], Mailbox[int] | Whole[int]],
) -> None:
    box = made()
    box.cancel()
    assert [batch async for batch in box] == [[1, 2]]
    with pytest.raises(StopAsyncIteration):
        await anext(box)
    assert poured(box) == [([], True)]


@pytest.mark.parametrize("made", ALIKE)
async def test_a_whole_job_is_poured_like_a_mailbox_that_was_filled_and_closed(
    made: Callable[[], Mailbox[int] | Whole[int]],
) -> None:
    box = made()
    box.pour(None)
    assert poured(box) == [([1, 2], True)]
    with pytest.raises(StopAsyncIteration):
        await anext(box)


def poured(box: Mailbox[int] | Whole[int]) -> list[tuple[list[int], bool]]:
    got: list[tuple[list[int], bool]] = []
    box.pour(lambda items, last: got.append((items, last)))
    return got


async def test_close_wakes_a_waiting_reader() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.ensure_future(anext(box))
    await asyncio.sleep(0)
    box.close()
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_put_after_close_is_a_loud_mistake() -> None:
    box: Mailbox[int] = Mailbox()
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.put(1)
    with pytest.raises(RuntimeError, match="closed"):
        box.put_many([1])


async def test_cancelling_a_waiting_reader_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.ensure_future(anext(box))
    await asyncio.sleep(0)
    box.put(1)  # arrives before the cancellation is noticed
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    box.put(2)
    assert await anext(box) == [1, 2]


async def test_new_reader_may_wait_before_the_cancelled_one_has_run() -> None:
    box: Mailbox[int] = Mailbox()
    first = asyncio.ensure_future(anext(box))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(anext(box))
    await asyncio.gather(first, return_exceptions=True)
    box.put(5)
    assert await second == [5]


async def test_second_reader_is_refused() -> None:
    box: Mailbox[int] = Mailbox()
    first = asyncio.ensure_future(anext(box))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(box)
    box.put(1)
    assert await first == [1]


async def test_lagging_reader_gets_neighbouring_tokens_as_one_chunk() -> None:
    box: Mailbox[Chunk] = Mailbox()
    box.put_many([Accepted(), Tokens([1]), Tokens([2]), Tokens([3]), End("stop")], last=True)
    assert await everything(box) == [Accepted(), Tokens([1, 2, 3]), End("stop")]


async def test_prompt_reader_gets_each_chunk_by_itself() -> None:
    box: Mailbox[Chunk] = Mailbox()
    for token in (1, 2):
        chunk = Tokens([token])
        box.put(chunk)
        assert await anext(box) == [chunk]


async def test_logprobs_stay_with_their_tokens_when_merged() -> None:
    one, two = IdLogprob(1, -0.1), IdLogprob(2, -0.2)
    assert merged([Tokens([1], [one]), Tokens([2], [two])]) == [Tokens([1, 2], [one, two])]
    assert merged([Tokens([1], [one]), Tokens([2])]) == [Tokens([1], [one]), Tokens([2])]


async def test_put_says_false_when_full_and_on_room_follows_the_reader() -> None:
    room: list[str] = []
    box: Mailbox[int] = Mailbox(limit=2, on_room=lambda: room.append("room"))
    assert box.put(1)
    assert not box.put(2)
    assert box.full
    assert await anext(box) == [1, 2]
    assert room == ["room"]
    assert not box.full
    box.put(3)
    await anext(box)
    assert room == ["room"]


async def test_cancel_reaches_the_engine_once_from_any_thread() -> None:
    calls: list[int] = []
    box: Mailbox[int] = Mailbox(on_cancel=lambda: calls.append(1))
    threads = [threading.Thread(target=box.cancel) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    box.cancel()
    assert calls == [1]


async def test_iteration_goes_on_to_its_last_item_after_cancel() -> None:
    box: Mailbox[Chunk] = Mailbox(on_cancel=lambda: box.put_many([End("cancelled")], last=True))
    box.put(Tokens([1]))
    box.cancel()
    assert await everything(box) == [Tokens([1]), End("cancelled")]


async def test_cancel_after_the_end_does_nothing() -> None:
    calls: list[int] = []
    box: Mailbox[int] = Mailbox(on_cancel=lambda: calls.append(1))
    box.close()
    box.cancel()
    assert calls == []


async def test_items_posted_by_another_thread_arrive_in_order() -> None:
    box: Mailbox[int] = Mailbox()

    def produce() -> None:
        for number in range(0, 100, 2):
            box.post_many([number, number + 1])
        box.post_many([], last=True)

    thread = threading.Thread(target=produce)
    thread.start()
    got = [item async for batch in box for item in batch]
    thread.join()
    assert got == list(range(100))


def test_repr_says_what_waits() -> None:
    loop = asyncio.new_event_loop()
    box: Mailbox[int] = Mailbox(loop=loop)
    box.put(1)
    box.close()
    loop.close()
    assert repr(box) == "<Mailbox 1 waiting, closed>"


chunks = st.one_of(
    st.builds(Tokens, st.lists(st.integers(0, 9), max_size=3)), st.just(Accepted()), st.just(End("stop"))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(chunks, max_size=30))
def test_merging_keeps_every_token_in_order_and_leaves_no_neighbours(items: list[Chunk]) -> None:
    out = merged(items)

    def flat(chunks: list[Chunk]) -> list[object]:
        return [x for c in chunks for x in (c.ids if isinstance(c, Tokens) else [c])]

    assert flat(out) == flat(items)
    assert not any(isinstance(a, Tokens) and isinstance(b, Tokens) for a, b in pairwise(out))


async def test_what_is_poured_goes_to_the_sink_at_once_and_waits_again_when_it_stops():
    got: list[tuple[list[object], bool]] = []
    box: Mailbox[object] = Mailbox(limit=2)
    box.put("before")
    box.pour(lambda items, last: got.append((items, last)))
    box.put("one")
    box.pour(None)
    assert box.put("two") is True
    assert box.put("three") is False
    box.pour(lambda items, last: got.append((items, last)))
    box.put_many(["last"], last=True)
    assert got == [(["before"], False), (["one"], False), (["two", "three"], False), (["last"], True)]


async def test_pouring_out_of_a_full_mailbox_tells_the_engine_that_there_is_room():
    told: list[str] = []
    box: Mailbox[object] = Mailbox(limit=1, on_room=lambda: told.append("room"))
    box.put("full")
    box.pour(lambda items, last: told.append(f"{items} {last}"))
    assert told == ["['full'] False", "room"]
    box.close()
    assert told[-1] == "[] True"
