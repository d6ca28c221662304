"""The two fake engines: `FakeTextEngine` emits token ids, `FakeChatEngine` emits events, both from the same script.

A job is a generator (`FakeJob._run`) that yields batches of output and pauses. It needs no task: `_advance` drives it
until it pauses, and a timer continues it. A job without pauses runs to its end inside `generate`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, Literal, TypeVar
from uuid import uuid4

from msgspec.structs import replace

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    Capabilities,
    Chunk,
    Control,
    Embeddings,
    End,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Progress,
    Prompt,
    Tokens,
)
from modelyard.core.errors import Cancelled, ContextOverflow, Internal, ModelyardError, NotFound, Timeout, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    StopReason,
    Timings,
    Usage,
)
from modelyard.core.request import Constraint, Message, Request, Sampling, Text, Thinking, ToolCall, ToolResult
from modelyard.core.tokenizer import IdLogprob, Tokenizer
from modelyard.engines.fake.answers import Steps, constrained_answer, demo_answer
from modelyard.engines.fake.options import FakeOptions, tokenizer_path
from modelyard.engines.fake.output import OutputEncoder, filler_tokens, find_filler, format_writer
from modelyard.engines.fake.script import (
    ConversationView,
    PromptView,
    RequestView,
    Script,
    ScriptStep,
    unroll,
)
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
EndReason = Literal["stop", "length", "window", "cancelled", "error"]

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    lora=True,
    embeddings=True,
    ignored=Sampling.__struct_fields__,
)
BURST = 4096  # tokens of one batch; then the job yields to the event loop
QUEUE_LIMIT = 256  # items that may wait for the reader
_PREFILL_REPORTS = 8  # progress reports if only `prefill_rate` sets the duration of the prefill


class FakeEngine:
    """The part that both engines share: script, tokenizer, running jobs. Create it on its event loop."""

    def __init__(self, spec: EngineSpec, capabilities: Capabilities) -> None:
        self.options: FakeOptions = spec.options
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.lost: asyncio.Future[ModelyardError] = self.loop.create_future()
        self.info = EngineInfo("fake", dict(spec.caches), replace(capabilities, modalities=spec.modalities))
        self.jobs: set[FakeJob[Any]] = set()
        self.closed: ModelyardError | None = None
        self._script = Script(self.options.script)
        self._tokenizer: Tokenizer | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.jobs)} running>"

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError("the engine is not open")
        return self._tokenizer

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "reading the tokenizer")
        self._tokenizer = await asyncio.to_thread(HuggingFaceTokenizer.load, tokenizer_path(self.options))
        progress(1.0, "ready")

    async def close(self) -> None:
        self._fail_all(Unavailable("the engine was closed"))

    def die(self, error: ModelyardError) -> None:
        self._fail_all(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def _fail_all(self, error: ModelyardError) -> None:
        self.closed = error
        for job in tuple(self.jobs):
            job.fail(error)

    def answer(self, conversation: ConversationView, constraint: Constraint | None, session: str | None) -> Steps:
        rule = self._script.choose(conversation, session)
        if rule is not None and (constraint is None or not rule.is_unconditional):
            return rule.steps
        if constraint is not None and (steps := constrained_answer(constraint, conversation)):
            return steps
        if rule is not None:
            return rule.steps
        return (ScriptStep(text=conversation.user),) if self.options.echo else demo_answer(conversation)


class FakeJob(ABC, Generic[T]):
    """Drives `_run` and writes its batches to `queue`. `emitted` counts the tokens that were written."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._batches: Iterator[list[T] | float | None] = self._run()
        self._delay = engine.options.delay
        self._timer: asyncio.Handle | None = None
        self._is_blocked = False
        self._started = time.perf_counter()
        self.emitted = 0
        self.queue: GenerationQueue[T] = GenerationQueue(
            on_cancel=self._cancel, on_drained=self._resume, limit=QUEUE_LIMIT, loop=engine.loop
        )

    @abstractmethod
    def _run(self) -> Iterator[list[T] | float | None]:
        """Yields items to write, seconds to wait, or None to wait for ever."""

    @abstractmethod
    def fail(self, error: ModelyardError) -> None:
        """Ends the job with the error; does nothing if it has ended."""

    def start(self) -> Generation[T]:
        if self._engine.closed is not None:
            self.fail(self._engine.closed)
        else:
            self._engine.jobs.add(self)
            self._advance()
        return self.queue

    def _advance(self) -> None:
        self._timer = None
        try:
            for batch in self._batches:
                if isinstance(batch, list):
                    if not self.queue.put_many(batch):
                        self._is_blocked = True
                        return
                    if self.queue.closed:  # the reader cancelled inside put_many
                        return
                else:
                    if batch is not None:
                        self._timer = self._engine.loop.call_later(batch, self._advance)
                    return
        except ModelyardError as error:
            self.fail(error)
        except Exception as error:
            internal = Internal("the fake engine failed")
            log.exception("job failed (id %s)", internal.id, exc_info=error)
            self.fail(internal)

    def _resume(self) -> None:
        """Continues in the next loop iteration: resuming inside the reader's call would starve other tasks."""
        if self._is_blocked:
            self._is_blocked = False
            self._timer = self._engine.loop.call_soon(self._advance)

    def _cancel(self) -> None:
        if threading.get_ident() == self._engine.thread:
            self._on_cancel()
        else:
            self._engine.loop.call_soon_threadsafe(self._on_cancel)

    @abstractmethod
    def _on_cancel(self) -> None: ...

    def _finish(self, last: list[T]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._batches = iter(())  # breaks the reference cycle of job and generator, which costs garbage collection
        self._engine.jobs.discard(self)
        self.queue.put_many(last, last=True)

    def _emit(self, tokens: Sequence[Any], wrap: Callable[[Any], T]) -> Iterator[list[T] | float]:
        """Emits one token per `token_delay`; without a delay everything at once."""
        size = 1 if self._delay else BURST
        for at in range(0, len(tokens), size):
            batch = tokens[at : at + size]
            self.emitted += len(batch)
            yield [wrap(batch)]
            if self._delay or at + size < len(tokens):
                yield self._delay

    def _play_failure(self, step: ScriptStep, error: ModelyardError) -> None:
        if step.die is not None:
            self._engine.die(error)
        else:
            self.fail(error)


# --- text engine ------------------------------------------------------------------------------------------------------


class FakeTextEngine(FakeEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, CAPABILITIES)
        self.reused_tokens = self.evaluated_tokens = 0
        self._caches = {name: (info, PrefixCache(info.parallel)) for name, info in spec.caches.items()}
        self._saved: dict[str, dict[str, PrefixCache]] = {}
        self._adapters: set[str] = set()

    async def open(self, progress: OnProgress) -> None:
        await super().open(progress)
        self.encoder = OutputEncoder(self.tokenizer)

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return TextJob(self, prompt).start()

    def cache(self, name: str) -> tuple[CacheInfo, PrefixCache]:
        """The first cache if `name` is empty."""
        found = self._caches.get(name or next(iter(self._caches), ""))
        if found is None:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(self._caches)}")
        return found

    def stats(self) -> EngineStats:
        caches = [cache for _, cache in self._caches.values()]
        return EngineStats(
            running=len(self.jobs),
            sequences=sum(len(cache) for cache in caches),
            occupied_tokens=sum(cache.tokens for cache in caches),
            reused_tokens=self.reused_tokens,
            evaluated_tokens=self.evaluated_tokens,
        )

    async def control(self, op: Control) -> None:
        names = [op.cache] if op.cache is not None else list(self._caches)
        argument = op.argument or ""
        if op.op == "evict":
            for name in names:
                self.cache(name)[1].clear()
        elif op.op == "save":
            self._saved[argument] = {name: self.cache(name)[1].copy() for name in names}
        elif op.op == "restore":
            if argument not in self._saved:
                raise NotFound(f"no cache was saved under the name {argument!r}")
            for name, saved in self._saved[argument].items():
                self._caches[name] = (self._caches[name][0], saved.copy())
        elif op.op == "load_adapter":
            self._adapters.add(argument)
        else:
            self._adapters.discard(argument)

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        size = self.options.embedding_size
        return Embeddings([unit_vector(ids, size) for ids in batch], sum(map(len, batch)))


