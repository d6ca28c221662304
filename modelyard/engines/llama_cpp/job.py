"""One generation: its tokens, how far they are evaluated, and how the next one is sampled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.engine import Prompt, ReasoningBudget
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Usage
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.in_process import Finish, InProcessJob
from modelyard.engines.llama_cpp.grammar_mask import GrammarMask, TriggeredMask
from modelyard.engines.llama_cpp.graph_sampler import GraphSampler
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot, StoredKv
from modelyard.engines.llama_cpp.logit_columns import Row
from modelyard.engines.llama_cpp.logits import token_logprob
from modelyard.engines.llama_cpp.media import MediaChunk, MediaPrompt, Vectors
from modelyard.engines.llama_cpp.media_tokens import count_positions
from modelyard.engines.llama_cpp.options import LOGIT_ROWS
from modelyard.engines.llama_cpp.sampler import Sampler
from modelyard.engines.llama_cpp.sequences import SequenceSlot

_MAX_CHARACTER = 4  # bytes


class ReasoningLimit:
    """Reads the output token by token. Markers are compared as text: their tokens depend on the text around them."""

    def __init__(self, budget: ReasoningBudget, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes, self._left = token_bytes, budget.tokens
        self._blocks = [
            ([end.encode() for end in block.ends], block.start.encode(), block.closing) for block in budget.blocks
        ]
        self._open = None if budget.opened is None else self._blocks[budget.opened]
        self._longest = max(len(text) for ends, start, _ in self._blocks for text in (*ends, start))
        self._tail = b""  # the end of the output, in which a marker may have begun
        self._closing: list[int] = []  # what is still to be generated of it, in reverse

    def next_token(self) -> int | None:
        """The token that must come next; None: any. Call it once per token."""
        if not self._closing and self._open is not None and self._left <= 0 and not self._is_inside_character():
            self._closing = list(reversed(self._open[2]))
        return self._closing.pop() if self._closing else None

    def read(self, token: int) -> None:
        """The token was generated."""
        if self._open is not None:
            self._left -= 1
        tail = self._tail + self._token_bytes(token)
        if self._open is not None:
            found = next((end for end in self._open[0] if end in tail), None)
            if found is not None and not self._closing:
                self._open, tail = None, tail.partition(found)[2]
        else:
            found_block = next((block for block in self._blocks if block[1] in tail), None)
            if found_block is not None:
                self._open, tail = found_block, tail.partition(found_block[1])[2]
        self._tail = tail[-max(self._longest, _MAX_CHARACTER) :]

    def _is_inside_character(self) -> bool:
        """Whether the last bytes begin a character that later tokens complete."""
        for back, byte in enumerate(reversed(self._tail[-_MAX_CHARACTER:]), 1):
            if byte < 0x80:
                return False
            if byte >= 0xC0:
                return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        return False


class StepOutput(Struct):
    """What a job generates in one step: several tokens if drafts are accepted."""

    ids: list[int]
    logprobs: list[IdLogprob] | None


class LlamaCppJob(InProcessJob):
    """`ids` has prompt and output in one growing array; the first `n_past` of them are in the KV cache.

    `sampler` and `slot`, its sequence, are set by the engine's thread when it admits the job, and `graph_sampler` if
    that samples instead.
    """

    sampler: Sampler
    slot: SequenceSlot

    def __init__(self, prompt: Prompt, loop: asyncio.AbstractEventLoop, cache: str, window: int, arrival: int) -> None:
        super().__init__(prompt, loop, cache, window)
        self.arrival = arrival
        ids = prompt.ids  # without media: `read_media` adds them
        self._ids = np.empty(self.prompt_tokens + min(prompt.max_tokens, 1024), np.int32)
        self._ids[: len(ids)] = ids
        self.length = len(ids)
        self.n_past = 0
        self.stop_ids = frozenset(prompt.stop_ids)
        self._min_output = prompt.sampling.min_output(prompt.max_tokens)
        self._ends = np.fromiter(self.stop_ids, np.intp, len(self.stop_ids))
        self.checkpoint_positions: list[int] = []  # where reading the prompt pauses for a checkpoint, in order
        self.chunks: list[MediaChunk] = []  # of images and audio, those that are not in the KV yet
        self.vectors: Future[Vectors] | None = None  # of the first of them, once they are requested
        self.shift = 0  # how many more tokens than positions are in the KV
        self.on_cancel: Callable[[], None] | None = None
        self.mask: GrammarMask | TriggeredMask | None = None
        self.reasoning: ReasoningLimit | None = None
        self.stored: tuple[StoredKv, KvSnapshot | None] | None = None  # a file that was read for it
        self.scripted: Iterator[int] | None = None  # replaces sampling, for tests
        self.graph_sampler: GraphSampler | None = None

    def __repr__(self) -> str:
        return f"<LlamaCppJob {self.n_past} of {self.length} tokens evaluated, {self.n_output} generated>"

    def limit_output(self, window: int) -> None:
        super().limit_output(window)
        self.limit = self.prompt_tokens + self.max_output  # the length at which it ends

    def read_media(self, prompt: MediaPrompt) -> None:
        """Before it is admitted: its ids with those of its images and audio."""
        count = len(prompt.ids)
        self._ids = np.empty(count + min(self.prompt.max_tokens, 1024), np.int32)
        self._ids[:count], self.chunks = prompt.ids, prompt.chunks
        self.length = self.prompt_tokens = count

    def start(self, cached: int) -> None:
        self.n_past = self.cached_tokens = cached
        if self.chunks:
            self.shift = cached - count_positions(self.evaluated_ids)
            self.chunks = [chunk for chunk in self.chunks if chunk.end > cached]

    def cancel(self) -> None:
        super().cancel()
        if self.on_cancel is not None:
            self.on_cancel()

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.cached_tokens, self.n_output)

    # --- tokens -------------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Any:
        return self._ids[: self.length]

    @property
    def evaluated_ids(self) -> Any:
        return self._ids[: self.n_past]

    @property
    def last_token(self) -> int:
        return int(self._ids[self.length - 1])

    @property
    def pending(self) -> int:
        return self.length - self.n_past

    @property
    def most_rows(self) -> int:
        """How many tokens of the prompt one step may read: up to the next checkpoint, and few if each has logits."""
        rows = (self.checkpoint_positions[0] if self.checkpoint_positions else self.length) - self.n_past
        if self.chunks:
            rows = max(0, min(rows, self.chunks[0].start - self.n_past))
        if self.prompt.prompt_logprobs is None:
            return rows
        before = self.logprobs_from - self.n_past
        return min(rows, before if before > 0 else LOGIT_ROWS)

    @property
    def logprobs_from(self) -> int:
        """The first token of the prompt after which the next one has a log probability; its length if none has."""
        last = self.prompt.logprobs_last
        if self.prompt.prompt_logprobs is None:
            return self.prompt_tokens
        return 0 if last is None else max(0, self.prompt_tokens - last - 1)

    @property
    def wants_logits(self) -> bool:
        """Of each token of the prompt that it reads next."""
        return self.prompt.prompt_logprobs is not None and self.n_past >= self.logprobs_from

    @property
    def next_chunk(self) -> MediaChunk | None:
        """The chunk of an image or of audio that it reads next; None: text is next."""
        return self.chunks[0] if self.chunks and self.chunks[0].start <= self.n_past else None

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be computed for it before its next chunk is encoded."""
        return self.vectors is not None and not self.vectors.done() and not self.cancelled

    def advance_media(self, rows: int) -> None:
        """So many rows of the first chunk are in the KV now."""
        self.n_past += rows
        chunk = self.chunks[0]
        if self.n_past == chunk.end:
            self.shift += chunk.tokens - chunk.n_positions
            self.chunks, self.vectors = self.chunks[1:], None

    @property
    def n_output(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def generating(self) -> bool:
        return self.first_token_at is not None

    def mark_prefilled(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()

    def append(self, token: int) -> None:
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(1024, self.length // 2), np.int32)])
        self._ids[self.length] = token
        self.length += 1

    def append_decoded(self, token: int) -> None:
        """The token that follows a decode of all tokens before it."""
        self.append(token)
        self.n_past += 1

    # --- sampling -----------------------------------------------------------------------------------------------------

    @property
    def is_simple(self) -> bool:
        """The sampler alone decides, after few logits have changed, and no logprobs are requested."""
        is_sampled = self.mask is None and self.reasoning is None and self.scripted is None
        return is_sampled and self.prompt.logprobs is None

    @property
    def is_greedy(self) -> bool:
        return self.is_simple and self.sampler.is_greedy

    @property
    def lone_temperature(self) -> float | None:
        """The temperature, if nothing else decides and nobody needs the logits."""
        is_lone = self.is_simple and not self._min_output and self.prompt.prompt_logprobs is None
        return self.sampler.lone_temperature if is_lone else None

    @property
    def must_go_on(self) -> bool:
        """Whether no end token may follow yet."""
        return self.n_output < self._min_output

    def forbid_ends(self, logits: Row) -> None:
        logits[self._ends] = -np.inf

    def new_output(self) -> StepOutput:
        return StepOutput([], [] if self.prompt.logprobs is not None else None)

    def sample(self, context: Any, row: int, output: StepOutput) -> Finish | None:
        """Adds the next token to the output. Returns why the job ends, if it does."""
        top = self.prompt.logprobs
        logits = self.sampler.logits(context, row).copy() if top is not None else None  # a mask changes them
        after = self.sampler.reported(logits, top or 0) if logits is not None and self.prompt.post_sampling else None
        forced = None if self.reasoning is None else self.reasoning.next_token()
        try:
            token = self._sample(context, row, forced)
        except ModelyardError as error:
            return "error", error
        finish = self.accept(token, output, is_forced=forced == token)
        if self.reasoning is not None:
            self.reasoning.read(token)
        if logits is not None and output.logprobs is not None and (finish is None or self._reports(token, output)):
            output.logprobs.append(token_logprob(logits, token, top or 0) if after is None else after(token))
        return finish

    def _reports(self, token: int, output: StepOutput) -> bool:
        """Whether the last token has a log probability: it is part of the output, or the prompt's tokens have one."""
        return bool(output.ids and output.ids[-1] == token) or (self.prompt.prompt_logprobs is not None and token >= 0)

    def _sample(self, context: Any, row: int, forced: int | None) -> int:
        if forced is not None:
            return forced if self.mask is None else self.mask.sample(self.sampler.logits(context, row), lambda: forced)
        if self.scripted is not None:
            return next(self.scripted, next(iter(self.stop_ids), -1))
        if self.graph_sampler is not None:
            return self.graph_sampler.sample(self.slot.index, row)
        if self.mask is None and not self._min_output:
            return self.sampler.sample(context, row)
        logits = self.sampler.logits(context, row)
        if self.must_go_on:
            self.forbid_ends(logits)
        if self.mask is None:
            return self.sampler.sample(context, row, logits)
        return self.mask.sample(logits, partial(self.sampler.sample, context, row, logits))

    def accept(self, token: int, output: StepOutput, *, is_forced: bool = False) -> Finish | None:
        """Appends the token, unless it is one that ends the job. The end of a message of reasoning may be such a token;
        it is forced to let the answer begin."""
        if (token in self.stop_ids and not is_forced) or token < 0:
            return "stop", None
        self.append(token)
        output.ids.append(token)
        if self.mask is not None and self.mask.is_complete:
            return "stop", None
        return (self.limit_reason, None) if self.length >= self.limit else None
