"""The load generator: drives an engine in this process, a chat engine, or a server by URL, and times every response.

    LoadGenerator ──→ start a conversation on a LoadTarget ──→ send its turns ──→ one Sample each ──→ a Round

A round is a closed loop (each stream starts its next conversation when one ends) or an open loop (conversations start
at a fixed rate).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Accepted, ChatEngine, Chunk, End, Generation, Prompt, TextEngine, TokenRun, Tokens
from modelyard.core.errors import Incomplete, ModelyardError, NotFound, Unavailable
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Usage
from modelyard.core.request import Message, Request, Sampling, Text
from modelyard.core.tokenizer import Tokenizer
from modelyard.protocols import openai_chat
from modelyard_bench.http_client import HttpClient, HttpResponse
from modelyard_bench.workload import PromptSizer, UserTurn, Workload, conversation

T = TypeVar("T")

_MAX_FAILURES = 3  # consecutive failed conversations after which a stream gives up for this round
_CANCEL_S = 30.0  # for a cancelled generation to free its slot
_REQUEST_ID = re.compile(r" \(id [0-9a-f]+\)$")


# --- samples ----------------------------------------------------------------------------------------------------------


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response as the client saw it. Times in seconds since the request was sent; `began_s` since the round began.

    `gaps_s` has one value for each token after those that came first; tokens that arrive together share their wait.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    began_s: float = 0.0
    ttft_s: float | None = None  # None: no token arrived
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    events: int = 0  # server-sent events, where a target counts them
    is_counted: bool = False  # the server reported no usage: `output_tokens` counts the chunks of the stream
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None if too few arrived, or all at once."""
        spent = sum(self.gaps_s)
        return len(self.gaps_s) / spent if spent > 0 else None

    @property
    def evaluated_tokens(self) -> int:
        """Prompt tokens that were in no cache."""
        return max(0, self.prompt_tokens - self.cached_tokens)


class Round(Struct, frozen=True, kw_only=True):
    """The responses of one round, requested by `streams` at a time, and the duration of the round."""

    streams: int
    wall_s: float
    samples: tuple[Sample, ...]

    @property
    def succeeded(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]

    @property
    def tokens_per_s(self) -> float:
        tokens = sum(sample.output_tokens for sample in self.succeeded)
        return tokens / self.wall_s if self.wall_s > 0 else float("nan")


class TokenTimer:
    """Records when tokens arrive, and makes a sample of them. Pure: the caller has the clock."""

    def __init__(self, sent_at: float) -> None:
        self._sent = self._last = sent_at
        self._ttft: float | None = None
        self._gaps: list[float] = []
        self.tokens = 0

    def add(self, at: float, tokens: int = 1) -> None:
        if tokens < 1:
            return
        if self._ttft is None:
            self._ttft = at - self._sent
        else:
            self._gaps += [(at - self._last) / tokens] * tokens
        self._last = at
        self.tokens += tokens

    def sample(self, ended_at: float, *, output_tokens: int | None = None, **fields: Any) -> Sample:
        """`output_tokens` as the server reports them. If they differ from the chunks that arrived, every chunk is
        assumed to hold the same number of tokens."""
        scale = self.tokens / output_tokens if output_tokens else 1.0
        return Sample(
            output_tokens=output_tokens if output_tokens is not None else self.tokens,
            ttft_s=self._ttft,
            total_s=ended_at - self._sent,
            gaps_s=tuple(gap * scale for gap in self._gaps),
            is_counted=output_tokens is None,
            **fields,
        )


class EventRecorder:
    """Records the events of one response. Every delta counts as a token until the server reports usage. Pure."""

    def __init__(self, sent_at: float) -> None:
        self._timer = TokenTimer(sent_at)
        self._usage = Usage()
        self._is_text = False
        self._is_over = False
        self._error: str | None = None
        self.text = ""  # visible text, for the next turn of the conversation

    def add(self, events: Iterable[Event], at: float) -> None:
        deltas = 0
        for event in events:
            if isinstance(event, BlockDelta):
                deltas += 1
                self.text += event.text if self._is_text else ""
            elif isinstance(event, BlockStart):
                self._is_text = event.kind == "text"
            elif isinstance(event, Finished):
                self._usage, self._is_over = event.usage, True
            elif isinstance(event, Failed):
                self._error, self._is_over = error_text(event.error), True
        self._timer.add(at, deltas)

    def sample(self, ended_at: float, error: str | None = None) -> Sample:
        usage = self._usage
        return self._timer.sample(
            ended_at,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.output if usage != Usage() else None,
            error=error or self._error or (None if self._is_over else "the response is incomplete"),
        )


def error_text(error: ModelyardError) -> str:
    """The message without its request id, so that equal errors are counted together."""
    return _REQUEST_ID.sub("", error.message)


# --- the generator ----------------------------------------------------------------------------------------------------


class LoadConversation(Protocol):
    """Keeps the history of the messages. `send` never raises for a failed request: the sample has the `error`."""

    async def send(self, turn: UserTurn) -> Sample: ...


class LoadTarget(Protocol):
    """What is measured. `name` labels it in tables."""

    name: str

    def start(self) -> LoadConversation: ...


