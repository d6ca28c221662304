"""What a model said, told again in the model's own words: clients reorder, re-serialise and leave out. Pure.

A call's id leads to what was generated for it. Arguments that mean the same are put back as they were written, and
reasoning that the client left out is put back in front of its calls: the prompt then goes on exactly as the KV cache
has it. Arguments that mean something else are the client's word, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from modelyard.core.events import Reply
from modelyard.core.request import Message, Part, Text, Thinking, ToolCall

_decode = msgspec.json.Decoder().decode


class Spoken(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What was generated for one call. With the first call of a turn also all its reasoning, and its text where that
    is to be told with more line breaks than clients are shown."""

    arguments: str
    thinking: str = ""
    text: str = ""


def spoken(reply: Reply, text: str = "") -> dict[str, Spoken]:
    found: dict[str, Spoken] = {}
    for call in reply.calls:
        found[call.id] = Spoken(call.arguments) if found else Spoken(call.arguments, reply.thinking, text)
    return found


def with_breaks(reply: Reply, raw: str, separator: str) -> str:
    """The text before the calls with the line breaks that the model wrote behind it, less the `separator` that the
    template puts there by itself. Empty where that is the text as it is."""
    texts = [block.part.text for block in reply.blocks if isinstance(block.part, Text)]
    if len(texts) != 1 or not texts[0] or (at := raw.find(texts[0])) < 0:
        return ""
    rest = raw[at + len(texts[0]) :]
    space = rest[: len(rest) - len(rest.lstrip())]
    more = space.removesuffix(separator)
    return texts[0] + more if more and space.endswith(separator) else ""


def call_ids(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        if message.role == "assistant":
            yield from (part.id for part in message.parts if isinstance(part, ToolCall))


def restored(messages: Sequence[Message], found: Mapping[str, Spoken]) -> tuple[Message, ...]:
    return tuple(_restored(message, found) if message.role == "assistant" else message for message in messages)


def _restored(message: Message, found: Mapping[str, Spoken]) -> Message:
    said = [found[part.id] for part in message.parts if isinstance(part, ToolCall) and part.id in found]
    if not said:
        return message
    parts = [_in_own_words(part, found) for part in message.parts]
    if said[0].text:
        parts = [_broken(part, said[0].text) for part in parts]
    if said[0].thinking and not any(isinstance(part, Thinking) and part.text for part in parts):
        parts = [Thinking(said[0].thinking), *(part for part in parts if not isinstance(part, Thinking))]
    return Message(message.role, tuple(parts), message.name)


def _broken(part: Part, text: str) -> Part:
    return Text(text) if isinstance(part, Text) and part.text.strip() == text.strip() else part


def _in_own_words(part: Part, found: Mapping[str, Spoken]) -> Part:
    if not isinstance(part, ToolCall) or part.id not in found:
        return part
    own = found[part.id].arguments
    if part.arguments != own and not _means_the_same(part.arguments, own):
        return part
    return msgspec.structs.replace(part, arguments=own, verbatim=True)


def _means_the_same(one: str, other: str) -> bool:
    try:
        return bool(_decode(one or "{}") == _decode(other or "{}"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
