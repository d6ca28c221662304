"""Remembers what was generated for each tool call, so that the next turn's prompt is made of the same words.

Bounded, and scoped by API key. What this process has not heard itself may be in the store that several share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from modelyard.core.engine import Tokens
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Block, BlockDelta, BlockStart, Reply, Usage, collect_reply
from modelyard.core.request import Message, Request, Thinking
from modelyard.core.store import Store
from modelyard.gateway.answer import ChoiceStream
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.translate import TextOutput
from modelyard.prompt.stability import Spoken, call_ids, restored, spoken, with_breaks

log = logging.getLogger("modelyard.gateway")

_CHARACTERS = 32 << 20
_ENTRY = 200  # what an entry takes besides its words
_ON_ITS_WAY_S = 2.0  # for another gateway's words to reach the store: a client's next turn may be here before them
_packed = msgspec.msgpack.Encoder().encode
_unpacked = msgspec.msgpack.Decoder(Spoken).decode

_Name = tuple[str, str]  # an API key's name and a call's id


class _Missed(msgspec.Struct, frozen=True):
    """The store did not have it, `at` first; a second time, and it is `settled` that nobody knows it."""

    at: float
    settled: bool = False


class ReplayMemory:
    """`store` is one that other gateways write to, too; without one, this process's own memory is all there is."""

    def __init__(
        self,
        store: Store | None = None,
        characters: int = _CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._most, self._held, self._clock = store, characters, 0, clock
        self._spoken: OrderedDict[_Name, Spoken | _Missed] = OrderedDict()
        self.is_blank = store is None  # nothing was ever said here, and nobody else could have

    async def restored(self, request: Request, key: str) -> Request:
        """The request with the model's own words where they are known."""
        if self.is_blank:
            return request
        found = await self._find(dict.fromkeys(call_ids(request.messages)), key)
        return msgspec.structs.replace(request, messages=restored(request.messages, found)) if found else request

    async def _find(self, ids: Mapping[str, None], key: str) -> dict[str, Spoken]:
        if self._store is not None and (unknown := [id for id in ids if self._is_open((key, id))]):
            for id, value in zip(unknown, await self._asked(self._store, unknown, key), strict=False):
                self._put((key, id), self._missed((key, id)) if value is None else _unpacked(value))
        return {id: said for id in ids if (said := self._get((key, id))) is not None}

    def _is_open(self, name: _Name) -> bool:
        known = self._spoken.get(name)
        if isinstance(known, _Missed):
            return not known.settled and self._clock() - known.at > _ON_ITS_WAY_S
        return known is None

    def _missed(self, name: _Name) -> _Missed:
        return _Missed(self._clock(), settled=name in self._spoken)

    async def _asked(self, store: Store, ids: list[str], key: str) -> list[bytes | None]:
        """Words that cannot be had cost a longer prefill, not the answer."""
        try:
            return await asyncio.gather(*(store.get(_scope(key), id) for id in ids))
        except ModelyardError as error:
            log.warning("what was said before could not be looked up: %s", error.message)
            return []

    def keep(self, reply: Reply, key: str, text: str = "") -> dict[str, Spoken]:
        """In this process, at once; what is to be told to the store. `text` is as in `Spoken`."""
        said = spoken(reply, text)
        for id, words in said.items():
            self._put((key, id), words)
        return said if self._store is not None else {}

    async def share(self, said: Mapping[str, Spoken], key: str) -> None:
        if self._store is not None:
            await asyncio.gather(*(self._store.put(_scope(key), id, _packed(one)) for id, one in said.items()))

    def _get(self, name: _Name) -> Spoken | None:
        found = self._spoken.get(name)
        if not isinstance(found, Spoken):
            return None
        self._spoken.move_to_end(name)
        return found

    def _put(self, name: _Name, said: Spoken | _Missed) -> None:
        self._held += _size(said) - (_size(self._spoken.pop(name)) if name in self._spoken else 0)
        self._spoken[name] = said
        self.is_blank = False
        while self._held > self._most and self._spoken:
            self._held -= _size(self._spoken.popitem(last=False)[1])


def _size(said: Spoken | _Missed) -> int:
    return _ENTRY + (len(said.arguments) + len(said.thinking) + len(said.text) if isinstance(said, Spoken) else 0)


def _scope(key: str) -> str:
    return f"calls/{key}"


# What a model said in an answer, for the next prompt that tells it; also what the client was not shown. Pure.


def generated_reply(answer: ChoiceStream, usage: Usage) -> Reply | None:
    """None where nobody listened."""
    if not answer.said:
        return None
    reply, ids = collect_reply(answer.said), answer.ids
    if not usage.reasoning or reply.thinking or not ids:
        return reply
    return replace(reply, blocks=(Block(Thinking(hidden_reasoning(answer.job, ids))), *reply.blocks))


def hidden_reasoning(job: PreparedRequest, ids: Sequence[int]) -> str:
    """Reasoning that was kept from the client, out of the answer's tokens."""
    asked = replace(job.request, reasoning=replace(job.request.reasoning, visible=True))
    events = TextOutput(replace(job, request=asked), 0, str, None).feed([Tokens(list(ids))])
    thoughts = {event.index for event in events if isinstance(event, BlockStart) and event.kind == "thinking"}
    return "".join(event.text for event in events if isinstance(event, BlockDelta) and event.index in thoughts)


def text_before_calls(job: PreparedRequest, reply: Reply, ids: Sequence[int] | None) -> str:
    """As it is to be told to make the same prompt; empty: as the client tells it."""
    if not ids or not reply.calls:
        return ""
    parts = job.model.parts
    return with_breaks(reply, parts.vocab.decode(ids), parts.renderer.separator)


def as_message(reply: Reply) -> Message:
    return Message("assistant", tuple(block.part for block in reply.blocks))
