"""The raw model output of a scripted answer: reasoning and calls in a model's format, as token ids.

A segment is (text, special). Only special segments may become control tokens, so a scripted text that quotes a marker
stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.script import ScriptCall, ScriptStep, unroll

Segment = tuple[str, bool]


# --- formats ----------------------------------------------------------------------------------------------------------


class FormatWriter(Protocol):
    """Stateful: one per answer."""

    def text(self, text: str) -> list[Segment]: ...
    def think(self, text: str) -> list[Segment]: ...
    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]: ...
    def end(self) -> list[Segment]: ...


class HermesWriter:
    """<think>…</think> text <tool_call>{"name": …, "arguments": {…}}</tool_call>"""

    def __init__(self, in_reasoning: bool = False) -> None:
        self._in_reasoning = in_reasoning

    def end(self) -> list[Segment]:
        in_reasoning, self._in_reasoning = self._in_reasoning, False
        return [("\n", False), ("</think>", True), ("\n\n", False)] if in_reasoning else []

    def text(self, text: str) -> list[Segment]:
        return [*self.end(), (text, False)]

    def think(self, text: str) -> list[Segment]:
        opening: list[Segment] = [] if self._in_reasoning else [("<think>", True), ("\n", False)]
        self._in_reasoning = True
        return [*opening, (text, False), *self.end()]

    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]:
        out = self.end()
        for call in calls:
            out += [("<tool_call>", True), (f"\n{self._body(call)}\n", False), ("</tool_call>", True), ("\n", False)]
        return out[:-1]

    def _body(self, call: ScriptCall) -> str:
        return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_text}}}'


class Qwen3CoderWriter(HermesWriter):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""

    def _body(self, call: ScriptCall) -> str:
        if isinstance(call.arguments, str):
            return f"<function={call.name}>\n{call.arguments}\n</function>"
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>"])


class HarmonyWriter:
    """<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

    The prompt ends with `<|start|>assistant`, so the first message needs no start.
    """

    def __init__(self, in_reasoning: bool = False) -> None:
        del in_reasoning  # no template of this family opens the analysis
        self._channel: str | None = None
        self._started = False

    def _open(self, channel: str, header: Sequence[Segment]) -> list[Segment]:
        if self._channel == channel:
            return []
        out: list[Segment] = [("<|end|>", True)] if self._channel else []
        out += [("<|start|>", True), ("assistant", False)] if self._started else []
        self._channel, self._started = channel, True
        return [*out, ("<|channel|>", True), *header, ("<|message|>", True)]

    def text(self, text: str) -> list[Segment]:
        return [*self._open("final", [("final", False)]), (text, False)]

    def think(self, text: str) -> list[Segment]:
        return [*self._open("analysis", [("analysis", False)]), (text, False)]

    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]:
        out: list[Segment] = []
        for call in calls:
            header = [(f"commentary to=functions.{call.name} ", False), ("<|constrain|>", True), ("json", False)]
            out += [*self._open("call", header), (call.arguments_text, False), ("<|call|>", True)]
            self._channel = None
        return out

    def end(self) -> list[Segment]:
        return [("<|return|>", True)] if self._channel else []


_WRITERS: dict[str, type[HermesWriter | HarmonyWriter]] = {"qwen3_coder": Qwen3CoderWriter, "harmony": HarmonyWriter}


def format_writer(format: str, *, in_reasoning: bool = False) -> FormatWriter:
    """Formats without a writer use Hermes; their scripts use `raw` steps. `in_reasoning`: the template has opened the
    reasoning already."""
    return _WRITERS.get(format, HermesWriter)(in_reasoning)


# --- token ids --------------------------------------------------------------------------------------------------------


class OutputEncoder:
    """Encodes the output of steps. It caches the token ids, because the steps of a script recur in every job."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._filler = find_filler(tokenizer)
        self._encode = lru_cache(maxsize=1024)(self._encode_segments)

    def encode(self, step: ScriptStep, writer: FormatWriter) -> list[int]:
        """The output of a `text`, `think`, `call`, `raw` or `tokens` step. Do not modify the list."""
        if step.text is not None:
            return self._encode(tuple(writer.text(step.text)))
        if step.think is not None:
            return self._encode(tuple(writer.think(step.think)))
        if step.call is not None:
            return self._encode(tuple(writer.calls(step.calls)))
        if step.raw is not None:
            return self._encode(((step.raw, True),))
        return self._encode(tuple(writer.text(""))) + filler_tokens(self._filler, step.tokens or 0)

    def encode_answer(self, steps: Iterable[ScriptStep], writer: FormatWriter) -> list[int]:
        """The output of all steps; those that wait or fail have none."""
        ids = [token for step in unroll(steps) if step.has_output for token in self.encode(step, writer)]
        return ids + self.encode_end(writer)

    def encode_end(self, writer: FormatWriter) -> list[int]:
        return self._encode(tuple(writer.end()))

    def _encode_segments(self, segments: tuple[Segment, ...]) -> list[int]:
        encode, encode_plain = self._tokenizer.encode, self._tokenizer.encode_plain
        texts = ((text, encode if special else encode_plain) for text, special in segments if text)
        return [token for text, tokenize in texts for token in tokenize(text)]


def find_filler(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are one word each; if a vocabulary has none, the tokens of a word."""

    def is_word(spelling: bytes) -> bool:
        return len(spelling) > 3 and spelling[:1] == b" " and spelling[1:].isalpha() and spelling[1:].islower()

    words = [token for token in range(min(tokenizer.size, 4096)) if is_word(tokenizer.token_bytes(token))]
    return words[:97] or tokenizer.encode_plain(" word")


def filler_tokens(filler: list[int], count: int) -> list[int]:
    return (filler * (count // len(filler) + 1))[:count]