class TextJob(FakeJob[Chunk]):
    _engine: FakeTextEngine

    def __init__(self, engine: FakeTextEngine, prompt: Prompt) -> None:
        super().__init__(engine)
        self._prompt = prompt
        self._ids, self._total = prompt.ids, prompt.n_tokens
        self._output: list[int] = []
        self._limit = self._cached = 0
        self._limit_reason: EndReason = "length"
        self._sequence: tuple[PrefixCache, str | int] | None = None
        self._prefilled_at: float | None = None
        self._first_token_at: float | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> Generation[Chunk]:
        if self._prompt.deadline is not None:
            remaining = max(0.0, self._prompt.deadline - time.time())
            expired = Timeout("the deadline of the job passed")
            self._deadline = self._engine.loop.call_later(remaining, self.fail, expired)
        return super().start()

    def fail(self, error: ModelyardError) -> None:
        self._end("error", error)

    def _on_cancel(self) -> None:
        self._end("cancelled")

    def _end(self, reason: EndReason, error: ModelyardError | None = None) -> None:
        if self.queue.closed:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        if self._sequence is not None:
            cache, key = self._sequence
            cache.put(key, self._ids + self._output[: self.emitted])
        now, start, first = time.perf_counter(), self._started, self._first_token_at
        timings = Timings(
            prefill=self._prefilled_at - start if self._prefilled_at is not None else None,
            first_token=first - start if first is not None else None,
            decode=now - first if first is not None else None,
            backend=now - start,
            total=now - start,
        )
        self._finish([End(reason, Usage(self._total, self._cached, self.emitted), timings, error)])

    def _run(self) -> Iterator[list[Chunk] | float | None]:
        info, cache = self._engine.cache(self._prompt.cache)
        total, max_tokens = self._total, self._prompt.max_tokens
        room = info.window - total
        if room < 1:
            raise ContextOverflow(total, info.window)
        self._limit = min(room, max_tokens)
        self._limit_reason = "window" if room < max_tokens else "length"
        view, options = PromptView(self._ids, self._engine.tokenizer), self._engine.options
        steps = unroll(self._engine.answer(view, self._prompt.constraint, self._prompt.session))
        step = next(steps, None)
        if step is not None and (error := step.error) is not None:
            return self._play_failure(step, error)  # before the job is accepted

        key, accepted = cache.take(self._ids, self._prompt.session)
        self._sequence, self._cached = (cache, key), accepted.cached_tokens
        self._engine.reused_tokens += self._cached
        self._engine.evaluated_tokens += total - self._cached
        yield [accepted]
        if options.prefill_rate is not None and (step is None or step.prefill is None):
            yield from self._prefill((total - self._cached) / options.prefill_rate, _PREFILL_REPORTS)
        self._prefilled_at = time.perf_counter()

        writer = format_writer(options.format, in_reasoning=view.starts_in_reasoning)
        while step is not None:
            if step.delay is not None:
                yield step.delay
            elif step.prefill is not None:
                yield from self._prefill(step.prefill, step.progress)
            elif step.hang is not None:
                if step.hang:
                    yield None
            elif (error := step.error) is not None:
                return self._play_failure(step, error)
            elif (yield from self._play_tokens(self._engine.encoder.encode(step, writer))):
                return None
            step = next(steps, None)
        end = self._engine.encoder.encode_end(writer)
        if not (end and (yield from self._play_tokens(end))):
            self._end("stop")

    def _play_tokens(self, ids: list[int]) -> Generator[list[Chunk] | float, None, bool]:
        """True if a limit or a stop token ends the job."""
        left = self._limit - len(self._output)
        stop = min((ids.index(token) for token in self._prompt.stop_ids if token in ids), default=None)
        ids = ids[: left if stop is None else min(left, stop)]
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        self._output += ids
        yield from self._emit(ids, Tokens if self._prompt.logprobs is None else self._with_logprobs)
        if len(ids) < left and stop is None:
            return False
        self._end("stop" if len(ids) < left else self._limit_reason)
        return True

    def _prefill(self, seconds: float, reports: int) -> Iterator[list[Chunk] | float]:
        total, parts = self._total, max(1, reports)
        for part in range(1, parts + 1):
            yield seconds / parts
            if reports:
                yield [Progress(self._cached + (total - self._cached) * part // parts, total)]
        self._prefilled_at = time.perf_counter()

    def _with_logprobs(self, ids: list[int]) -> Tokens:
        size, count = self._engine.tokenizer.size, self._prompt.logprobs or 0
        return Tokens(ids, [fake_logprob(token, count, size) for token in ids])


@lru_cache(maxsize=65536)
def fake_logprob(token: int, alternatives: int, vocabulary_size: int) -> IdLogprob:
    """The chosen token has more than half of the probability; each alternative has half of the rest."""
    share = 0.5 + (token * 2654435761 % 1000) / 2222
    chosen = math.log(share)
    top, rest = [(token, chosen)], 1.0 - share
    for nth in range(1, alternatives):
        rest /= 2
        top.append(((token + nth * 7) % vocabulary_size, math.log(rest)))
    return IdLogprob(token, chosen, tuple(top[:alternatives]))


def unit_vector(ids: Sequence[int], size: int) -> list[float]:
    """A vector of length 1 from a hash of the ids; equal on every machine."""
    seed = struct.pack(f"<{len(ids)}I", *ids)
    raw = struct.unpack(f"<{size}i", hashlib.shake_128(seed).digest(4 * size))
    length = math.sqrt(sum(x * x for x in raw)) or 1.0
    return [x / length for x in raw]


class PrefixCache:
    """The sequences that one cache holds, least recently used first. Prefixes are compared for real, so the numbers of
    cached tokens are those of a real engine."""

    _CANDIDATES = 2  # recent sequences that a prompt without a session is compared with

    def __init__(self, parallel: int) -> None:
        self._parallel = max(1, parallel)
        self._sequences: OrderedDict[str | int, list[int]] = OrderedDict()
        self._unnamed = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def tokens(self) -> int:
        return sum(map(len, self._sequences.values()))

    def take(self, ids: list[int], session: str | None) -> tuple[str | int, Accepted]:
        """Removes and returns the sequence that the prompt continues, until `put`. `divergence` is None if the prompt
        does not diverge from it."""
        key: str | int | None
        if session is not None and session in self._sequences:
            key, shared = session, common_prefix(self._sequences[session], ids)
        else:
            key, shared = self._best_match(ids)
        if key is None:
            self._unnamed += 1
            evicted = len(self._sequences) >= self._parallel
            if evicted:
                self._sequences.popitem(last=False)
            return session or self._unnamed, Accepted(evicted=evicted)
        sequence = self._sequences.pop(key)
        cached = max(0, min(shared, len(ids) - 1))  # the last token is always evaluated, to sample from it
        return session or key, Accepted(cached, shared if sequence and shared < len(ids) else None)

    def _best_match(self, ids: list[int]) -> tuple[str | int | None, int]:
        """A sequence of which the prompt shares less than half is another conversation; it is kept."""
        best: tuple[str | int | None, int] = (None, 0)
        for key, sequence in islice(reversed(self._sequences.items()), self._CANDIDATES):
            half = (len(sequence) + 1) // 2
            if sequence[:half] == ids[:half] and (shared := common_prefix(sequence, ids)) > best[1]:
                best = key, shared
        return best

    def put(self, key: str | int, ids: list[int]) -> None:
        self._sequences[key] = ids
        self._sequences.move_to_end(key)
        while len(self._sequences) > self._parallel:
            self._sequences.popitem(last=False)

    def copy(self) -> PrefixCache:
        copy = PrefixCache(self._parallel)
        copy._sequences, copy._unnamed = self._sequences.copy(), self._unnamed
        return copy

    def clear(self) -> None:
        self._sequences.clear()


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the common prefix, by bisection: slices are compared in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- chat engine ------------------------------------------------------------------------------------------------------


class FakeChatEngine(FakeEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, replace(CAPABILITIES, logprobs=False, lora=False, embeddings=False))

    async def open(self, progress: OnProgress) -> None:
        await super().open(progress)
        self.filler = find_filler(self.tokenizer)

    def chat(self, request: Request) -> Generation[Event]:
        return ChatJob(self, request).start()

    async def count(self, request: Request) -> int | None:
        return self.count_tokens(request)

    def count_tokens(self, request: Request) -> int:
        """An estimate, as a remote server's would be: the texts, and four tokens per message for the template."""
        texts = [_message_text(message) for message in request.messages]
        texts += [f"{tool.name}{tool.description}{tool.parameters}" for tool in request.tools]
        texts += [prompt for prompt in request.prompts if isinstance(prompt, str)]
        tokens = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
        return 4 * len(request.messages) + tokens + sum(len(self.tokenizer.encode_plain(text)) for text in texts)

    def steps(self, request: Request) -> Steps:
        choice, constraint = request.tool_choice, request.constraint
        if choice.mode in ("required", "named") and request.tools:
            constraint = Constraint("tools", tools=(choice.name,) if choice.name else ())
        return self.answer(RequestView(request), constraint, request.session)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.jobs))


