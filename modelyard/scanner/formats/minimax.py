"""MiniMax.

`minimax_m1`: M1 and Text-01 write JSON objects on separate lines:

    <think>
    I need the weather.
    </think>

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    {"name": "now", "arguments": {}}
    </tool_calls><end_of_sentence>

`minimax_m2`: M2, M2.1, M2.5 and M2.7 write a block of `invoke` tags, every value as text. The prompt opens the
reasoning:

    I need the weather.
    </think>

    Let me look.
    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    <invoke name="now">
    </invoke>
    </minimax:tool_call>[e~[

`minimax_m3`: M3 writes a namespace token before every tag, parameters as tags with their names, nested values as
elements:

    <mm:think>I need the weather.</mm:think>Let me look.]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="search">]<]minimax[>[<query>rain]<]minimax[>[</query>]<]minimax[>[<tags>
    ]<]minimax[>[<item>Paris]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>[e~[

(The `invoke` is one line.) Without reasoning a turn begins with `</mm:think>` alone. The members of an object are
elements with their names, those of a list are `item` elements, everything else is text. The schema decides what an
element contains, and its content if the schema does not say: then everything but text is JSON. A missing closing tag is
implied by that of an outer element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.arguments import ANY_TYPE, join_items, resolve_ref, schema_types, to_json
from modelyard.scanner.formats._common import function_name, regions
from modelyard.scanner.formats._invoke import InvokeTags
from modelyard.scanner.grammar import OBJECT, CallGrammar, CallSyntax, TaggedBody, invoke
from modelyard.scanner.json_calls import json_arguments, json_calls
from modelyard.scanner.lenient_json import escape_json
from modelyard.scanner.lexer import SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_TURN_END, _TURN_START = "[e~[", "]~b]ai"

_M1 = OutputFormat(
    name="minimax_m1",
    results=("tool result: ", ""),
    regions=regions({"<tool_calls>": StartReader(json_calls, ("</tool_calls>",))}, ends=("<end_of_sentence>",)),
    hidden_markers=("</tool_calls>", "<beginning_of_sentence>"),
    stop_tokens=("<end_of_sentence>",),
    turn_starts=("<beginning_of_sentence>ai name=assistant",),
    template_hints=(("<tool_calls>", "<beginning_of_sentence>"), ("<beginning_of_sentence>ai", "<end_of_sentence>")),
    name_hints=("minimax-m1", "minimax_m1", "minimax-text-01"),
    calls=CallSyntax(OBJECT, "<tool_calls>\n", "\n</tool_calls>"),
)

_M2 = OutputFormat(
    name="minimax_m2",
    results=("<response>", "</response>"),
    regions=regions(
        InvokeTags("<", "</", ("minimax:tool_call",), bare_invoke=True, untyped=ANY_TYPE).readers,
        closes_alone=True,
    ),
    hidden_markers=("</minimax:tool_call>", _TURN_END),
    inner_markers=("</invoke>", "<parameter name=", "</parameter>"),
    stop_tokens=(_TURN_END,),
    turn_starts=(_TURN_START,),
    template_hints=(("<minimax:tool_call>", "<invoke name="),),
    name_hints=("minimax-m2", "minimax_m2"),
    grammar=CallGrammar(
        invoke(), "<minimax:tool_call>\n", "</minimax:tool_call>", "", "\n", "", trigger="<minimax:tool_call>"
    ),
)

# --- M3 ---------------------------------------------------------------------------------------------------------------

_NAMESPACE = "]<]minimax[>["
_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END = "<tool_call>", "</tool_call>", "<invoke name=", "</invoke>"
_NAME_END = re.compile(rf"[>\n<\]{SURROGATES}]")
_TAG_END = re.compile(rf"[><\]{SURROGATES}]")
_MAX_DEPTH = 64
_SPACE_LIMIT = 16
_OUTSIDE_ARGUMENTS = 2  # only the block and the call are open
_EMPTY = {"object": "{}", "array": "[]"}


def _read_tags(buffer: TextBuffer, calls: CallBuilder) -> Incremental[str | None]:
    """After a namespace token: tags up to the end of the block, each with its own namespace token."""
    while True:
        yield from buffer.skip_space()
        is_block_end = yield from buffer.skip_if(_BLOCK_END)
        if is_block_end:
            return None
        if (yield from buffer.skip_if(_INVOKE)):
            yield from _read_invoke(buffer, calls)
        elif not (yield from buffer.skip_if(_BLOCK, _INVOKE_END)):
            # The rest of a broken call: after a namespace token no tag is shown.
            if not (yield from buffer.skip_if("<")):
                raise ParseError("expected a tag")
            yield from _read_name(buffer)
        yield from buffer.skip_space()
        if not (yield from buffer.skip_if(_NAMESPACE)):
            return None


def _read_invoke(buffer: TextBuffer, calls: CallBuilder) -> Incremental[None]:
    name = (yield from _read_name(buffer)).rstrip()
    calls.start(function_name(name.removesuffix("/")))
    if name.endswith("/"):
        return calls.finish("{}")
    yield from buffer.skip_space()
    if (yield from buffer.peek()) == "{":
        return (yield from json_arguments(buffer, calls))
    schema = calls.tool.parameters if calls.tool else {}
    reader = _ElementReader(buffer, calls.append, schema)
    yield from reader.read()
    calls.finish(is_repeated=reader.is_repeated)


def _read_name(buffer: TextBuffer) -> Incremental[str]:
    name = yield from buffer.read_until(_NAME_END)
    if not (yield from buffer.skip_if(">")):
        raise ParseError("a tag without an end")
    return name


class _ElementReader:
    """Reads the elements of a call and emits JSON."""

    def __init__(self, buffer: TextBuffer, emit: Callable[[str], None], schema: Mapping[str, Any]) -> None:
        self._buffer, self._emit, self._schema = buffer, emit, schema
        self._namespace = buffer.encoded(_NAMESPACE)
        self._special = re.compile(f"[{re.escape(self._namespace[0])}{SURROGATES}]")
        self._begins = tuple(buffer.encoded(tag)[0] for tag in (_BLOCK, _INVOKE))
        self._ends = tuple(code for tag in (_BLOCK_END, _INVOKE_END) if (code := buffer.encoded(tag)[0]) != "<")
        self._quoted = 0  # elements that a text opens and has not closed yet
        self._given: set[str] = set()  # arguments
        self.is_repeated = False  # two members of an object have the same name
        self._open = ["tool_call", "invoke"]
        self._closed: str | None = None  # the name in a closing tag that was read, but is that of an outer element

    def read(self) -> Incremental[None]:
        """All arguments, up to the end of the `invoke`."""
        yield from self._object(self._schema)
        yield from self._close("invoke")

    def _object(self, schema: Any) -> Incremental[None]:
        before, name = "{", ""
        given: set[str] = set()
        is_next = yield from self._is_opening()
        while is_next:
            name = name or (yield from self._tag())
            if (yield from self._is_without_value(name)):
                name, is_next = "", (yield from self._is_opening())
                continue
            if not name:
                self._buffer.commit()  # only tags came before
                raise ParseError("an element without a name")
            self.is_repeated = self.is_repeated or name in given
            given.add(name)
            if len(self._open) == _OUTSIDE_ARGUMENTS:
                self._given.add(name)
            self._emit(f'{before}"{escape_json(name.removesuffix("/").rstrip())}": ')
            name = yield from self._member(name, _member_schema(schema, self._schema, name))
            before, is_next = ", ", bool(name) or (yield from self._is_opening())
        self._emit("{}" if before == "{" else "}")

    def _member(self, name: str, schema: Any) -> Incremental[str]:
        """The value of a member. Several elements with the name of a list are its items.

        Returns the name of the next element if its tag was read.
        """
        if "array" not in schema_types(schema, self._schema):
            yield from self._element(name, schema)
            return ""
        values: list[str] = []
        emit, following = self._emit, name
        while following == name:
            parts: list[str] = []
            self._emit = parts.append
            try:
                yield from self._element(name, schema)
            except ParseError:
                emit("".join(parts) if not values else values[0])
                raise
            finally:
                self._emit = emit
            values.append("".join(parts))
            following = (yield from self._tag()) if (yield from self._is_opening()) else ""
        item = _member_schema(schema, self._schema, None)
        emit(values[0] if len(values) == 1 else join_items(values, item, self._schema))
        return following

    def _is_without_value(self, name: str) -> Incremental[bool]:
        """Whether the end of an outer element comes in place of the value."""
        if name.endswith("/"):
            return False
        closing = f"</{name}>"
        if not (yield from self._buffer.match((self._namespace,))):
            return False
        after = yield from self._after_namespace(len(closing))
        return after.startswith("</") and after != closing and after[2:].partition(">")[0] in self._open

    def _array(self, schema: Any) -> Incremental[None]:
        before = "["
        while (yield from self._is_opening()):
            self._emit(before)
            yield from self._element((yield from self._tag()), _member_schema(schema, self._schema, None))
            before = ", "
        self._emit("]")

    def _element(self, name: str, schema: Any) -> Incremental[None]:
        """After an opening tag, which may be that of an empty element."""
        if len(self._open) > _MAX_DEPTH:
            raise ParseError("nested too deeply")
        if name.endswith("/"):
            self._emit(to_json("", schema_types(schema, self._schema)))
            return
        self._open.append(name)
        types = schema_types(schema, self._schema)
        space = yield from self._buffer.skip_space()
        if not (yield from self._buffer.match((self._namespace,))) or not (yield from self._is_opening()):
            yield from self._leaf(self._buffer.spelled(space), types)
        elif (yield from self._after_namespace(len("<item>"))) == "<item>" and (
            "array" in types or "object" not in types  # otherwise it is a member with that name
        ):
            yield from self._array(schema)
        else:
            yield from self._object(schema)
        yield from self._close(name)

    def _leaf(self, text: str, types: tuple[str, ...]) -> Incremental[None]:
        """Text up to the next closing tag. What is certainly a string is streamed."""
        parts, streams = [text], types == ("string",)
        if streams:
            self._emit(f'"{escape_json(text)}')
        while (chunk := (yield from self._text())) is not None:
            parts.append(chunk)
            if streams:
                self._emit(escape_json(chunk))
        if streams:
            self._emit('"')
            return
        raw = "".join(parts)
        empty = next((_EMPTY[one] for one in types if one in _EMPTY), None)
        self._emit(empty if empty and not raw.strip() and "string" not in types else to_json(raw, types or ANY_TYPE))

    def _text(self) -> Incremental[str | None]:
        """The next chunk of text; None at a closing tag or at the end of the output."""
        buffer = self._buffer
        char = yield from buffer.peek()
        if char == "":
            self._end_output()
            return None
        if self._special.match(char):
            found = yield from buffer.match((self._namespace,))
            if found and (yield from self._is_closing()):
                return None
            return buffer.spelled(buffer.skip(len(found or char)))
        special = self._special.search(buffer.text, buffer.pos)
        return buffer.take_to(special.start() if special else len(buffer.text))

    def _tag_offset(self) -> Incremental[int]:
        """Where the tag begins after the namespace that comes next. Some models put a space between the two."""
        size = len(self._namespace)
        limit = size + _SPACE_LIMIT
        while size < limit and (yield from self._buffer.lookahead(size + 1))[size:].isspace():
            size += 1
        return size

    def _after_namespace(self, count: int) -> Incremental[str]:
        """The characters after the namespace that comes next."""
        size = yield from self._tag_offset()
        return (yield from self._buffer.lookahead(size + count))[size:]

    def _is_closing(self) -> Incremental[bool]:
        """Whether the tag after the namespace ends the text. One that the text opens is closed by one in the text."""
        after = yield from self._after_namespace(2)
        is_closing = after == "</" or after[:1] in self._ends
        if after[:1] in ("<", *self._begins) and not is_closing:
            self._quoted += 1
        elif is_closing and self._quoted:
            self._quoted -= 1
            return False
        return is_closing

    def _is_opening(self) -> Incremental[bool]:
        """Whether an opening tag comes next. Only tags may come here."""
        if self._closed is not None:
            return False
        yield from self._buffer.skip_space()
        if not (yield from self._buffer.match((self._namespace,))):
            self._end_output()
            return False
        after = yield from self._after_namespace(2)
        return after[:1] == "<" and after != "</"

    def _end_output(self) -> None:
        """No tag comes next. That is valid only between two arguments, if the model ended its output."""
        is_over = self._buffer.ended and self._buffer.is_empty and not self._buffer.truncated
        is_complete = len(self._open) == _OUTSIDE_ARGUMENTS and self._given.issuperset(
            self._schema.get("required") or ()
        )
        if not (is_over and is_complete):
            raise ParseError("expected an element or the end of one")
        self._closed = self._open[0]

    def _tag(self) -> Incremental[str]:
        """Take a tag with its namespace. Returns its name."""
        self._buffer.skip((yield from self._tag_offset()) + 1)
        name = yield from self._buffer.read_until(_TAG_END)
        if not (yield from self._buffer.skip_if(">")):
            raise ParseError("a tag without an end")
        return name.strip()

    def _closing_name(self) -> Incremental[str]:
        """The name of a closing tag. That of the block may be a token, which is not taken."""
        after = yield from self._after_namespace(2)
        if after[:1] in self._buffer.token_codes:
            return self._open[0]
        if after != "</":
            raise ParseError("expected an element or the end of one")
        return (yield from self._tag()).removeprefix("/").strip()

    def _close(self, name: str) -> Incremental[None]:
        """End the element: by its closing tag, by one that matches no open element, or by that of an outer one."""
        if self._closed is None:
            self._closed = yield from self._closing_name()
            self._emit("")  # commit: if the call breaks later, this tag is not part of the rest
        self._open.pop()
        if self._closed == name or self._closed not in self._open:
            self._closed = None


def _member_schema(schema: Any, root: Mapping[str, Any], name: str | None, depth: int = 0) -> Any:
    """The schema of the member with that name, or of an item (None)."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return _member_schema(resolve_ref(ref, root), root, name, depth + 1)
    if name is None and "items" in schema:
        return schema["items"]
    properties = schema.get("properties")
    if name is not None and isinstance(properties, Mapping) and name in properties:
        return properties[name]
    options = [o for keyword in ("anyOf", "oneOf", "allOf") for o in schema.get(keyword) or ()]
    found = (_member_schema(option, root, name, depth + 1) for option in options)
    default = schema.get("additionalProperties") if name is not None else None
    return next((f for f in found if f is not None), default)


_M3_ELEMENT = (f"{_NAMESPACE}<{{}}>", f"{_NAMESPACE}</{{}}>")
_M3_BODY = TaggedBody(f'{_NAMESPACE}{_INVOKE}"{{}}">', *_M3_ELEMENT, f"{_NAMESPACE}{_INVOKE_END}")

_M3 = OutputFormat(
    name="minimax_m3",
    results=("<response>", "</response>"),
    regions=regions({_NAMESPACE: StartReader(_read_tags)}, tags=(("<mm:think>", "</mm:think>"),), closes_alone=True),
    hidden_markers=(_TURN_END,),
    inner_markers=(_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END),
    stop_tokens=(_TURN_END,),
    turn_starts=(_TURN_START,),
    template_hints=((_NAMESPACE,), (_NAMESPACE, "<mm:think>")),
    name_hints=("minimax-m3", "minimax_m3"),
    calls=CallSyntax(_M3_BODY, f"{_NAMESPACE}{_BLOCK}\n", f"{_NAMESPACE}{_BLOCK_END}", closing="\n", between=""),
)

FORMATS = (_M1, _M2, _M3)
