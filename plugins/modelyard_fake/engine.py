"""The two fake engines: `FakeTextEngine` emits token ids, `FakeChatEngine` emits events, both from the same script.

A job is a generator (`FakeJob._run`) that yields batches of output and pauses. It needs no task: `advance` drives it
until it pauses, and a timer continues it. A job without pauses runs to its end inside `generate`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from uuid import uuid4

from msgspec.structs import replace

from modelyard.core import events
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
from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
)
from modelyard.core.events import BlockKind, Event, StopReason, Timings, Usage
from modelyard.core.request import Constraint, Request, Sampling
from modelyard.core.tokenizer import IdLogprob, Tokenizer
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard_fake.answers import OutputEncoder, constrained_answer, demo_answer
from modelyard_fake.script import (
    ConversationView,
    FakeOptions,
    PromptView,
    RequestView,
    Script,
    ScriptStep,
    message_text,
    tokenizer_path,
    unroll,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Output = TypeVar("Output")  # what one step emits: token ids or a block
EndReason = Literal["stop", "length", "window", "cancelled", "error"]
Batches = Iterator[list[T] | float | None]  # items to write, seconds to wait, or None to wait for ever
Playback = Generator[list[T] | float, None, EndReason | None]  # returns the reason if the output has ended the job
SequenceName = str | int  # the session, or a number
Sequences = OrderedDict[tuple[str, SequenceName], list[int]]  # by scope and name

_IGNORED = Sampling.__struct_fields__
CAPABILITIES = Capabilities(
    ("text", "image"),
    structured=True,
    logprobs=True,
    prompt_logprobs=True,
    lora=True,
    embeddings=True,
    rerank=True,
    ignored=_IGNORED,
)
_TIMER_ERROR_S = 0.0005  # uvloop's timers and clock count milliseconds: asked again, it would spin until the next one
BURST = 4096  # tokens of one batch; then the job yields to the event loop
QUEUE_LIMIT = 256  # items that may wait for the reader
_MAX_CACHED_STEPS = 1000  # a longer answer is encoded again for every job
_PREFILL_REPORTS = 8  # progress reports if only `prefill_rate` sets the duration of the prefill


class FakeEngine(ABC, Generic[Output]):
    """The part that both engines share: script, tokenizer, running jobs. Create it on its event loop."""

    tokenizer: Tokenizer

    def __init__(self, spec: EngineSpec, capabilities: Capabilities) -> None:
        self.options: FakeOptions = spec.options
        self.delay = self.options.delay
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.lost: asyncio.Future[ModelyardError] = self.loop.create_future()
        self.info = EngineInfo("fake", dict(spec.caches), replace(capabilities, modalities=spec.modalities))
        self.jobs: set[FakeJob[Any, Output]] = set()
        self.closed: ModelyardError | None = None
        self._waiting: deque[tuple[float, FakeJob[Any, Output]]] = deque()  # for the next token: (time, job)
        self._token_timer: asyncio.Handle | None = None
        self._script = Script(self.options.script)
        self._encoded: dict[tuple[int, bool], list[Output | ScriptStep]] = {}  # by (id of a rule, in_reasoning)

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "reading the tokenizer")
        self.tokenizer = await asyncio.to_thread(HuggingFaceTokenizer.load, tokenizer_path(self.options))
        self.encoder = OutputEncoder(self.tokenizer, self.options.format)
        progress(1.0, "ready")

    async def close(self) -> None:
        self._fail_all(Unavailable("the engine was closed"))

    def die(self, error: ModelyardError) -> None:
        self._fail_all(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def wait_for_token(self, job: FakeJob[Any, Output]) -> None:
        """Continues the job after `delay`. All jobs wait equally long, so a queue with one timer serves all of them."""
        self._waiting.append((self.loop.time() + self.delay, job))
        if self._token_timer is None:
            self._token_timer = self.loop.call_later(self.delay, self._continue_jobs)

    def _continue_jobs(self) -> None:
        due, waiting = self.loop.time() + _TIMER_ERROR_S, self._waiting
        for _ in range(len(waiting)):  # each job once: it waits again for its next token
            if waiting[0][0] > due:
                break
            waiting.popleft()[1].advance()
        self._token_timer = self.loop.call_at(waiting[0][0], self._continue_jobs) if waiting else None

    def _fail_all(self, error: ModelyardError) -> None:
        self.closed = error
        for job in tuple(self.jobs):
            job.fail(error)

    def answer(
        self, view: ConversationView, constraint: Constraint | None, session: str | None, in_reasoning: bool = False
    ) -> Iterator[Output | ScriptStep]:
        """The outputs of the answer, and the steps that wait or fail."""
        rule = self._script.choose(view, session)
        steps = None
        if constraint is not None and (rule is None or rule.is_unconditional):
            steps = constrained_answer(constraint, view)
        if rule is None and steps is None:
            steps = (ScriptStep(text=view.user),) if self.options.echo else demo_answer(view)
        if rule is None or steps is not None:
            return self.encode(steps or (), in_reasoning)
        if (encoded := self._encoded.get((id(rule), in_reasoning))) is not None:
            return iter(encoded)
        rest = self.encode(rule.steps, in_reasoning)
        encoded = list(islice(rest, _MAX_CACHED_STEPS))
        if len(encoded) < _MAX_CACHED_STEPS:
            self._encoded[id(rule), in_reasoning] = encoded
        return chain(encoded, rest)

    @abstractmethod
    def encode(self, steps: Iterable[ScriptStep], in_reasoning: bool) -> Iterator[Output | ScriptStep]: ...


class FakeJob(ABC, Generic[T, Output]):
    """Drives `_run` and writes its batches to `_queue`. Initial values are class attributes to avoid writes per job."""

    _timer: asyncio.Handle | None = None
    _deadline: asyncio.Handle | None = None
    _is_blocked = False
    _prefill_delay = 0.0  # seconds, by `prefill_rate`
    _emitted = 0  # tokens that were written
    _limit = sys.maxsize
    _limit_reason: EndReason = "length"

    def __init__(self, engine: FakeEngine[Output]) -> None:
        self._engine = engine
        self._batches = self._run()
        self._started = time.perf_counter()
        self._queue: GenerationQueue[T] = GenerationQueue(
            on_cancel=self._cancel, on_drained=self._resume, limit=QUEUE_LIMIT, loop=engine.loop
        )

    @abstractmethod
    def _choose_answer(self) -> Iterator[Output | ScriptStep]: ...
    @abstractmethod
    def _accept(self) -> list[T]: ...
    @abstractmethod
    def _prefill(self, seconds: float, reports: int) -> Batches[T]: ...
    @abstractmethod
    def _play(self, output: Output) -> Playback[T]: ...
    @abstractmethod
    def _last_items(self, reason: EndReason, error: ModelyardError | None) -> list[T]: ...

    def _run(self) -> Batches[T]:
        answer = self._choose_answer()
        step = next(answer, None)
        if not isinstance(step, ScriptStep) or step.error is None:  # else it fails before it is accepted
            yield self._accept()
            if self._prefill_delay and not (isinstance(step, ScriptStep) and step.prefill is not None):
                yield from self._prefill(self._prefill_delay, _PREFILL_REPORTS)
        while step is not None:
            if not isinstance(step, ScriptStep):
                if reason := (yield from self._play(step)):
                    return self._end(reason)
            elif (error := step.error) is not None:
                return self._engine.die(error) if step.die is not None else self.fail(error)
            elif step.prefill is not None:
                yield from self._prefill(step.prefill, step.progress)
            elif step.delay is not None:
                yield step.delay
            elif step.hang:
                yield None
            step = next(answer, None)
        return self._end("stop")

    def _emit(self, tokens: Sequence[Any], write: Callable[[Any], T]) -> Playback[T]:
        """Emits one token per `token_delay`; without a delay everything at once."""
        tokens, delay = tokens[: self._limit - self._emitted], self._engine.delay
        size = 1 if delay else BURST
        for at in range(0, len(tokens), size):
            batch = tokens[at : at + size]
            self._emitted += len(batch)
            yield [write(batch)]
            if delay or at + size < len(tokens):
                yield delay
        return self._limit_reason if self._emitted >= self._limit else None

    def fail(self, error: ModelyardError) -> None:
        """Ends the job with the error; does nothing if it has ended."""
        self._end("cancelled" if isinstance(error, Cancelled) else "error", error)

    def _end(self, reason: EndReason, error: ModelyardError | None = None) -> None:
        if self._queue.closed:
            return
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._batches = iter(())  # breaks the reference cycle of job and generator, which costs garbage collection
        self._engine.jobs.discard(self)
        self._queue.put_many(self._last_items(reason, error), last=True)

    def start(self, deadline: float | None = None) -> GenerationQueue[T]:
        if self._engine.closed is not None:
            self.fail(self._engine.closed)
        else:
            self._engine.jobs.add(self)
            self.advance()
        if deadline is not None and not self._queue.closed:  # only a job that pauses needs the timer
            remaining, expired = max(0.0, deadline - time.monotonic()), Timeout("the deadline of the job passed")
            self._deadline = self._engine.loop.call_later(remaining, self.fail, expired)
        return self._queue

    def advance(self) -> None:
        self._timer = None
        queue = self._queue
        try:
            for batch in self._batches:
                if not isinstance(batch, list):
                    if batch is not None and batch == self._engine.delay:
                        self._engine.wait_for_token(self)
                    elif batch is not None:
                        self._timer = self._engine.loop.call_later(batch, self.advance)
                    return
                self._is_blocked = not queue.put_many(batch)
                if self._is_blocked or queue.closed:  # the reader may cancel inside put_many
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
            self._timer = self._engine.loop.call_soon(self.advance)

    def _cancel(self) -> None:
        cancelled = Cancelled("the job was cancelled")
        if threading.get_ident() == self._engine.thread:
            self.fail(cancelled)
        else:
            self._engine.loop.call_soon_threadsafe(self.fail, cancelled)


# --- text engine ------------------------------------------------------------------------------------------------------


class FakeTextEngine(FakeEngine[list[int]]):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, CAPABILITIES)
        self.reused_tokens = self.evaluated_tokens = 0
        self._caches = {name: PrefixCache(info) for name, info in spec.caches.items()}
        self._saved: dict[str, dict[str, Sequences]] = {}

    def encode(self, steps: Iterable[ScriptStep], in_reasoning: bool) -> Iterator[list[int] | ScriptStep]:
        return self.encoder.encode(steps, in_reasoning=in_reasoning)

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return TextJob(self, prompt).start(prompt.deadline)

    def cache(self, name: str) -> PrefixCache:
        """The first cache if `name` is empty."""
        found = self._caches.get(name or next(iter(self._caches), ""))
        if found is None:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(self._caches)}")
        return found

    def stats(self) -> EngineStats:
        sequences = [ids for cache in self._caches.values() for ids in cache.sequences.values()]
        return EngineStats(
            running=len(self.jobs),
            sequences=len(sequences),
            occupied_tokens=sum(map(len, sequences)),
            reused_tokens=self.reused_tokens,
            evaluated_tokens=self.evaluated_tokens,
        )

    async def control(self, op: Control) -> None:
        """Adapters are accepted and have no effect."""
        names, file = [op.cache] if op.cache is not None else list(self._caches), op.argument or ""
        if op.op == "evict":
            for name in names:
                self.cache(name).sequences.clear()
        elif op.op == "save":
            self._saved[file] = {name: self.cache(name).sequences.copy() for name in names}
        elif op.op == "restore":
            if file not in self._saved:
                raise NotFound(f"no cache was saved under the name {file!r}")
            for name, sequences in self._saved[file].items():
                self.cache(name).sequences = sequences.copy()

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        size = self.options.embedding_size
        return Embeddings([unit_vector(ids, size) for ids in batch], sum(map(len, batch)))


class TextJob(FakeJob[Chunk, list[int]]):
    _engine: FakeTextEngine
    _cached = 0
    _sequence: SequenceName | None = None  # its name in the cache, once the job is accepted
    _prefill_s: float | None = None  # since the start, as the next one
    _first_token_s: float | None = None

    def __init__(self, engine: FakeTextEngine, prompt: Prompt) -> None:
        super().__init__(engine)
        self._prompt, self._ids, self._total = prompt, prompt.ids, prompt.n_tokens
        self._output: list[int] = []

    def _last_items(self, reason: EndReason, error: ModelyardError | None) -> list[Chunk]:
        if self._sequence is not None:
            self._cache.put(self._sequence, self._ids + self._output, self._prompt.scope)
        total, first = time.perf_counter() - self._started, self._first_token_s
        decode = total - first if first is not None else None
        timings = Timings(prefill=self._prefill_s, first_token=first, decode=decode, backend=total, total=total)
        usage = Usage(self._total, self._cached, self._emitted)
        return [End(reason, usage, timings, error if reason == "error" else None)]

    def _choose_answer(self) -> Iterator[list[int] | ScriptStep]:
        prompt = self._prompt
        self._cache = self._engine.cache(prompt.cache)
        window = self._cache.window
        if self._total >= window:
            raise ContextOverflow(self._total, window)
        self._limit = min(window - self._total, prompt.max_tokens)
        self._limit_reason = "window" if self._limit < prompt.max_tokens else "length"
        if min(self._ids, default=0) < 0:
            raise InvalidRequest("the prompt holds token ids that are no tokens")
        view = PromptView(self._ids, self._engine.tokenizer)
        return self._engine.answer(view, prompt.constraint, prompt.session, view.starts_in_reasoning)

    def _accept(self) -> list[Chunk]:
        """With the log probabilities of the prompt, if they are wanted."""
        prompt = self._prompt
        self._sequence, accepted = self._cache.take(self._ids, prompt.session, prompt.scope)
        self._cached, rate = accepted.cached_tokens, self._engine.options.prefill_rate
        evaluated = self._total - self._cached
        self._engine.reused_tokens += self._cached
        self._engine.evaluated_tokens += evaluated
        self._prefill_delay = 0.0 if rate is None else evaluated / rate
        self._prefill_s = time.perf_counter() - self._started
        if (count := prompt.prompt_logprobs) is None:
            return [accepted]
        size = self._engine.tokenizer.size
        logprobs = [fake_logprob(token, count, size) for token in self._ids[1:]]
        return [accepted, Progress(self._total, self._total, logprobs)]

    def _prefill(self, seconds: float, reports: int) -> Batches[Chunk]:
        parts = max(1, reports)
        for part in range(1, parts + 1):
            yield seconds / parts
            if reports:
                yield [Progress(self._cached + (self._total - self._cached) * part // parts, self._total)]
        self._prefill_s = time.perf_counter() - self._started

    def _play(self, output: list[int]) -> Playback[Chunk]:
        stops = [output.index(token) for token in self._prompt.stop_ids if token in output]
        reason = yield from self._emit(output[: min(stops)] if stops else output, self._write)
        return reason or ("stop" if stops else None)

    def _write(self, ids: list[int]) -> Tokens:
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._started
        self._output += ids
        if (count := self._prompt.logprobs) is None:
            return Tokens(ids)
        return Tokens(ids, [fake_logprob(token, count, self._engine.tokenizer.size) for token in ids])


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

    def __init__(self, info: CacheInfo) -> None:
        self.window, self._parallel = info.window, max(1, info.parallel)
        self.sequences: Sequences = OrderedDict()
        self._unnamed = 0

    def take(self, ids: list[int], session: str | None, scope: str = "") -> tuple[SequenceName, Accepted]:
        """Removes and returns the sequence that the prompt continues, until `put`. `divergence` is None if the prompt
        does not diverge from it. Sequences of another scope are not looked at."""
        best: SequenceName | None = None
        shared = 0
        if session is not None and (scope, session) in self.sequences:
            best, shared = session, common_prefix(self.sequences[scope, session], ids)
        else:
            candidates = 0
            for (owner, name), sequence in reversed(self.sequences.items()):
                if owner != scope:
                    continue
                candidates += 1
                if candidates > self._CANDIDATES:
                    break
                # A sequence of which the prompt shares less than half is another conversation; it is kept.
                half = (len(sequence) + 1) // 2
                if sequence[half - 1 : half] != ids[half - 1 : half]:
                    continue  # most differ here: nothing long has to be copied
                if sequence[:half] == ids[:half] and (length := common_prefix(sequence, ids)) > shared:
                    best, shared = name, length
        if best is None:
            self._unnamed += 1
            evicted = len(self.sequences) >= self._parallel
            if evicted:
                self.sequences.popitem(last=False)
            return session or self._unnamed, Accepted(evicted=evicted)
        sequence = self.sequences.pop((scope, best))
        cached = max(0, min(shared, len(ids) - 1))  # the last token is always evaluated, to sample from it
        return session or best, Accepted(cached, shared if sequence and shared < len(ids) else None)

    def put(self, name: SequenceName, ids: list[int], scope: str = "") -> None:
        self.sequences[scope, name] = ids
        self.sequences.move_to_end((scope, name))
        while len(self.sequences) > self._parallel:
            self.sequences.popitem(last=False)


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the common prefix, by bisection: slices are compared in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- chat engine ------------------------------------------------------------------------------------------------------


class BlockOutput(NamedTuple):
    kind: BlockKind
    text: str
    name: str = ""  # of the called tool


class FakeChatEngine(FakeEngine[BlockOutput]):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(
            spec,
            replace(CAPABILITIES, logprobs=False, prompt_logprobs=False, lora=False, embeddings=False, rerank=False),
        )
        self.pieces = lru_cache(maxsize=1024)(self._split)

    def encode(self, steps: Iterable[ScriptStep], in_reasoning: bool) -> Iterator[BlockOutput | ScriptStep]:
        del in_reasoning
        for step in unroll(steps):
            if step.think is not None:
                yield BlockOutput("thinking", step.think)
            elif step.call is not None:
                yield from (BlockOutput("tool_call", call.arguments_text, call.name) for call in step.calls)
            elif step.tokens is not None:
                yield BlockOutput("text", self.tokenizer.decode(self.encoder.filler(step.tokens)))
            elif (text := step.text if step.raw is None else step.raw) is not None:
                yield BlockOutput("text", text)
            else:
                yield step

    def _split(self, text: str) -> list[str]:
        """One text per token; a character that has several tokens is not split."""
        detokenizer = self.tokenizer.detokenizer()
        pieces = detokenizer.feed(self.tokenizer.encode_plain(text)) + detokenizer.finish()
        return [piece.text for piece in pieces if piece.text]

    def chat(self, request: Request) -> Generation[Event]:
        return ChatJob(self, request).start()

    async def count(self, request: Request) -> int | None:
        return self.count_tokens(request)

    def count_tokens(self, request: Request) -> int:
        """An estimate, as a remote server's would be: the texts, and four tokens per message for the template."""
        texts = [message_text(message, everything=True) for message in request.messages]
        texts += [f"{tool.name}{tool.description}{tool.parameters}" for tool in request.tools]
        texts += [prompt for prompt in request.prompts if isinstance(prompt, str)]
        tokens = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
        return 4 * len(request.messages) + tokens + sum(len(self.tokenizer.encode_plain(text)) for text in texts)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.jobs))


