"""The short way through a job that waits for nothing: everything it will ever say goes out in one parcel.

Load tests measure the gateway, so the engine under it should cost next to nothing. A job that waits, fails, reports or
counts log probabilities takes the long way (`job.py`), with the same words and numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelyard.core.engine import Accepted, Chunk, End, Prompt, Tokens
from modelyard.core.events import Timings, Usage
from modelyard.engines.fake.memory import Match, Sequences
from modelyard.engines.fake.plan import Deed, Say
from modelyard.engines.mailbox import Mailbox

_SHORT = 512  # a longer answer leaves the loop to others in between
_NO_TIME = Timings(prefill=0.0, first_token=0.0, decode=0.0, backend=0.0, total=0.0)

if TYPE_CHECKING:
    from modelyard.engines.fake.text import FakeTextEngine


class Bursts:
    """For an engine with one unconditional rule: there is nothing to decide, count or wait for."""

    def __init__(self, engine: FakeTextEngine) -> None:
        options = engine.options
        self._engine = engine
        self._fit = (
            len(options.script) == 1 and options.script[0].is_bare and not (options.delay or options.prefill_rate)
        )
        self._said: dict[tuple[int, ...], list[int] | None] = {}

    def take(self, prompt: Prompt) -> Mailbox[Chunk] | None:
        """The whole job, done; None: take the long way."""
        if (
            not self._fit
            or len(prompt.parts) != 1
            or prompt.constraint
            or prompt.logprobs is not None
            or prompt.deadline
        ):
            return None
        stops = prompt.stop_ids
        if stops not in self._said:
            self._said[stops] = _until_stop(self._engine.plan(prompt), stops)
        said, ids = self._said[stops], prompt.ids
        info, sequences = self._engine.cache(prompt.cache)
        if said is None or len(said) >= min(_SHORT, prompt.max_tokens, info.window - len(ids)):
            return None
        return self._post(said, ids, *sequences.take(ids, prompt.session), sequences)

    def _post(self, said: list[int], ids: list[int], key: str, match: Match, sequences: Sequences) -> Mailbox[Chunk]:
        engine = self._engine
        sequences.keep(key, ids + said)
        engine.reused += match.cached
        engine.evaluated += len(ids) - match.cached
        accepted = Accepted(match.cached, match.divergence, match.evicted)
        end = End("stop", Usage(len(ids), match.cached, len(said)), _NO_TIME)
        return Mailbox(loop=engine.loop, whole=[accepted, Tokens(said), end])


def _until_stop(plan: tuple[Deed, ...], stops: tuple[int, ...]) -> list[int] | None:
    """What a plan that only speaks says before a stop token; None for every other plan."""
    if len(plan) != 1 or not isinstance(plan[0], Say):
        return None
    ids = plan[0].ids
    ends = [at for at, token in enumerate(ids) if token in stops]
    return ids[: ends[0]] if ends else ids
