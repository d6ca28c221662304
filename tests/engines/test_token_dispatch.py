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
        self.heard: list[Chunk] = []
        self.queue.forward_to(lambda chunks, _: self.heard.extend(chunks))


def dispatch() -> TokenDispatch:
    return TokenDispatch(asyncio.get_running_loop())


def word(id: int) -> list[Chunk]:
    return [Tokens([id])]


async def settled() -> None:
    """The loop has done all that it was told so far."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(done.set)
    await done.wait()


async def test_what_somebody_waits_for_is_handed_over_at_the_end_of_its_step() -> None:
    out, job = dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, word(1))
    out.end_step(next_is_similar=True)
    await settled()
    assert job.heard == word(1)


async def test_a_token_among_many_lies_until_the_next_step_waits() -> None:
    out, job = dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, word(1), urgent=False)
    out.end_step(next_is_similar=True)
    await settled()
    assert job.heard == []
    out.before_gpu_wait()
    await settled()
    assert job.heard == word(1)


async def test_nothing_lies_where_no_step_follows() -> None:
    out, job = dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, word(1), urgent=False)
    out.end_step(next_is_similar=False)
    await settled()
    assert job.heard == word(1)


async def test_nothing_lies_where_steps_do_not_wait() -> None:
    out, job = dispatch(), Job()
    out.before_gpu_wait()
    out.put(job, word(1), urgent=False)
    out.end_step(next_is_similar=True)
    out.put(job, word(2), urgent=False)
    out.end_step(next_is_similar=True)
    await settled()
    assert job.heard == [*word(1), *word(2)]


async def test_an_urgent_word_takes_along_what_lies_before_it() -> None:
    out, job, other = dispatch(), Job(), Job()
    out.before_gpu_wait()
    out.put(job, word(1), urgent=False)
    out.put(other, [End("stop", Usage())], True, urgent=False)
    out.end_step(next_is_similar=True)
    await settled()
    assert job.heard == word(1)
    assert other.queue.closed


async def test_a_mailbox_that_has_closed_meanwhile_is_passed_over() -> None:
    out, gone, job = dispatch(), Job(), Job()
    gone.queue.close()
    out.put(gone, word(1))
    out.put(job, word(2))
    out.flush()
    await settled()
    assert gone.heard == []
    assert job.heard == word(2)


async def test_a_round_is_a_token_for_each_in_the_order_in_which_it_was_put() -> None:
    out, job, gone, other = dispatch(), Job(), Job(), Job()
    gone.queue.close()
    out.put(job, word(1))
    out.put_batch((job, gone, other), [2, 3, 4])
    out.put(other, [End("stop", Usage())], True)
    out.flush()
    await settled()
    assert [token for chunk in job.heard if isinstance(chunk, Tokens) for token in chunk.ids] == [1, 2]
    assert gone.heard == []
    assert other.heard == [*word(4), End("stop", Usage())]


async def test_a_round_is_not_left_lying() -> None:
    out, job = dispatch(), Job()
    out.before_gpu_wait()
    out.put_batch((job,), [1])
    out.end_step(next_is_similar=True)
    await settled()
    assert job.heard == word(1)