class ChatJob(FakeJob[Event]):
    _engine: FakeChatEngine

    def __init__(self, engine: FakeChatEngine, request: Request) -> None:
        super().__init__(engine)
        self._request = request
        self._index = -1
        self._block: BlockKind | None = None  # the open one
        self._has_called = False
        self._tokens_left = request.max_tokens
        self._prompt_tokens = self._reasoning_tokens = 0

    def fail(self, error: ModelyardError) -> None:
        self._end(Failed(error))

    def _on_cancel(self) -> None:
        self.fail(Cancelled("the job was cancelled"))

    def _complete(self, reason: StopReason, stop: str | None = None) -> None:
        reason = "tool_calls" if reason == "end" and self._has_called else reason
        usage = Usage(self._prompt_tokens, 0, self.emitted, self._reasoning_tokens)
        self._end(Finished(reason, usage, stop, Timings(total=time.perf_counter() - self._started)))

    def _end(self, last: Finished | Failed) -> None:
        if self.queue.closed:
            return
        complete = isinstance(last, Finished) and last.reason in ("end", "tool_calls", "stop_string")
        self._finish([*([BlockEnd(self._index, complete=complete)] if self._block else []), last])

    def _run(self) -> Iterator[list[Event] | float | None]:
        steps = self._engine.steps(self._request)
        self._prompt_tokens = self._engine.count_tokens(self._request)
        if not (steps and steps[0].error):
            yield [Started(uuid4().hex, self._request.model, int(time.time()), Usage(self._prompt_tokens))]
        for step in unroll(steps):
            if step.delay is not None or step.prefill is not None:
                yield step.delay or step.prefill or 0.0
            elif step.hang is not None:
                if step.hang:
                    yield None
            elif (error := step.error) is not None:
                return self._play_failure(step, error)
            elif (yield from self._play_calls(step) if step.call is not None else self._play_text(step)):
                return None
        return self._complete("end")

    def _play_text(self, step: ScriptStep) -> Generator[list[Event] | float, None, bool]:
        """True if the text ends the answer: at a stop string or at the token limit."""
        kind: BlockKind = "thinking" if step.think is not None else "text"
        text = step.think or step.text or step.raw or ""
        if step.tokens is not None:
            text = self._engine.tokenizer.decode(filler_tokens(self._engine.filler, step.tokens))
        stops = [(at, stop) for stop in self._request.stop if (at := text.find(stop)) >= 0]
        at, stop = min(stops) if stops and kind == "text" else (len(text), None)
        if self._block != kind:
            yield [*self._close_block(), self._open_block(BlockStart(self._index + 1, kind))]
        if (yield from self._play_tokens(text[:at])):
            return True
        if stop is not None:
            self._complete("stop_string", stop)
        return stop is not None

    def _play_calls(self, step: ScriptStep) -> Generator[list[Event] | float, None, bool]:
        for call in step.calls:
            start = BlockStart(self._index + 1, "tool_call", f"call_{uuid4().hex[:24]}", call.name)
            yield [*self._close_block(), self._open_block(start)]
            if (yield from self._play_tokens(call.arguments_text)):
                return True
            yield self._close_block()
            self._has_called = True
        return False

    def _play_tokens(self, text: str) -> Generator[list[Event] | float, None, bool]:
        """Emits the text token by token; True if the token limit ends the answer."""
        detokenizer = self._engine.tokenizer.detokenizer()
        pieces = detokenizer.feed(self._engine.tokenizer.encode_plain(text)) + detokenizer.finish()
        texts = [piece.text for piece in pieces if piece.text][: self._tokens_left]
        self._reasoning_tokens += len(texts) if self._block == "thinking" else 0
        index = self._index
        yield from self._emit(texts, lambda batch: BlockDelta(index, "".join(batch)))
        if self._tokens_left is None:
            return False
        self._tokens_left -= len(texts)
        if self._tokens_left == 0:
            self._complete("max_tokens")
        return self._tokens_left == 0

    def _open_block(self, block: BlockStart) -> Event:
        self._index, self._block = block.index, block.kind
        return block

    def _close_block(self) -> list[Event]:
        block, self._block = self._block, None
        return [BlockEnd(self._index)] if block else []


def _message_text(message: Message) -> str:
    out: list[str] = [message.role]
    for part in message.parts:
        if isinstance(part, Text | Thinking):
            out.append(part.text)
        elif isinstance(part, ToolCall):
            out += (part.name, part.arguments)
        elif isinstance(part, ToolResult):
            out += (each.text for each in part.content if isinstance(each, Text))
    return "\n".join(out)
