"""Replay memory: what the model generated for each tool call, so that the next turn's prompt repeats it exactly.

Clients return a call with reformatted arguments and without its reasoning. Rendered as they return it, the prompt
differs from the tokens in the KV cache, and the turn is evaluated again. The memory is bounded and scoped by API key;
several gateways share it through a store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Block, BlockDelta, BlockStart, Event, Reply, Usage, collect_reply
from modelyard.core.request import Message, Part, Request, Text, Thinking, ToolCall
from modelyard.core.store import Store
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.scanner.scanner import Scanner

log = logging.getLogger("modelyard.gateway")

_MAX_CHARS = 32 << 20
_ENTRY_OVERHEAD = 200
_PROPAGATION_S = 2.0  # a client's next turn may arrive before another gateway's entry reaches the store

_MemoryKey = tuple[str, str]  # the API key's name and the call's id


class GeneratedCall(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What was generated for one call. The first call of a turn also carries the turn's reasoning, and its text if that
    has more line breaks than clients are shown."""

    arguments: str
    thinking: str = ""
    text: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(GeneratedCall).decode
_decode_json = msgspec.json.Decoder().decode


class _Miss(msgspec.Struct, frozen=True):
    """The store did not have the entry at time `at`. After a second miss it is `final`."""

    at: float
    final: bool = False


