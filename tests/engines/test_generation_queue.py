"""The queue between an engine and the one reader of a generation."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted, Chunk, End, Tokens
from modelyard.core.events import Usage
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.generation_queue import GenerationQueue, TokenDispatch, merge_tokens


async def read_all(queue: GenerationQueue[Chunk]) -> list[Chunk]:
    return [item async for batch in queue for item in batch]


async def test_reader_takes_all_waiting_items_at_once() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    queue.put(1)
    queue.put_many([2, 3])
    assert await anext(queue) == [1, 2, 3]


async def test_reader_waits_only_if_the_queue_is_empty() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    reading = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    assert not reading.done()
    queue.put(7)
    assert await reading == [7]


async def test_closed_queue_returns_waiting_items_and_then_ends() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    queue.put_many([1], last=True)
    assert await anext(queue) == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(queue)


async def test_close_wakes_a_waiting_reader() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    reading = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_put_after_close_raises() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue.put(1)
    with pytest.raises(RuntimeError, match="closed"):
        queue.put_many([1])


async def test_cancelling_a_waiting_reader_loses_nothing() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    reading = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    queue.put(1)  # arrives before the cancellation is noticed
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    queue.put(2)
    assert await anext(queue) == [1, 2]


async def test_new_reader_may_wait_before_a_cancelled_one_has_run() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    first = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(anext(queue))
    await asyncio.gather(first, return_exceptions=True)
    queue.put(5)
    assert await second == [5]


async def test_second_reader_is_refused() -> None:
    queue: GenerationQueue[int] = GenerationQueue()
    first = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(queue)
    queue.put(1)
    assert await first == [1]


async def test_slow_reader_gets_neighbouring_tokens_as_one_chunk() -> None:
    queue: GenerationQueue[Chunk] = GenerationQueue()
    queue.put_many([Accepted(), Tokens([1]), Tokens([2]), Tokens([3]), End("stop")], last=True)
    assert await read_all(queue) == [Accepted(), Tokens([1, 2, 3]), End("stop")]


async def test_fast_reader_gets_each_chunk_separately() -> None:
    queue: GenerationQueue[Chunk] = GenerationQueue()
    for token in (1, 2):
        chunk = Tokens([token])
        queue.put(chunk)
        assert await anext(queue) == [chunk]


async def test_logprobs_stay_with_their_tokens_when_merged() -> None:
    one, two = IdLogprob(1, -0.1), IdLogprob(2, -0.2)
    assert merge_tokens([Tokens([1], [one]), Tokens([2], [two])]) == [Tokens([1, 2], [one, two])]
    assert merge_tokens([Tokens([1], [one]), Tokens([2])]) == [Tokens([1], [one]), Tokens([2])]


async def test_put_returns_false_if_full_and_on_drained_follows_the_reader() -> None:
    calls: list[str] = []
    queue: GenerationQueue[int] = GenerationQueue(limit=2, on_drained=lambda: calls.append("drained"))
    assert queue.put(1)
    assert not queue.put(2)
    assert queue.full
    assert await anext(queue) == [1, 2]
    assert calls == ["drained"]
    assert not queue.full
    queue.put(3)
    await anext(queue)
    assert calls == ["drained"]


async def test_cancel_calls_back_once_from_any_thread() -> None:
    calls: list[int] = []
    queue: GenerationQueue[int] = GenerationQueue(on_cancel=lambda: calls.append(1))
    threads = [threading.Thread(target=queue.cancel) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.cancel()
    assert calls == [1]


async def test_iteration_continues_to_the_last_item_after_cancel() -> None:
    queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: queue.put_many([End("cancelled")], last=True))
    queue.put(Tokens([1]))
    queue.cancel()
    assert await read_all(queue) == [Tokens([1]), End("cancelled")]


async def test_cancel_after_the_end_does_nothing() -> None:
    calls: list[int] = []
    queue: GenerationQueue[int] = GenerationQueue(on_cancel=lambda: calls.append(1))
    queue.close()
    queue.cancel()
    assert calls == []


def test_repr_counts_the_waiting_items() -> None:
    loop = asyncio.new_event_loop()
    queue: GenerationQueue[int] = GenerationQueue(loop=loop)
    queue.put(1)
    queue.close()
    loop.close()
    assert repr(queue) == "<GenerationQueue 1 waiting, closed>"


chunks = st.one_of(
    st.builds(Tokens, st.lists(st.integers(0, 9), max_size=3)), st.just(Accepted()), st.just(End("stop"))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(chunks, max_size=30))
def test_merge_tokens_keeps_every_token_in_order_and_leaves_no_neighbours(items: list[Chunk]) -> None:
    out = merge_tokens(items)

    def flat(chunks: list[Chunk]) -> list[object]:
        return [x for c in chunks for x in (c.ids if isinstance(c, Tokens) else [c])]

    assert flat(out) == flat(items)
    assert not any(isinstance(a, Tokens) and isinstance(b, Tokens) for a, b in pairwise(out))


async def test_forwarded_items_reach_the_sink_at_once_until_forwarding_stops():
    got: list[tuple[list[object], bool]] = []
    queue: GenerationQueue[object] = GenerationQueue(limit=2)
    queue.put("before")
    queue.forward_to(lambda items, last: got.append((items, last)))
    queue.put("one")
    queue.forward_to(None)
    assert queue.put("two") is True
    assert queue.put("three") is False
    queue.forward_to(lambda items, last: got.append((items, last)))
    queue.put_many(["last"], last=True)
    assert got == [(["before"], False), (["one"], False), (["two", "three"], False), (["last"], True)]


async def test_forwarding_from_a_full_queue_calls_on_drained():
    calls: list[str] = []
    queue: GenerationQueue[object] = GenerationQueue(limit=1, on_drained=lambda: calls.append("drained"))
    queue.put("full")
    queue.forward_to(lambda items, last: calls.append(f"{items} {last}"))
    assert calls == ["['full'] False", "drained"]
    queue.close()
    assert calls[-1] == "[] True"


# When chunks from an engine's thread reach the event loop.


class Job:
    def __init__(self) -> None:
        self.queue: GenerationQueue[Chunk] = GenerationQueue()
        self.received: list[Chunk] = []
        self.queue.forward_to(lambda chunks, _: self.received.extend(chunks))


def create_dispatch() -> TokenDispatch:
    return TokenDispatch(asyncio.get_running_loop())


def token(id: int) -> list[Chunk]:
    return [Tokens([id])]


async def loop_idle() -> None:
    """Returns when the loop has run all callbacks scheduled so far."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(done.set)
    await done.wait()


