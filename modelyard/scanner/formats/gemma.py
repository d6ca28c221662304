"""Gemma: calls in a notation close to JSON, with bare keys and a token in place of the quotes.

`gemma4`: Gemma 4, with reasoning in a channel:

    <|channel>thought
    I need the weather.<channel|>Let me look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

After its calls the model writes `<|tool_response>` and waits. Channels may open twice, and close without need. The
token before a call may be missing (`call:now{}`) or broken (`<call>now{}`).

`functiongemma`: FunctionGemma, with `<escape>` for quotes and without reasoning:

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

After its calls the model writes `<start_function_response>` and waits. Google documents results between that token and
`<end_function_response>`; the plain sentences of vLLM's template are not what the model was trained on.

Text between two quote tokens is exact, without escapes. Values nest: `{options:{exact:true,tags:[<|"|>a<|"|>]}}`.
Keys and strings may also be quoted as in JSON, and a bare word is a string. If only the first of two quote tokens is
missing, the text ends at the second and may contain commas.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from modelyard.core.output_format import Dumps, OutputFormat, ReasoningBlock, Region, StartReader, SwitchRegion
from modelyard.scanner.arguments import ANY_TYPE, ArgumentWriter, to_json
from modelyard.scanner.grammar import CallSyntax
from modelyard.scanner.lenient_json import JsonReader, escape_json, repair_literal
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer, UnknownTool
from modelyard.scanner.output import CallBuilder

_CALL = "call:"
_NAME_END = re.compile(rf"[{{\n<{SURROGATES}]")
_NAME_CHAR = re.compile(r"[\w.-]")
_NO_EVIDENCE_NEEDED = re.compile("")
_QUOTED_END = re.compile('["\n]')
_KEY_END = re.compile(rf"[:,{{}}\[\]\n<{SURROGATES}]")
_BARE_END = re.compile(rf"[,{{}}\[\]<{SURROGATES}]")
_KEY_LIMIT = 256
_AFTER_TEXT = re.compile(r"[,:\]}]|\Z|[\w.-]+:")  # the comma before the next key may be missing
_NEXT_KEY = 32  # characters, at most, of that key
_TEXT_LIMIT = 4096  # characters of a text without its first quote
_MAX_DEPTH = 64
_BEFORE_TEXT = (":", ",", "[", "{")
_TEXT_TYPES = frozenset({"string", *ANY_TYPE})
_NULLS = ("nil", "none", "None", "null")


class _CallReader:
    """Reads calls with the quote and the closing token of one format."""

    def __init__(self, quote: str, closing: str) -> None:
        self._quote, self._closing = quote, closing

    def read(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After the token that opens calls: one or several."""
        yield from buffer.skip_space()
        while True:
            yield from buffer.skip_if(_CALL, f":{_CALL}")  # some models repeat the colon before it
            name = (yield from buffer.read_until(_NAME_END, _KEY_LIMIT)).strip()
            if (yield from buffer.peek()) != "{" or " " in name:
                raise ParseError("expected a call")
            calls.start(name)
            yield from self._read_arguments(buffer, calls)
            yield from buffer.skip_space()
            if not (yield from buffer.is_next(_CALL)):
                return None

    def read_bare(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
        """After the word that begins a call, without a token: only an offered tool is certain."""
        name = ""
        while (char := (yield from buffer.peek())) and _NAME_CHAR.match(char) and len(name) < _KEY_LIMIT:
            name += buffer.skip(1)
        if char != "{" or not name:
            raise ParseError("expected a call")
        calls.start(name)
        if not calls.is_offered:
            raise UnknownTool(name, _NO_EVIDENCE_NEEDED)
        yield from self._read_arguments(buffer, calls)
        return None

    def _read_arguments(self, buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
        yield from _ArgumentsReader(buffer, calls, buffer.encoded(self._quote), buffer.encoded(self._closing)).read()
        calls.finish()


class _ArgumentsReader:
    def __init__(self, buffer: TextBuffer, calls: CallBuilder, quote: str, closing: str) -> None:
        self._buffer, self._emit = buffer, calls.append
        self._quote, self._closing = quote, closing
        self._quote_or_closing = re.compile(f"{re.escape(quote)}|{re.escape(closing)}")
        self._types_of = ArgumentWriter(calls).types_of

    def read(self) -> Incremental[None]:
        yield from self._object(1)

    def _object(self, depth: int) -> Incremental[None]:
        """At the opening bracket."""
        self._emit(self._buffer.skip(1))
        comma = ""
        while not (yield from self._is_end("}")):
            key = yield from self._key()
            self._emit(f'{comma}"{escape_json(key)}": ')
            yield from self._value(depth, self._types_of(key) if depth == 1 else ())
            comma = ", "
        self._emit("}")

    def _list(self, depth: int) -> Incremental[None]:
        buffer, comma = self._buffer, ""
        self._emit(buffer.skip(1))
        while not (yield from self._is_end("]")):
            # An object may have an empty bare word between its commas. In a list that would never end.
            char = yield from buffer.peek()
            if char not in ("{", "[") and _BARE_END.match(char) and not (yield from buffer.match((self._quote,))):
                raise ParseError("expected an item")
            self._emit(comma)
            yield from self._value(depth, ())
            comma = ", "
        self._emit("]")

    def _is_end(self, bracket: str) -> Incremental[bool]:
        """Move to the next member. True: there is none. Before the closing token all brackets may be missing."""
        buffer = self._buffer
        while True:
            yield from buffer.skip_space()
            char = yield from buffer.peek()
            if char == ",":
                buffer.skip(1)
            elif char == bracket:
                buffer.skip(1)
                return True
            elif not char:
                raise ParseError("the output ends inside a call")
            else:
                return (yield from buffer.match((self._closing,))) is not None

    def _key(self) -> Incremental[str]:
        buffer = self._buffer
        if (yield from buffer.match((self._quote,))):
            parts: list[str] = []
            yield from self._text(parts.append)
            key = "".join(parts)
        elif (yield from buffer.peek()) == '"':
            buffer.skip(1)
            key = yield from buffer.read_until(_QUOTED_END, _KEY_LIMIT)
            buffer.skip(1)
        else:
            key = (yield from buffer.read_until(_KEY_END, _KEY_LIMIT)).strip()
            if not key:
                raise ParseError("expected a key")
        yield from buffer.skip_space()
        if (yield from buffer.peek()) != ":":
            raise ParseError("expected a key")
        buffer.skip(1)
        yield from buffer.skip_space()
        return key

    def _value(self, depth: int, types: tuple[str, ...]) -> Incremental[None]:
        buffer = self._buffer
        char = yield from buffer.peek()
        if char in ("{", "["):
            if depth >= _MAX_DEPTH:
                raise ParseError("nested too deeply")
            yield from (self._object if char == "{" else self._list)(depth + 1)
        elif char and char in "\"'":
            yield from JsonReader(buffer, self._emit).read()
        elif not (yield from buffer.match((self._quote,))):
            self._emit((yield from self._bare_value(types)))
        elif types and not _TEXT_TYPES.intersection(types):
            parts: list[str] = []
            yield from self._text(parts.append)
            self._emit(to_json("".join(parts), types))
        else:
            self._emit('"')
            yield from self._text(lambda text: self._emit(escape_json(text)))
            self._emit('"')

    def _bare_value(self, types: tuple[str, ...]) -> Incremental[str]:
        """A number, a boolean, null, or a string without its quotes."""
        raw = yield from self._word()
        word = raw.strip()
        is_literal = _is_literal(word)
        if not is_literal and (rest := (yield from self._half_quoted())) is not None:
            self._buffer.skip(len(self._quote))
            return to_json(raw + rest, types or ("string",))
        if types:
            return to_json(word, types)
        if word in _NULLS:
            return "null"
        return repair_literal(word) if is_literal else f'"{escape_json(word)}"'

    def _half_quoted(self) -> Incremental[str | None]:
        """The rest of a text without its first quote, up to its second. None: the next quote begins another text."""
        buffer = self._buffer
        while (found := self._quote_or_closing.search(buffer.text, buffer.pos, buffer.pos + _TEXT_LIMIT)) is None:
            if buffer.ended or len(buffer.text) - buffer.pos >= _TEXT_LIMIT:
                return None
            yield
        before = buffer.text[buffer.pos : found.start()].rstrip()
        return (
            None if found.group() == self._closing or before.endswith(_BEFORE_TEXT) else buffer.take_to(found.start())
        )

    def _word(self) -> Incremental[str]:
        word = yield from self._buffer.read_until(_BARE_END, sys.maxsize, may_end=True)
        if self._buffer.is_empty:
            raise ParseError("the output ends inside a value")
        return word

    def _text(self, emit: Callable[[str], None]) -> Incremental[None]:
        """From quote to quote, as it arrives. Inside, a quote is not followed by what follows a text."""
        buffer = self._buffer
        buffer.skip(len(self._quote))
        ends = (self._quote, self._closing) if self._closing in buffer.token_codes else (self._quote,)
        while end := (yield from buffer.read_verbatim(ends, lambda text: emit(buffer.spelled(text)))):
            if end != self._quote:
                if (yield from buffer.is_call_end()):
                    break
            elif (yield from self._is_text_end(len(end))):
                buffer.skip(len(end))
                return
            emit(buffer.spelled(buffer.skip(len(end))))
        raise ParseError("a text without an end")

    def _is_text_end(self, offset: int) -> Incremental[bool]:
        offset = yield from self._buffer.skip_space_ahead(offset)
        if (yield from self._buffer.match((self._closing,), offset)):
            return True
        return _AFTER_TEXT.match((yield from self._buffer.lookahead(offset + _NEXT_KEY)), offset) is not None


def _is_literal(word: str) -> bool:
    try:
        return word in _NULLS or bool(repair_literal(word))
    except ParseError:
        return False


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_TOOL_CALL, _TOOL_CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_ENDS = ("<turn|>", "<|tool_response>")


def _read_channel(buffer: TextBuffer, _: CallBuilder) -> Incremental[str | None]:
    """All known channels contain thoughts."""
    yield from buffer.skip_if("thought")
    return "thinking"


_READER = _CallReader(_QUOTE, _TOOL_CALL_END)
_READERS = {
    _CHANNEL: StartReader(_read_channel),
    _TOOL_CALL: StartReader(_READER.read, (_TOOL_CALL_END,)),
    **dict.fromkeys((_CALL, "<call>"), StartReader(_READER.read_bare, (_TOOL_CALL_END,), bare=True)),
}


class _Body(Struct, frozen=True):
    quote: str

    def write(self, name: str, arguments: Mapping[str, Any], dumps: Dumps, _: int = 0) -> str:
        return f"{_CALL}{name}{{{','.join(f'{key}:{self._value(one, dumps)}' for key, one in arguments.items())}}}"

    def _value(self, value: Any, dumps: Dumps) -> str:
        if isinstance(value, dict):
            return self.write("", {self._value(key, dumps): one for key, one in value.items()}, dumps)[len(_CALL) :]
        if isinstance(value, list):
            return f"[{','.join(self._value(one, dumps) for one in value)}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else dumps(value)


_GEMMA4 = OutputFormat(
    name="gemma4",
    results=(f"<|tool_response>response:{{name}}{{value:{_QUOTE}", f"{_QUOTE}}}<tool_response|>"),
    regions={
        "text": Region("text", {**_READERS}),
        "thinking": Region("thinking", {_CHANNEL_END: SwitchRegion("text"), **_READERS}),
    },
    messages_of_reasoning=(ReasoningBlock(_CHANNEL, (_CHANNEL_END,), f"\n{_CHANNEL_END}"),),
    hidden_markers=(
        _CHANNEL_END,
        _TOOL_CALL_END,
        _QUOTE,
        *_ENDS,
        "<|turn>",
        "<tool_response|>",
        "<|think|>",
        "<eos>",
    ),
    stop_tokens=_ENDS,
    turn_starts=("<|turn>model", "<tool_response|>"),
    template_hints=((_TOOL_CALL, _QUOTE), (_CHANNEL, "<|turn>")),
    name_hints=("gemma-4", "gemma4"),
    calls=CallSyntax(_Body(_QUOTE), "", "", _TOOL_CALL, _TOOL_CALL_END, ""),
)

# --- FunctionGemma ----------------------------------------------------------------------------------------------------

_FUNCTION_CALL, _FUNCTION_CALL_END, _ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_FUNCTION_ENDS = ("<end_of_turn>", "<start_function_response>")
_FUNCTION_READER = StartReader(_CallReader(_ESCAPE, _FUNCTION_CALL_END).read, (_FUNCTION_CALL_END,))

_FUNCTION_GEMMA = OutputFormat(
    name="functiongemma",
    results=(f"<start_function_response>response:{{name}}{{value:{_ESCAPE}", f"{_ESCAPE}}}<end_function_response>"),
    regions={"text": Region("text", {_FUNCTION_CALL: _FUNCTION_READER})},
    hidden_markers=(
        _FUNCTION_CALL_END,
        _ESCAPE,
        *_FUNCTION_ENDS,
        "<end_function_response>",
        "<start_of_turn>",
        "<eos>",
    ),
    stop_tokens=_FUNCTION_ENDS,
    turn_starts=("<start_of_turn>model", "<end_function_response>"),
    template_hints=((_FUNCTION_CALL, _ESCAPE),),
    name_hints=("functiongemma",),
    calls=CallSyntax(_Body(_ESCAPE), "", "", _FUNCTION_CALL, _FUNCTION_CALL_END, ""),
)

FORMATS = (_FUNCTION_GEMMA, _GEMMA4)
