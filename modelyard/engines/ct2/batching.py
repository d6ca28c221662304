"""Which of the jobs that wait share the next batch. Pure.

The oldest job leads. Others go with it where their arguments are the same and their prompts are nearly as long as its
own: CTranslate2 reads a batch only as far as its shortest prompt in one go, and token by token from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.engines.ct2.job import Job


def next_batch(waiting: Sequence[Job], slack: int) -> list[Job]:
    """The longest prompt first: so CTranslate2 keeps its rows, and the rows of its logits are in our order."""
    leader = waiting[0]
    shortest = longest = leader.prompt_tokens
    chosen: list[Job] = []
    for job in waiting:
        low, high = min(shortest, job.prompt_tokens), max(longest, job.prompt_tokens)
        if job.call == leader.call and high - low <= slack:
            shortest, longest = low, high
            chosen.append(job)
    return sorted(chosen, key=lambda job: -job.prompt_tokens)
