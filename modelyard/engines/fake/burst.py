"""The short way through a job that waits for nothing: everything it will ever say goes out in one parcel.

Load tests measure the gateway, so the engine under it should cost next to nothing. A job that waits, fails, reports or
counts log probabilities takes the long way (`job.py`), with the same words and numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelyard.core.engine import Chunk, End, Prompt, TokenRun, Tokens
from modelyard.core.events import Timings, Usage
from modelyard.engines.fake.conversation import OPENED
from modelyard.engines.fake.plan import Deed, Say
from modelyard.engines.generation_queue import Whole

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
        self._said: dict[tuple[int, ...], Tokens | None] = {}

    def take(self, prompt: Prompt) -> Whole[Chunk] | None:
        """The whole job, done; None: take the long way."""
        parts = prompt.parts
        if not self._fit or len(parts) != 1 or prompt.constraint or prompt.logprobs is not None or prompt.deadline:
            return None
        run, opener = parts[0], self._engine.opener
        if not isinstance(run, TokenRun) or (opener is not None and opener in run.ids[-OPENED:]):
            return None
        said = self._said.get(prompt.stop_ids) or self._planned(prompt)
        return None if said is None else self._post(prompt, run.ids, said)

    def _post(self, prompt: Prompt, ids: list[int], said: Tokens) -> Whole[Chunk] | None:
        engine, total, output = self._engine, len(ids), len(said.ids)
        info, sequences = engine.cache(prompt.cache)
        if output >= prompt.max_tokens or output >= info.window - total:
            return None
        key, accepted = sequences.take(ids, prompt.session)
        sequences.keep(key, ids, said.ids)
        cached = accepted.cached_tokens
        engine.reused += cached
        engine.evaluated += total - cached
        return Whole([accepted, said, End("stop", Usage(total, cached, output), _NO_TIME)])

    def _planned(self, prompt: Prompt) -> Tokens | None:
        stops = prompt.stop_ids
        if stops not in self._said:
            self._said[stops] = _until_stop(self._engine.plan(prompt), stops)
        return self._said[stops]


def _until_stop(plan: tuple[Deed, ...], stops: tuple[int, ...]) -> Tokens | None:
    """What a plan that only speaks says before a stop token, made once; None for every other plan, and a long one."""
    if len(plan) != 1 or not isinstance(plan[0], Say):
        return None
    ids = plan[0].ids
    ends = [at for at, token in enumerate(ids) if token in stops]
    said = ids[: ends[0]] if ends else ids
    return Tokens(said) if len(said) < _SHORT else None
