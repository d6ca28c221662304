"""The raw model output of a scripted answer: reasoning and calls in a model's format, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.script import ScriptCall, ScriptStep, unroll

Segment = tuple[str, str]  # (markup, text); only markup becomes control tokens, so a text may quote a marker
Channel = Literal["think", "text", "call"]


class Format(NamedTuple):
    """`channels` has the opening and closing markup of each kind of message. `start` precedes every message but the
    first. `end` closes the message that is open at the end of the answer; None: as if another one followed."""

    channels: dict[Channel, tuple[str, str]]
    write_call: Callable[[ScriptCall], list[Segment]]
    start: str = ""
    end: str | None = None


def _hermes_call(call: ScriptCall) -> list[Segment]:
    return [("", f'\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_text}}}\n')]


def _qwen3_coder_call(call: ScriptCall) -> list[Segment]:
    lines = [call.arguments] if isinstance(call.arguments, str) else list[str]()
    for key, value in call.arguments.items() if isinstance(call.arguments, dict) else ():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>")
    return [("", "\n".join(["", f"<function={call.name}>", *lines, "</function>", ""]))]


def _harmony_call(call: ScriptCall) -> list[Segment]:
    return [("", f"commentary to=functions.{call.name} "), ("<|constrain|>json<|message|>", call.arguments_text)]


_HERMES: dict[Channel, tuple[str, str]] = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "text": ("", ""),
    "call": ("<tool_call>", "</tool_call>"),
}
_HARMONY: dict[Channel, tuple[str, str]] = {
    "think": ("<|channel|>analysis<|message|>", "<|end|>"),
    "text": ("<|channel|>final<|message|>", "<|end|>"),
    "call": ("<|channel|>", "<|call|>"),
}
_FORMATS = {  # a format without an entry uses Hermes; its scripts use `raw` steps
    "hermes": Format(_HERMES, _hermes_call),
    "qwen3_coder": Format(_HERMES, _qwen3_coder_call),
    "harmony": Format(_HARMONY, _harmony_call, start="<|start|>assistant", end="<|return|>"),
}


class FormatWriter:
    """One per answer. `in_reasoning`: the template has opened the reasoning already."""

    def __init__(self, format: Format, in_reasoning: bool) -> None:
        self._format, self._start = format, ""
        self._channel: Channel | None = "think" if in_reasoning else None  # of the open message

    def write(self, channel: Channel, text: str) -> list[Segment]:
        return [(self._open(channel), text)]

    def write_calls(self, calls: Iterable[ScriptCall]) -> list[Segment]:
        out: list[Segment] = []
        for call in calls:
            separator = "\n" if out and not self._format.start else ""
            out += [(separator + self._open("call"), ""), *self._format.write_call(call), (self._close(), "")]
        return out

    def end(self) -> list[Segment]:
        end = self._close()
        return [(end if self._format.end is None else self._format.end, "")] if end else []

    def _open(self, channel: Channel) -> str:
        if channel == self._channel:
            return ""
        markup = f"{self._close()}{self._start}{self._format.channels[channel][0]}"
        self._channel, self._start = channel, self._format.start
        return markup

    def _close(self) -> str:
        channel, self._channel = self._channel, None
        return self._format.channels[channel][1] if channel else ""


class OutputEncoder:
    def __init__(self, tokenizer: Tokenizer, format: str = "hermes") -> None:
        self._format = _FORMATS.get(format, _FORMATS["hermes"])
        # Scripts repeat texts. The lists are shared: do not modify them.
        self._encode, self._encode_plain = lru_cache(1024)(tokenizer.encode), lru_cache(1024)(tokenizer.encode_plain)
        # Tokens that are one word each; if a vocabulary has none, the tokens of a word.
        words = [token for token in range(min(tokenizer.size, 4096)) if _is_word(tokenizer.token_bytes(token))]
        self._words = words[:97] or tokenizer.encode_plain(" word")

    def encode(self, steps: Iterable[ScriptStep], *, in_reasoning: bool) -> Iterator[list[int] | ScriptStep]:
        """Yields the token ids of each step with output, and every other step as it is. Lazily: a script may repeat a
        million times."""
        writer = FormatWriter(self._format, in_reasoning)
        for step in unroll(steps):
            if step.text is not None:
                yield self._ids(writer.write("text", step.text))
            elif step.think is not None:
                yield self._ids(writer.write("think", step.think))
            elif step.call is not None:
                yield self._ids(writer.write_calls(step.calls))
            elif step.raw is not None:
                yield self._encode(step.raw)
            elif step.tokens is not None:
                yield self._ids(writer.write("text", "")) + self.filler(step.tokens)
            else:
                yield step
        if ids := self._ids(writer.end()):
            yield ids

    def filler(self, count: int) -> list[int]:
        return (self._words * (count // len(self._words) + 1))[:count]

    def _ids(self, segments: Iterable[Segment]) -> list[int]:
        ids: list[int] = []
        for markup, text in segments:
            ids += self._encode(markup) if markup else ()
            ids += self._encode_plain(text) if text else ()
        return ids


def _is_word(spelling: bytes) -> bool:
    return len(spelling) > 3 and spelling[:1] == b" " and spelling[1:].isalpha() and spelling[1:].islower()
