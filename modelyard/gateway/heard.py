"""What a model said in an answer, for the next prompt that tells it; also what the client was not shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from modelyard.core.engine import Tokens
from modelyard.core.events import Block, BlockDelta, BlockStart, Reply, Usage, fold
from modelyard.core.request import Message, Thinking
from modelyard.gateway.answer import Answer
from modelyard.gateway.job import Job
from modelyard.gateway.translate import TextTranslation
from modelyard.prompt.stability import with_breaks


def heard(answer: Answer, usage: Usage) -> Reply | None:
    """None where nobody listened."""
    if not answer.said:
        return None
    reply, ids = fold(answer.said), answer.ids
    if not usage.reasoning or reply.thinking or not ids:
        return reply
    return replace(reply, blocks=(Block(Thinking(hidden(answer.job, ids))), *reply.blocks))


def hidden(job: Job, ids: Sequence[int]) -> str:
    """Reasoning that was kept from the client, out of the answer's tokens."""
    asked = replace(job.request, reasoning=replace(job.request.reasoning, visible=True))
    events = TextTranslation(replace(job, request=asked), 0, str, None).feed([Tokens(list(ids))])
    thoughts = {event.index for event in events if isinstance(event, BlockStart) and event.kind == "thinking"}
    return "".join(event.text for event in events if isinstance(event, BlockDelta) and event.index in thoughts)


def text_before_calls(job: Job, reply: Reply, ids: Sequence[int] | None) -> str:
    """As it is to be told to make the same prompt; empty: as the client tells it."""
    if not ids or not reply.calls:
        return ""
    parts = job.model.parts
    return with_breaks(reply, parts.vocab.decode(ids), parts.renderer.separator)


def as_message(reply: Reply) -> Message:
    return Message("assistant", tuple(block.part for block in reply.blocks))