class RoundLength(Struct, frozen=True):
    """A number of conversations per stream, or new conversations for a time, but at least one. Conversations that have
    started are finished. In an open loop the number is that of all conversations."""

    conversations: int | None = None
    seconds: float | None = None

    def is_reached(self, done: int, elapsed_s: float) -> bool:
        if self.conversations is not None:
            return done >= self.conversations
        return done > 0 and elapsed_s >= (self.seconds or 0.0)


class LoadGenerator:
    """One round. Rounds with another `key` get other prompts; without a workload the target has its own.

    With a `rate` (conversations per second) the loop is open. `ramp_s` spreads the start of the streams over a time.
    `result` may be read before the round is over.
    """

    def __init__(
        self,
        target: LoadTarget,
        workload: Workload | None,
        length: RoundLength = RoundLength(conversations=1),
        *,
        streams: int | None = None,
        rate: float | None = None,
        ramp_s: float = 0.0,
        seed: int = 0,
        key: str = "",
        on_sample: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        self._target, self._workload, self._length = target, workload, length
        self._streams = streams or (workload.streams if workload is not None else 1)
        self._rate, self._ramp_s = rate, ramp_s
        self._seed, self._key, self._on_sample = seed, key, on_sample
        self._samples: list[Sample] = []
        self._began = self._ended = 0.0

    async def run(self) -> Round:
        self._began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._rate is not None:
                    await self._open_loop(tasks, self._rate)
                else:
                    for number in range(self._streams):
                        tasks.create_task(self._closed_loop(number))
        finally:
            self._ended = time.perf_counter()
        return self.result()

    def result(self) -> Round:
        wall = (self._ended or time.perf_counter()) - self._began
        return Round(streams=self._streams, wall_s=wall, samples=tuple(self._samples))

    async def _closed_loop(self, number: int) -> None:
        if self._ramp_s:
            await asyncio.sleep(self._ramp_s * number / self._streams)
        failures = 0
        for done in count():
            if self._length.is_reached(done, time.perf_counter() - self._began) or failures == _MAX_FAILURES:
                return
            failures = 0 if await self._converse(f"{self._key} {number} {done}") else failures + 1

    async def _open_loop(self, tasks: asyncio.TaskGroup, rate: float) -> None:
        for number in count():
            await asyncio.sleep(max(0.0, self._began + number / rate - time.perf_counter()))
            if self._length.is_reached(number, time.perf_counter() - self._began):
                return
            tasks.create_task(self._converse(f"{self._key} {number}"))

    async def _converse(self, key: str) -> bool:
        """Whether every turn succeeded. A failed turn ends the conversation."""
        turns = (_NO_TURN,) if self._workload is None else conversation(self._workload, self._seed, key)
        history = self._target.start()
        for turn in turns:
            began = time.perf_counter() - self._began
            sample = replace(await history.send(turn), began_s=began)
            self._samples.append(sample)
            self._on_sample(sample)
            if sample.error is not None:
                return False
        return True


_NO_TURN = UserTurn("", 0, 0)


# --- engines in this process ------------------------------------------------------------------------------------------


async def _read(
    generation: Generation[T], add: Callable[[Sequence[T], float], None], limit_s: float
) -> tuple[float, str | None]:
    """Read a generation to its end; the time it ended, and an error if the time limit ended it."""
    error: str | None = None
    try:
        async with asyncio.timeout(limit_s):
            async for items in generation:
                add(items, time.perf_counter())
    except TimeoutError:
        error = f"not finished within {limit_s:g} s"
    finally:
        generation.cancel()
    ended = time.perf_counter()
    if error is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                async for _ in generation:
                    pass
    return ended, error


class EngineTarget:
    """An open TextEngine: token ids in and out, prompts and outputs of exactly the wanted length, no template."""

    def __init__(
        self, engine: TextEngine, tokenizer: Tokenizer, *, name: str = "", cache: str = "", limit_s: float = 600.0
    ) -> None:
        self.name = name or engine.info.backend
        self.engine, self.tokenizer, self.cache, self.limit_s = engine, tokenizer, cache, limit_s

    def start(self) -> _EngineConversation:
        return _EngineConversation(self)


class _EngineConversation:
    def __init__(self, target: EngineTarget) -> None:
        self._target = target
        bos = target.tokenizer.bos
        self._ids: list[int] = [] if bos is None else [bos]

    async def send(self, turn: UserTurn) -> Sample:
        target = self._target
        wanted = turn.tokens - (1 if len(self._ids) == 1 else 0)  # the BOS token counts
        self._ids += target.tokenizer.encode_plain(turn.text)[: max(1, wanted)]
        prompt = Prompt(
            parts=(TokenRun(list(self._ids)),),
            sampling=Sampling(temperature=0.0),
            max_tokens=turn.output_tokens,
            cache=target.cache,
        )  # no stop ids: the output has the wanted length
        timer, cached, end = TokenTimer(time.perf_counter()), 0, End("error", error=Incomplete("the stream has no end"))

        def add(chunks: Sequence[Chunk], at: float) -> None:
            nonlocal cached, end
            for chunk in chunks:
                if isinstance(chunk, Tokens):
                    timer.add(at, len(chunk.ids))
                    self._ids += chunk.ids
                elif isinstance(chunk, Accepted):
                    cached = chunk.cached_tokens
                elif isinstance(chunk, End):
                    end = chunk

        try:
            ended, error = await _read(target.engine.generate(prompt), add, target.limit_s)
        except ModelyardError as refused:  # before it became a job
            return Sample(prompt_tokens=prompt.n_tokens, error=error_text(refused))
        if error is None and end.error is not None:
            error = error_text(end.error)
        counts = {"prompt_tokens": prompt.n_tokens, "cached_tokens": cached, "output_tokens": timer.tokens}
        return timer.sample(ended, error=error, **counts)


class ChatTarget:
    """An open ChatEngine: messages in, events out."""

    def __init__(self, engine: ChatEngine, model: str, *, name: str = "", limit_s: float = 600.0) -> None:
        self.name = name or engine.info.backend
        self.engine, self.model, self.limit_s = engine, model, limit_s
        self.sizer = PromptSizer()

    def start(self) -> ChatConversation:
        return ChatConversation(self)

    async def chat(self, messages: Sequence[Mapping[str, Any]], output_tokens: int) -> tuple[Sample, str]:
        request = Request(
            model=self.model,
            messages=tuple(Message(message["role"], (Text(message["content"]),)) for message in messages),
            sampling=Sampling(temperature=0.0),
            max_tokens=output_tokens,
            stream=True,
            include_usage=True,
        )
        recorder = EventRecorder(time.perf_counter())
        try:
            ended, error = await _read(self.engine.chat(request), recorder.add, self.limit_s)
        except ModelyardError as refused:  # before it became a job
            return Sample(error=error_text(refused)), ""
        return recorder.sample(ended, error), recorder.text


class ChatConversation:
    """The messages of both roles. The target's `chat` sends them and returns the sample and the response's text."""

    def __init__(self, target: ChatTarget | UrlTarget) -> None:
        self._target = target
        self._messages: list[dict[str, str]] = []

    async def send(self, turn: UserTurn) -> Sample:
        sizer = self._target.sizer
        text = sizer.later_message(turn) if self._messages else sizer.first_message(turn)
        self._messages.append({"role": "user", "content": text})
        sample, reply = await self._target.chat(self._messages, turn.output_tokens)
        if len(self._messages) == 1:
            sizer.learn(text, sample.prompt_tokens)
        self._messages.append({"role": "assistant", "content": reply})
        return sample


# --- servers ----------------------------------------------------------------------------------------------------------

_COMPLETIONS = "/chat/completions"


def base_url(url: str) -> str:
    """The URL that `/chat/completions` and `/models` are appended to; users give it with or without `/v1` and more."""
    base = url.rstrip("/").removesuffix(_COMPLETIONS)
    return base if urlsplit(base).path else f"{base}/v1"


class UrlTarget:
    """Any server with OpenAI's chat completions, streamed. Use it in `async with`.

    Without a model it uses the first that the server lists. `extra` is added to every request.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        name: str = "",
        limit_s: float = 600.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.base, self.name, self.limit_s = base_url(url), name or url, limit_s
        self._model, self._extra = model, dict(extra or {})
        self._path = urlsplit(self.base).path
        self._client = HttpClient(self.base, key=key)
        self.sizer = PromptSizer()

    async def __aenter__(self) -> Self:
        try:
            self._model = self._model or await self._first_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @property
    def model(self) -> str:
        return self._model or ""

    def start(self) -> ChatConversation:
        return ChatConversation(self)

    async def chat(self, messages: Sequence[Mapping[str, Any]], output_tokens: int) -> tuple[Sample, str]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = msgspec.json.encode(body | self._extra)
        return read_chat(await self._client.send("POST", self._path + _COMPLETIONS, sent, self.limit_s))

    async def _first_model(self) -> str:
        reply = await self._client.send("GET", f"{self._path}/models", b"", self.limit_s)
        if reply.error is not None:
            raise Unavailable(f"{self.base} does not respond: {reply.error}")
        if reply.status != 200:
            raise openai_chat.read_error(reply.status, reply.headers, reply.body)
        try:
            return str(msgspec.json.decode(reply.body)["data"][0]["id"])
        except (msgspec.MsgspecError, LookupError, TypeError):
            raise NotFound(f"{self.base} lists no models; name one with --model") from None


def read_chat(response: HttpResponse) -> tuple[Sample, str]:
    """A streamed chat completion: the sample, and the text."""
    recorder, error = EventRecorder(response.sent), response.error
    if error is None and response.status != 200:
        refused = openai_chat.read_error(response.status, response.headers, response.body)
        error = f"{response.status}: {error_text(refused)}"
    elif response.status == 200:
        reader = openai_chat.reader()
        for at, data in response.parts:
            recorder.add(reader.feed(data), at)
        if error is None:
            recorder.add(reader.finish(), response.ended)
    return recorder.sample(response.ended, error), recorder.text
