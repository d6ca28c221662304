"""The jobs of a cache while all of them speak, one token each a step: what stays the same from one step to the next.

On a fast GPU a step takes less than a millisecond, and the GPU stands still from the moment a token is known until the
next step is given to it. So whatever can be known before is known here: what would end one of them, and when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import inf

from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.sequences import Slot
from modelyard.engines.llama_cpp.throw import Throw


class Choir:
    """Belongs to the engine's thread. It holds for as long as nobody comes or goes, and each says one token a step.

    `is_plain`: each says just what is drawn, and nobody asks for more; `takes_the_best`: and that is the likeliest;
    `throw`: or it can be drawn for all of them together.
    """

    def __init__(self, jobs: Mapping[int, Job], slots: Sequence[Slot]) -> None:
        self.jobs = jobs  # by sequence, in order
        self.singers = tuple(jobs.values())
        self._held = [(slots[index], job) for index, job in jobs.items()]
        self.is_plain = all(job.is_plain for job in self.singers)
        self.takes_the_best = all(job.takes_the_best for job in self.singers)
        self.throw = _throw(self.singers) if self.is_plain else None
        self._stops = frozenset[int]().union(*(job.stops for job in self.singers))
        self.look_ahead()
        self._deadline = min((job.prompt.deadline or inf for job in self.singers), default=inf)

    def __len__(self) -> int:
        return len(self.singers)

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether one of them ends when each has said its token."""
        return self._is_last or not self._stops.isdisjoint(tokens)

    @property
    def is_disturbed(self) -> bool:
        """Somebody was cancelled or is late: the next step is not as this one."""
        for job in self.singers:  # a generator costs as much as all the rest
            if job.cancelled:
                return True
        return self._deadline is not inf and time.time() >= self._deadline

    def say(self, tokens: Sequence[int]) -> None:
        """Write down what was said; what was said before it is in the KV by now."""
        for job, token in zip(self.singers, tokens, strict=True):
            job.say(token)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Whether one of them may say one token more only: to be asked whenever they have said something."""
        self._is_last = any(job.length + 1 >= job.limit for job in self.singers)

    def hold(self) -> None:
        """Each sequence holds all that its job has done."""
        now = time.time()
        for slot, job in self._held:
            slot.tokens, slot.at = job.held, now


def _throw(jobs: Sequence[Job]) -> Throw | None:
    dice = [job.chain.dice for job in jobs if job.chain.dice is not None and job.chain.dice.top_k]
    return Throw(dice) if len(dice) == len(jobs) > 1 else None
