"""The fake as a ChatEngine: a request in, events out, from the same script."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from uuid import uuid4

from modelyard.core.engine import EngineSpec, EngineStats, Generation
from modelyard.core.errors import Cancelled, ModelyardError
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
from modelyard.core.request import Constraint, Message, Request, Text, Thinking, ToolCall, ToolResult
from modelyard.engines.fake.base import Base, crash
from modelyard.engines.fake.conversation import RequestView
from modelyard.engines.fake.dialects import arguments_text
from modelyard.engines.fake.plan import filler, words
from modelyard.engines.fake.player import Beat, Paced, Pause, Player, Put, Standstill
from modelyard.engines.fake.script import ScriptRule, ScriptStep


class FakeChatEngine(Base):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, embeddings=False)

    def __repr__(self) -> str:
        return f"<FakeChatEngine {len(self.jobs)} running>"

    def chat(self, request: Request) -> Generation[Event]:
        return ChatJob(self, request).start()

    async def count(self, request: Request) -> int | None:
        return self.weigh(request)

    def weigh(self, request: Request) -> int:
        """Its own estimate, as an upstream's would be: the texts, and four tokens a message for the turn around it."""
        messages = sum(4 + len(self.vocab.encode_plain(_spelled(m))) for m in request.messages)
        tools = sum(len(self.vocab.encode_plain(f"{t.name}{t.description}{t.parameters}")) for t in request.tools)
        raw = sum(len(p) if isinstance(p, tuple) else len(self.vocab.encode_plain(p)) for p in request.prompts)
        return messages + tools + raw

    def steps(self, request: Request) -> tuple[ScriptStep, ...]:
        choice, constraint = request.tool_choice, request.constraint
        if choice.mode in ("required", "named") and request.tools:
            constraint = Constraint("tools", tools=(choice.name,) if choice.name else ())
        answer = self.answer(RequestView(request), constraint, request.session)
        return answer.steps if isinstance(answer, ScriptRule) else answer

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.jobs))


class ChatJob:
    def __init__(self, engine: FakeChatEngine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._player: Player[Event] = Player(self._beats(), engine.options.delay, self._cancel)
        self._index = -1
        self._open: BlockKind | None = None
        self._called = False
        self._left = request.max_tokens
        self._prompt = self._reasoning = 0
        self._began = time.perf_counter()

    def start(self) -> Generation[Event]:
        if self._engine.dead is not None:
            self._player.stop([Failed(self._engine.dead)])
            return self._player.box
        self._engine.jobs.add(self)
        self._player.play()
        return self._player.box

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        self._engine.soon(partial(self.fail, Cancelled("the job was cancelled")))

    def fail(self, error: ModelyardError) -> None:
        self._end(Failed(error))

    def _finish(self, reason: StopReason, stop: str | None = None) -> None:
        reason = "tool_calls" if reason == "end" and self._called else reason
        usage = Usage(self._prompt, 0, self._player.spoken, self._reasoning)
        self._end(Finished(reason, usage, stop, Timings(total=time.perf_counter() - self._began)))

    def _end(self, last: Finished | Failed) -> None:
        if self._player.box.closed:
            return
        whole = isinstance(last, Finished) and last.reason in ("end", "tool_calls", "stop_string")
        closing = [BlockEnd(self._index, complete=whole)] if self._open else []
        self._engine.jobs.discard(self)
        self._player.stop([*closing, last])

    # --- what it does -----------------------------------------------------------------------------------------------

    def _beats(self) -> Iterator[Beat]:
        """Whatever breaks in here ends this job, not the loop."""
        try:
            yield from self._play()
        except Exception as error:  # mapped and logged by crash()
            self.fail(crash(error))

    def _play(self) -> Iterator[Beat]:
        steps = list(self._engine.steps(self._request))
        self._prompt = self._engine.weigh(self._request)
        if not (steps and steps[0].error):
            yield Put([Started(uuid4().hex, self._request.model, int(time.time()), Usage(self._prompt))])
        for step in _walk(steps):
            over = yield from self._do(step)
            if over or self._player.box.closed:
                return
        self._finish("end")

    def _do(self, step: ScriptStep) -> Generator[Beat, None, bool]:
        """One step; True if the job is over with it."""
        if step.delay is not None or step.prefill is not None:
            yield Pause(step.delay or step.prefill or 0.0)
        elif step.hang:
            yield Standstill()
        elif (error := step.error) is not None:
            self._engine.die(error) if step.die is not None else self.fail(error)
        elif step.call is not None:
            return (yield from self._calls(step))
        else:
            return (yield from self._words(step))
        return False

    def _words(self, step: ScriptStep) -> Generator[Beat, None, bool]:
        kind: BlockKind = "thinking" if step.think is not None else "text"
        text, stop = self._stopped(self._text(step), kind)
        if self._open != kind:
            yield Put([*self._close(), self._start(BlockStart(self._index + 1, kind))])
        over = yield from self._speak(text)
        if stop is not None and not over:
            self._finish("stop_string", stop)
        return over or stop is not None

    def _text(self, step: ScriptStep) -> str:
        if step.tokens is not None:
            return self._engine.vocab.decode(words(filler(self._engine.vocab), step.tokens))
        return step.think or step.text or step.raw or ""

    def _stopped(self, text: str, kind: BlockKind) -> tuple[str, str | None]:
        """The earliest stop string in visible text, cut off with all that follows."""
        if kind == "thinking":
            return text, None
        found = [(at, stop) for stop in self._request.stop if (at := text.find(stop)) >= 0]
        return (text[: min(found)[0]], min(found)[1]) if found else (text, None)

    def _calls(self, step: ScriptStep) -> Generator[Beat, None, bool]:
        for call in step.calls:
            start = BlockStart(self._index + 1, "tool_call", f"call_{uuid4().hex[:24]}", call.name)
            yield Put([*self._close(), self._start(start)])
            if (yield from self._speak(arguments_text(call))):
                return True
            yield Put(self._close())
            self._called = True
        return False

    def _speak(self, text: str) -> Generator[Beat, None, bool]:
        """Token by token; True if the limit ended it."""
        pieces = self._pieces(text)
        kept = pieces if self._left is None else pieces[: self._left]
        self._reasoning += len(kept) if self._open == "thinking" else 0
        index = self._index
        if kept:
            yield Paced(kept, lambda chunk: BlockDelta(index, "".join(chunk)))
        if self._left is None:
            return False
        self._left -= len(kept)
        if self._left > 0:
            return False
        self._finish("max_tokens")
        return True

    def _pieces(self, text: str) -> list[str]:
        detokenizer = self._engine.vocab.detokenizer()
        pieces = detokenizer.feed(self._engine.vocab.encode_plain(text)) + detokenizer.finish()
        return [piece.text for piece in pieces if piece.text]

    def _start(self, block: BlockStart) -> Event:
        self._index, self._open = block.index, block.kind
        return block

    def _close(self) -> list[Event]:
        was, self._open = self._open, None
        return [BlockEnd(self._index)] if was else []


def _walk(steps: Iterable[ScriptStep]) -> Iterator[ScriptStep]:
    for step in steps:
        if step.repeat is None:
            yield step
        for _ in range(step.repeat or 0):
            yield from _walk(step.steps)


def _spelled(message: Message) -> str:
    out: list[str] = [message.role]
    for part in message.parts:
        if isinstance(part, Text | Thinking):
            out.append(part.text)
        elif isinstance(part, ToolCall):
            out += (part.name, part.arguments)
        elif isinstance(part, ToolResult):
            out += (each.text for each in part.content if isinstance(each, Text))
    return "\n".join(out)