async def test_urgent_chunks_are_delivered_at_the_end_of_their_step() -> None:
    out, job = create_dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, token(1))
    out.end_step(next_is_similar=True)
    await loop_idle()
    assert job.received == token(1)


async def test_other_tokens_are_held_until_the_next_gpu_wait() -> None:
    out, job = create_dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, token(1), urgent=False)
    out.end_step(next_is_similar=True)
    await loop_idle()
    assert job.received == []
    out.before_gpu_wait()
    await loop_idle()
    assert job.received == token(1)


async def test_nothing_is_held_if_no_similar_step_follows() -> None:
    out, job = create_dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, token(1), urgent=False)
    out.end_step(next_is_similar=False)
    await loop_idle()
    assert job.received == token(1)


async def test_nothing_is_held_if_steps_do_not_wait_for_the_gpu() -> None:
    out, job = create_dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, token(1), urgent=False)
    out.end_step(next_is_similar=True)
    out.put(job, token(2), urgent=False)
    out.end_step(next_is_similar=True)
    await loop_idle()
    assert job.received == [*token(1), *token(2)]


async def test_urgent_chunk_flushes_what_was_held_before_it() -> None:
    out, job, other = create_dispatch(), Job(), Job()
    out.before_gpu_wait()
    out.put(job, token(1), urgent=False)
    out.put(other, [End("stop", Usage())], True, urgent=False)
    out.end_step(next_is_similar=True)
    await loop_idle()
    assert job.received == token(1)
    assert other.queue.closed


async def test_job_that_has_ended_meanwhile_is_skipped() -> None:
    out, gone, job = create_dispatch(), Job(), Job()
    gone.queue.close()
    out.put(gone, token(1))
    out.put(job, token(2))
    out.flush()
    await loop_idle()
    assert gone.received == []
    assert job.received == token(2)


async def test_batch_gives_each_job_its_token_in_order() -> None:
    out, job, gone, other = create_dispatch(), Job(), Job(), Job()
    gone.queue.close()
    out.put(job, token(1))
    out.put_batch((job, gone, other), [2, 3, 4])
    out.put(other, [End("stop", Usage())], True)
    out.flush()
    await loop_idle()
    assert [token for chunk in job.received if isinstance(chunk, Tokens) for token in chunk.ids] == [1, 2]
    assert gone.received == []
    assert other.received == [*token(4), End("stop", Usage())]


async def test_batch_is_not_held() -> None:
    out, job = create_dispatch(), Job()
    out.before_gpu_wait()
    out.put_batch((job,), [1])
    out.end_step(next_is_similar=True)
    await loop_idle()
    assert job.received == token(1)
