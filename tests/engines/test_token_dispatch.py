"""When chunks from an engine's thread reach the event loop."""

from __future__ import annotations

import asyncio

from modelyard.core.engine import Chunk, End, Tokens
from modelyard.core.events import Usage
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.token_dispatch import TokenDispatch


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
