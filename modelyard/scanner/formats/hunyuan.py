"""Hunyuan.

`hy_v3`: Hy 3 writes a bare name, a separator, then keys and values between tags, which are tokens:

    I need the weather.</think:opensource>Let me look.<tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Paris</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

Released vocabularies have the suffix in every tag, the preview has none. Line breaks between the tags come and go. The
outer tags, the separator and the closing tags may be missing. The prompt opens the reasoning, or opens and closes it.

`hunyuan`: the name that other servers use for `hy_v3`.

`hunyuan_a13b`: Hunyuan A13B writes a JSON list of calls inside the answer:

    <think>
    I need the weather.
    </think>
    <answer>
    I will look.
    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
    </answer>

The role that the template writes in Chinese sometimes comes back as the first word of the reply.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.arguments import ANY_TYPE, ArgumentWriter, ParameterTags, has_value, read_parameters, read_value
from modelyard.scanner.formats._common import at_reply_start, function_name, regions
from modelyard.scanner.grammar import CallSyntax, TaggedBody, listed
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_TAG = re.compile(rf"[<{SURROGATES}]")


class _TagSet:
    """The tags with one suffix."""

    def __init__(self, suffix: str) -> None:
        def pair(name: str) -> tuple[str, str]:
            return f"<{name}{suffix}>", f"</{name}{suffix}>"

        self.think = pair("think")
        (block, self._block_end), (self._call, self._call_end) = pair("tool_calls"), pair("tool_call")
        (key, self._key_end), (self._value, value_end) = pair("arg_key"), pair("arg_value")
        self._separator = f"<tool_sep{suffix}>"
        ends = (self._call_end, self._block_end)
        self._parameters = ParameterTags(key, self._key_end, value_end, ends, (self._call,), on_lines=False)
        self.readers = {block: StartReader(self._read_block, ends), self._call: StartReader(self._read_call, ends)}
        body = TaggedBody(f"{{}}{self._separator}\n", f"{key}{{}}{self._key_end}\n{self._value}", f"{value_end}\n")
        self.calls = CallSyntax(body, f"{block}\n", self._block_end, self._call, f"{self._call_end}\n", "")
        (results, results_end), (result, result_end) = pair("tool_responses"), pair("tool_response")
        self.results = (f"{results}\n{result}\n", f"\n{result_end}\n{results_end}")
        self.hidden_markers = (*ends, self._separator, key, self._key_end, self._value, value_end)

    def _read_block(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After the outer opening: calls one after another."""
        yield from buffer.skip_space()
        if not (yield from buffer.is_next(self._call)):
            raise ParseError("expected a call")
        while (yield from buffer.skip_if(self._call)):
            yield from self._read_call(buffer, calls)
            yield from buffer.skip_space()
        yield from buffer.skip_if(self._block_end)
        return None

    def _read_call(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        calls.start(function_name((yield from buffer.read_until(_TAG))))
        yield from buffer.skip_if(self._separator)
        yield from read_parameters(buffer, self._parameters, ArgumentWriter(calls), self._read_argument)
        yield from buffer.skip_if(self._call_end)
        return None

    def _read_argument(self, buffer: TextBuffer, arguments: ArgumentWriter) -> Incremental[None]:
        name = (yield from buffer.read_until(_TAG)).strip()
        if not (yield from buffer.skip_if(self._key_end)):
            raise ParseError("a key without an end")
        yield from buffer.skip_space()
        if not (yield from has_value(buffer, self._parameters)):
            return
        if not (yield from buffer.skip_if(self._value)):
            raise ParseError("a key without a value")
        yield from read_value(buffer, self._parameters, arguments, name, arguments.types_of(name) or ANY_TYPE)


_TAG_SETS = (_TagSet(""), _TagSet(":opensource"))
_ENDS = ("<｜hy_eos:opensource｜>", "<｜hy_eos｜>")
_TURN_STARTS = ("<｜hy_Assistant:opensource｜>", "<｜hy_Assistant｜>")

_HY3 = OutputFormat(
    name="hy_v3",
    regions=regions(
        {marker: reader for tags in _TAG_SETS for marker, reader in tags.readers.items()},
        tags=tuple(tags.think for tags in _TAG_SETS),
        closes_alone=True,
        ends=_ENDS,
    ),
    hidden_markers=(*(marker for tags in _TAG_SETS for marker in tags.hidden_markers), *_TURN_STARTS),
    stop_tokens=_ENDS,
    turn_starts=_TURN_STARTS,
    template_hints=(("<tool_sep{}>", "hy_Assistant"), ("<tool_sep>", "<arg_key>")),
    name_hints=("hy3", "hy-3", "hy_v3"),
    calls=_TAG_SETS[1].calls,
    results=_TAG_SETS[1].results,
)

_HUNYUAN = replace(
    _HY3,
    name="hunyuan",
    template_hints=(),
    name_hints=("hunyuan",),
    calls=_TAG_SETS[0].calls,
    results=_TAG_SETS[0].results,
)

_A13B_MARKERS: dict[str, SwitchRegion | StartReader] = {
    "<tool_calls>": StartReader(json_calls, ("</tool_calls>",)),
    "助手：": StartReader(at_reply_start(None), bare=True),
    "<answer>": SwitchRegion("text"),
}

_A13B = OutputFormat(
    name="hunyuan_a13b",
    results=("<tool_response>", "</tool_response>"),
    regions={
        "text": Region(
            "text",
            {
                **dict.fromkeys(("<think>", "<thinking>"), SwitchRegion("thinking")),
                "</answer>": SwitchRegion("text"),
                **_A13B_MARKERS,
            },
        ),
        "thinking": Region(
            "thinking", {**dict.fromkeys(("</think>", "</thinking>"), SwitchRegion("text")), **_A13B_MARKERS}
        ),
    },
    hidden_markers=("</tool_calls>", "<|eos|>", "<|startoftext|>", "<|extra_0|>", "<|extra_4|>"),
    stop_tokens=("<|eos|>", "<|endoftext|>"),
    turn_starts=("<|extra_0|>",),
    template_hints=(("<tool_calls>[{", '"func_name1", "arguments":', "<|extra_0|>"), ("<|extra_0|>", "<|extra_4|>")),
    name_hints=("hunyuan-a13b", "hunyuan_a13b"),
    calls=listed("<tool_calls>", "</tool_calls>"),
)

FORMATS = (_HUNYUAN, _A13B, _HY3)
