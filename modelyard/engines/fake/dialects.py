"""How the fake engine spells reasoning and calls as raw model output, one small writer a dialect.

A segment is (text, special): only special segments may become control tokens, so that a scripted text which merely
quotes a marker stays text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from modelyard.engines.fake.script import ScriptCall

Segment = tuple[str, bool]


class FormatWriter(Protocol):
    """Stateful: one an answer. `inside` means that the template has already opened the reasoning."""

    def text(self, text: str) -> list[Segment]: ...
    def think(self, text: str) -> list[Segment]: ...
    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]: ...
    def end(self) -> list[Segment]: ...


def arguments_text(call: ScriptCall) -> str:
    """A string is taken as it is: scripts play broken JSON too."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)


class Hermes:
    """<think>…</think> text <tool_call>{"name": …, "arguments": {…}}</tool_call>"""

    def __init__(self, inside: bool = False) -> None:
        self._inside = inside

    def _out(self) -> list[Segment]:
        inside, self._inside = self._inside, False
        return [("\n", False), ("</think>", True), ("\n\n", False)] if inside else []

    def text(self, text: str) -> list[Segment]:
        return [*self._out(), (text, False)]

    def think(self, text: str) -> list[Segment]:
        opening: list[Segment] = [] if self._inside else [("<think>", True), ("\n", False)]
        self._inside = True
        return [*opening, (text, False), *self._out()]

    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]:
        out = self._out()
        for call in calls:
            out += [("<tool_call>", True), (f"\n{self._body(call)}\n", False), ("</tool_call>", True), ("\n", False)]
        return out[:-1]

    def _body(self, call: ScriptCall) -> str:
        return f'{{"name": {json.dumps(call.name)}, "arguments": {arguments_text(call)}}}'

    def end(self) -> list[Segment]:
        return self._out()


class Qwen3Coder(Hermes):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""

    def _body(self, call: ScriptCall) -> str:
        if isinstance(call.arguments, str):
            return f"<function={call.name}>\n{call.arguments}\n</function>"
        lines = [f"<parameter={key}>\n{self._value(value)}\n</parameter>" for key, value in call.arguments.items()]
        return "\n".join([f"<function={call.name}>", *lines, "</function>"])

    def _value(self, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Harmony:
    """<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

    The prompt ends in `<|start|>assistant`, so the first message needs no start of its own.
    """

    def __init__(self, inside: bool = False) -> None:
        del inside  # no template of this family opens the analysis
        self._open: str | None = None
        self._begun = False

    def _channel(self, channel: str, header: Sequence[Segment]) -> list[Segment]:
        if self._open == channel:
            return []
        out: list[Segment] = [("<|end|>", True)] if self._open else []
        out += [("<|start|>", True), ("assistant", False)] if self._begun else []
        self._open, self._begun = channel, True
        return [*out, ("<|channel|>", True), *header, ("<|message|>", True)]

    def text(self, text: str) -> list[Segment]:
        return [*self._channel("final", [("final", False)]), (text, False)]

    def think(self, text: str) -> list[Segment]:
        return [*self._channel("analysis", [("analysis", False)]), (text, False)]

    def calls(self, calls: Sequence[ScriptCall]) -> list[Segment]:
        out: list[Segment] = []
        for call in calls:
            header = [(f"commentary to=functions.{call.name} ", False), ("<|constrain|>", True), ("json", False)]
            out += [*self._channel("call", header), (arguments_text(call), False), ("<|call|>", True)]
            self._open = None
        return out

    def end(self) -> list[Segment]:
        return [("<|return|>", True)] if self._open else []


_WRITERS: dict[str, type[Hermes | Harmony]] = {"qwen3_coder": Qwen3Coder, "harmony": Harmony}


def format_writer(dialect: str, *, inside: bool = False) -> FormatWriter:
    """Hermes for every dialect without a writer of its own: scripts for those use `raw` steps."""
    return _WRITERS.get(dialect, Hermes)(inside)
