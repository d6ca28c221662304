"""The JSON shapes of an upstream's chat chunks: everything optional, because servers leave out what they like."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from modelyard.protocols.common.openai_fields import OpenAIUsage
from modelyard.protocols.openai_chat.logprobs import LogprobsBody
from modelyard.protocols.openai_chat.messages import read_arguments


class CalledDelta(Struct):
    name: str | None = None
    arguments: Any = None
    input: str | None = None

    @property
    def text(self) -> str:
        return self.input if self.input is not None else read_arguments(self.arguments)


class CallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: CalledDelta | None = None
    custom: CalledDelta | None = None


class Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[CallDelta] | None = None
    function_call: CalledDelta | None = None


class ChunkChoice(Struct):
    index: int = 0
    delta: Delta | None = None
    logprobs: LogprobsBody | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class ChunkBody(Struct):
    id: str | None = None
    created: float | None = None
    model: str | None = None
    choices: list[ChunkChoice] | None = None
    usage: OpenAIUsage | None = None
    error: Any = None
