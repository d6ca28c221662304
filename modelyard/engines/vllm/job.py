"""One job in the engine's hands: how much it may say, what it has said, and vLLM's outputs as chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, IdLogprob, Media, Prompt, Tokens
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.events import Timings, Usage
from modelyard.engines.generation_queue import GenerationQueue


class Job:
    """Made where its answer is read; from then on all but its mailbox belongs to vLLM's thread.

    `fault` is why it ends before its time, where its reader is not the reason.
    """

    def __init__(self, id: str, prompt: Prompt, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[Job], None]):
        self.id, self.prompt, self.cache = id, prompt, ""
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: on_cancel(self), loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.task: asyncio.Task[None] | None = None
        self.fault: ModelyardError | None = None
        self.ended: bool = False
        self.accepted: bool = False
        self.most = self.said = self.cached = 0
        self.full: str = "length"
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    @property
    def media(self) -> list[Media]:
        return [part for part in self.prompt.parts if isinstance(part, Media)]

    @property
    def is_free_to_drop_its_form(self) -> bool:
        """A grammar that nobody asked for must not fail a request."""
        constraint = self.prompt.constraint
        return constraint is not None and bool(constraint.trigger) and not self.accepted

    def fit(self, cache: CacheInfo) -> None:
        """How much it may say in this cache: vLLM knows the widest window only."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full = "window" if room < self.prompt.max_tokens else "length"

    # --- what vLLM says ---------------------------------------------------------------------------------------------

    def heard(self, output: Any) -> list[Chunk]:
        """A delta as chunks; the last one has the End."""
        chunks: list[Chunk] = [] if self.accepted else [self._accept(output)]
        said = output.outputs[0]
        ids, logprobs = list(said.token_ids), said.logprobs
        if said.finish_reason == "stop" and ids:
            ids.pop()  # what ended it is not part of it
        if ids:
            chunks.append(self._speak(ids, logprobs))
        if output.finished:
            chunks.append(self._finish(said.finish_reason))
        return chunks

    def _accept(self, output: Any) -> Accepted:
        """vLLM tells nothing before the first token, and with it how much of the prompt it had read already."""
        self.accepted, self.cached = True, output.num_cached_tokens or 0
        if self.media and output.prompt_token_ids:  # what a picture is worth only its processor knows
            self.prompt_tokens = len(output.prompt_token_ids)
        return Accepted(self.cached, self.cached)

    def _speak(self, ids: list[int], logprobs: Any) -> Tokens:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += len(ids)
        if self.prompt.logprobs is None or logprobs is None:
            return Tokens(ids)
        top = self.prompt.logprobs
        return Tokens(ids, [logprob_of(id, at, top) for id, at in zip(ids, logprobs, strict=False)])

    def _finish(self, reason: str | None) -> End:
        if reason == "stop":
            return self.end("stop")
        if reason == "length":  # before its time: pictures have taken more of the window than we could know
            return self.end(self.full if self.said >= self.most else "window")
        if reason == "abort":
            return self.end("cancelled") if self.fault is None else self.end("error", self.fault)
        return self.end("error", Internal(f"vLLM ended the answer: {reason}"))

    def end(self, reason: Any, error: ModelyardError | None = None) -> End:
        self.ended = True
        return End(reason, Usage(self.prompt_tokens, self.cached, self.said), self._timings(), error)

    def _timings(self) -> Timings:
        now, first = time.perf_counter(), self.first_at
        told = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(prefill=told, first_token=told, decode=decode, total=now - self.began)


def logprob_of(id: int, at: Mapping[int, Any], top: int) -> IdLogprob:
    """vLLM gives the chosen token beside the best ones, even where it is none of them."""
    ranked = sorted((each.rank, other, each.logprob) for other, each in at.items() if each.rank <= top)
    return IdLogprob(id, min(0.0, at[id].logprob), _best(ranked, top))


def _best(ranked: Sequence[tuple[int, int, float]], top: int) -> tuple[tuple[int, float], ...]:
    return tuple((id, min(0.0, logprob)) for _, id, logprob in ranked[:top])