class ChatJob(FakeJob[Event, BlockOutput]):
    _engine: FakeChatEngine
    _index = -1
    _block: BlockKind | None = None  # the open one
    _stop: str | None = None
    _has_called = False
    _prompt_tokens = _reasoning_tokens = 0

    def __init__(self, engine: FakeChatEngine, request: Request) -> None:
        super().__init__(engine)
        self._request = request
        if request.max_tokens is not None:
            self._limit = request.max_tokens

    def _last_items(self, reason: EndReason, error: ModelyardError | None) -> list[Event]:
        end: list[Event] = [events.BlockEnd(self._index, complete=reason == "stop")] if self._block else []
        if error is not None:
            return [*end, events.Failed(error)]
        usage = Usage(self._prompt_tokens, 0, self._emitted, self._reasoning_tokens)
        timings = Timings(total=time.perf_counter() - self._started)
        finish: StopReason = "tool_calls" if self._has_called else "end"
        if reason != "stop" or self._stop is not None:
            finish = "max_tokens" if reason != "stop" else "stop_string"
        return [*end, events.Finished(finish, usage, self._stop, timings)]

    def _choose_answer(self) -> Iterator[BlockOutput | ScriptStep]:
        request, choice, constraint = self._request, self._request.tool_choice, self._request.constraint
        self._prompt_tokens = self._engine.count_tokens(request)
        if choice.mode in ("required", "named") and request.tools:
            constraint = Constraint("tools", tools=(choice.name,) if choice.name else ())
        return self._engine.answer(RequestView(request), constraint, request.session)

    def _accept(self) -> list[Event]:
        return [events.Started(uuid4().hex, self._request.model, int(time.time()), Usage(self._prompt_tokens))]

    def _prefill(self, seconds: float, reports: int) -> Batches[Event]:
        del reports  # a remote server has none
        yield seconds

    def _play(self, output: BlockOutput) -> Playback[Event]:
        kind, text, name = output
        stops = [(at, stop) for stop in self._request.stop if kind == "text" and (at := text.find(stop)) >= 0]
        at, self._stop = min(stops, default=(len(text), None))
        if self._block != kind:
            end: list[Event] = [events.BlockEnd(self._index)] if self._block else []
            self._index, self._block = self._index + 1, kind
            call_id = f"call_{uuid4().hex[:24]}" if kind == "tool_call" else ""
            yield [*end, events.BlockStart(self._index, kind, call_id, name)]
        index, before = self._index, self._emitted
        pieces = self._engine.pieces(text[:at])
        reason = yield from self._emit(pieces, lambda batch: events.BlockDelta(index, "".join(batch)))
        self._reasoning_tokens += self._emitted - before if kind == "thinking" else 0
        if reason is None and kind == "tool_call":
            self._has_called, self._block = True, None
            yield [events.BlockEnd(index)]
        return reason or ("stop" if stops else None)