class ReplayMemory:
    """`store` is shared with other gateways; without one, only this process's requests are known."""

    def __init__(
        self,
        store: Store | None = None,
        max_chars: int = _MAX_CHARS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._max_chars, self._chars, self._clock = store, max_chars, 0, clock
        self._entries: OrderedDict[_MemoryKey, GeneratedCall | _Miss] = OrderedDict()
        self.is_empty = store is None  # until the first entry; another gateway may have written to the store

    async def restore(self, request: Request, key: str) -> Request:
        """The request with the generated arguments, reasoning and text where they are known."""
        if self.is_empty:
            return request
        found = await self._find(dict.fromkeys(call_ids(request.messages)), key)
        return replace(request, messages=restored(request.messages, found)) if found else request

    async def _find(self, ids: Mapping[str, None], key: str) -> dict[str, GeneratedCall]:
        if self._store is not None and (unknown := [id for id in ids if self._should_look_up((key, id))]):
            for id, value in zip(unknown, await self._load(self._store, unknown, key), strict=False):
                if value is None:
                    self._put((key, id), _Miss(self._clock(), final=(key, id) in self._entries))
                else:
                    self._put((key, id), _decode(value))
        found: dict[str, GeneratedCall] = {}
        for id in ids:
            if isinstance(entry := self._entries.get((key, id)), GeneratedCall):
                self._entries.move_to_end((key, id))
                found[id] = entry
        return found

    def _should_look_up(self, name: _MemoryKey) -> bool:
        entry = self._entries.get(name)
        if isinstance(entry, _Miss):
            return not entry.final and self._clock() - entry.at > _PROPAGATION_S
        return entry is None

    async def _load(self, store: Store, ids: list[str], key: str) -> list[bytes | None]:
        """A failing store costs a longer prefill, not the request."""
        try:
            return await asyncio.gather(*(store.get(_scope(key), id) for id in ids))
        except ModelyardError as error:
            log.warning("earlier tool calls could not be looked up: %s", error.message)
            return []

    def keep(self, reply: Reply, key: str, text: str = "") -> dict[str, GeneratedCall]:
        """Remember the calls in this process; return what `share` should write to the store."""
        calls = generated_calls(reply, text)
        for id, call in calls.items():
            self._put((key, id), call)
        return calls if self._store is not None else {}

    async def share(self, calls: Mapping[str, GeneratedCall], key: str) -> None:
        if self._store is not None:
            await asyncio.gather(*(self._store.put(_scope(key), id, _encode(call)) for id, call in calls.items()))

    def _put(self, name: _MemoryKey, entry: GeneratedCall | _Miss) -> None:
        self._chars += _size(entry) - (_size(self._entries.pop(name)) if name in self._entries else 0)
        self._entries[name] = entry
        self.is_empty = False
        while self._chars > self._max_chars and self._entries:
            self._chars -= _size(self._entries.popitem(last=False)[1])


def _size(entry: GeneratedCall | _Miss) -> int:
    if isinstance(entry, _Miss):
        return _ENTRY_OVERHEAD
    return _ENTRY_OVERHEAD + len(entry.arguments) + len(entry.thinking) + len(entry.text)


def _scope(key: str) -> str:
    return f"calls/{key}"


# --- from a reply to entries ----------------------------------------------------------------------------------------


def generated_reply(
    prepared: PreparedRequest, events: Sequence[Event] | None, ids: Sequence[int] | None, usage: Usage
) -> Reply | None:
    """The reply with its reasoning, also where the client was not shown it. None if the events were not kept."""
    if not events:
        return None
    reply = collect_reply(events)
    if not usage.reasoning or reply.thinking or not ids:
        return reply
    return replace(reply, blocks=(Block(Thinking(hidden_reasoning(prepared, ids))), *reply.blocks))


def hidden_reasoning(prepared: PreparedRequest, ids: Sequence[int]) -> str:
    """The reasoning in a reply's tokens, scanned once more with reasoning shown."""
    pipeline, request = prepared.model.pipeline, prepared.request
    scanner = Scanner(
        pipeline.format_for(request),
        tools=request.tools,
        prefill=pipeline.renderer.tail(prepared.prompts[0].text),
        new_id=str,
        specials=pipeline.specials,
    )
    events = scanner.feed(pipeline.tokenizer.detokenizer().feed(ids))
    thinking = {event.index for event in events if isinstance(event, BlockStart) and event.kind == "thinking"}
    return "".join(event.text for event in events if isinstance(event, BlockDelta) and event.index in thinking)


def generated_calls(reply: Reply, text: str = "") -> dict[str, GeneratedCall]:
    found: dict[str, GeneratedCall] = {}
    for call in reply.calls:
        found[call.id] = GeneratedCall(call.arguments) if found else GeneratedCall(call.arguments, reply.thinking, text)
    return found


def text_before_calls(prepared: PreparedRequest, reply: Reply, ids: Sequence[int] | None) -> str:
    """The text before the calls, if it must be rendered differently from what the client got; else empty."""
    if not ids or not reply.calls:
        return ""
    pipeline = prepared.model.pipeline
    return with_line_breaks(reply, pipeline.tokenizer.decode(ids), pipeline.renderer.separator)


def with_line_breaks(reply: Reply, raw: str, separator: str) -> str:
    """The text before the calls with the line breaks that the model generated after it, without the `separator` that
    the template adds. Empty if the text needs no change."""
    texts = [block.part.text for block in reply.blocks if isinstance(block.part, Text)]
    if len(texts) != 1 or not texts[0] or (at := raw.find(texts[0])) < 0:
        return ""
    rest = raw[at + len(texts[0]) :]
    space = rest[: len(rest) - len(rest.lstrip())]
    extra = space.removesuffix(separator)
    return texts[0] + extra if extra and space.endswith(separator) else ""


def as_message(reply: Reply) -> Message:
    return Message("assistant", tuple(block.part for block in reply.blocks))


# --- from entries to messages ---------------------------------------------------------------------------------------


def call_ids(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        if message.role == "assistant":
            yield from (part.id for part in message.parts if isinstance(part, ToolCall))


def restored(messages: Sequence[Message], found: Mapping[str, GeneratedCall]) -> tuple[Message, ...]:
    return tuple(_restored(message, found) if message.role == "assistant" else message for message in messages)


def _restored(message: Message, found: Mapping[str, GeneratedCall]) -> Message:
    calls = [found[part.id] for part in message.parts if isinstance(part, ToolCall) and part.id in found]
    if not calls:
        return message
    first = calls[0]
    parts = [_with_generated_arguments(part, found) for part in message.parts]
    if first.text:
        parts = [
            Text(first.text) if isinstance(part, Text) and part.text.strip() == first.text.strip() else part
            for part in parts
        ]
    if first.thinking and not any(isinstance(part, Thinking) and part.text for part in parts):
        parts = [Thinking(first.thinking), *(part for part in parts if not isinstance(part, Thinking))]
    return Message(message.role, tuple(parts), message.name)


def _with_generated_arguments(part: Part, found: Mapping[str, GeneratedCall]) -> Part:
    if not isinstance(part, ToolCall) or part.id not in found:
        return part
    generated = found[part.id].arguments
    if part.arguments != generated and not _is_same_json(part.arguments, generated):
        return part  # the client has edited the call
    return replace(part, arguments=generated, verbatim=True)


def _is_same_json(one: str, other: str) -> bool:
    try:
        return bool(_decode_json(one or "{}") == _decode_json(other or "{}"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
