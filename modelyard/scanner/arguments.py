"""Arguments of formats that write every value as text between tags: where a value ends, and which JSON it means.

**Types.** A value is text unless the tool's schema says otherwise. If the schema allows several types, the value is
the first of null, number, boolean, object and list that it spells. If text is one of them, it must spell it exactly.
A value that fits none of its types is passed on as a string: the tool can report the error better. Schemas also name
types as programming languages do. These names count as the JSON types that they mean.

**Ends.** Code that is written into a file may contain the tags of a call, as text or as tokens. The closing tag ends
the value only if the next parameter or the end of the call follows. The next parameter is any: models invent
parameters, and the tool should get to refuse them. But a tag that the value quotes is closed by a tag that it quotes:
after one, only a parameter counts that the schema knows and that is not given yet, or an end of the call that ends the
output. So an example of a call goes into a file unchanged. A file that contains `</parameter>` and then `<parameter=x>`
without an opening tag before is cut. The end of the call alone ends the value only if nothing but another call follows.
A value that the output leaves open is incomplete, and so is its call.

**Repetition.** If a parameter is given twice, the last value counts. If the schema says that it is a list, the values
are its items. A parameter whose call ends where its value should begin is not given at all.

White space inside a value is exact. Only in families that write values on separate lines, the line breaks around a
value belong to its tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.request import Tool
from modelyard.scanner.lenient_json import JsonReader, escape_json, repair_json, repair_literal
from modelyard.scanner.lexer import NAME_LIMIT, SURROGATES, Incremental, ParseError, TextBuffer
from modelyard.scanner.output import CallBuilder

_TYPE_OF: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_ORDER = ("null", "integer", "number", "boolean", "object", "array", "any", "string")
_ALIASES = {
    "string": ("str", "text", "char", "varchar", "enum"),
    "integer": ("int", "uint", "long", "short", "unsigned", "bigint", "byte"),
    "number": ("num", "float", "double", "decimal", "real"),
    "boolean": ("bool",),
    "object": ("dict", "map", "mapping", "struct", "record"),
    "array": ("arr", "list", "tuple", "set", "sequence"),
    "null": ("none", "nonetype"),
}
_TYPES = {name: name for name in _ORDER} | {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_BASE_TYPE = re.compile(r"[a-z]+")  # `int64` and `list[str]` are an int and a list
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_MAX_REFS = 32
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TAG = re.compile(f"[<{SURROGATES}]")
_IS_NAME = re.compile(r"[\w.-]+\Z")
CONTAINER_OR_TEXT = ("object", "array", "string")  # for families that write only objects and lists as JSON
ANY_TYPE = ("any",)  # the type that the value looks like, for families that write everything but text as JSON
STRING_TYPES = ((), ("string",))  # the value is certainly text


# --- types ------------------------------------------------------------------------------------------------------------


def schema_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[str, ...]:
    """The JSON types that a schema allows, in its order; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFS:
        return ()
    return tuple(dict.fromkeys(_iter_types(schema, root, depth)))


def _iter_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str | list):
        yield from filter(None, map(_json_type, [declared] if isinstance(declared, str) else declared))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        yield from (_TYPE_OF.get(type(v), "object" if isinstance(v, dict) else "array") for v in values)
    elif isinstance(ref := schema.get("$ref"), str):
        yield from schema_types(resolve_ref(ref, root), root, depth + 1)
    else:
        for keyword in ("anyOf", "oneOf", "allOf"):
            for option in schema.get(keyword) or ():
                yield from schema_types(option, root, depth + 1)
        if "properties" in schema or "additionalProperties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"
    if schema.get("nullable") is True:
        yield "null"


def _json_type(declared: Any) -> str | None:
    base = _BASE_TYPE.match(declared.strip().lower()) if isinstance(declared, str) else None
    return _TYPES.get(base.group()) if base else None


def resolve_ref(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def to_json(raw: str, allowed: tuple[str, ...]) -> str:
    """The JSON text of a raw value that may have these types."""
    text, exact = raw.strip(), "string" in allowed
    for one in _ORDER if len(allowed) > 1 else allowed:
        if one in allowed and (found := _as_type(one, raw, text)) is not None:
            is_repaired = found not in (text, text.lower(), _PYTHON_WORDS.get(text))
            if not (exact and is_repaired):
                return found
    return f'"{escape_json(raw)}"'


def _as_type(one: str, raw: str, text: str) -> str | None:
    if one == "string":
        return f'"{escape_json(raw)}"'
    if one == "null":
        return "null" if text.lower() in ("null", "none") else None
    if one == "boolean":
        return _BOOLEANS.get(text.lower())
    if one in ("integer", "number"):
        return _as_number(text, integer=one == "integer")
    if one in ("object", "array"):
        return _as_container(text, "{" if one == "object" else "[")
    return _as_any(text) if one == "any" else None


def _as_container(text: str, bracket: str) -> str | None:
    """The object or list that this spells, perhaps as a JSON string with or without its quotes."""
    found = repair_json(text) or repair_json(_unescaped(text))
    if found and found.startswith('"'):
        found = repair_json(_unescaped(text))
    return found if found and found.startswith(bracket) else None


def _unescaped(text: str) -> str:
    try:
        return msgspec.json.decode(text if text.startswith('"') else f'"{text}"', type=str)
    except msgspec.DecodeError:
        return ""


def _as_any(text: str) -> str | None:
    """The JSON that a value of unknown type spells."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return repair_json(text) if text[:1] in ("{", "[") else _PYTHON_WORDS.get(text)
    return text


def _as_number(text: str, *, integer: bool) -> str | None:
    try:
        found = repair_literal(text)
    except ParseError:
        return None
    if found in ("true", "false", "null"):
        return None
    if not integer or found.lstrip("-").isdigit():
        return found
    head, _, tail = found.partition(".")
    return head if tail and not tail.strip("0") else None


def join_items(values: Sequence[str], item: Any, root: Mapping[str, Any]) -> str:
    """The list of these JSON values. One that is a list itself adds its items, unless the items are lists."""
    types, items = schema_types(item, root), []
    for value in values:
        decoded: Any = msgspec.json.decode(value)
        if isinstance(decoded, str):
            items.append(to_json(decoded, types or ("string",)))
        elif isinstance(decoded, list) and "array" not in types:
            items += [msgspec.json.encode(one).decode() for one in decoded]
        else:
            items.append(value)
    return f"[{', '.join(items)}]"


class ArgumentWriter:
    """Writes the arguments object of a call member by member. Values that are certainly text are streamed.

    A list is held back until another parameter follows.
    """

    def __init__(self, calls: CallBuilder) -> None:
        self._calls = calls
        tool: Tool | None = calls.tool
        self._schema: Mapping[str, Any] = tool.parameters if tool else {}
        properties = self._schema.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._raw: list[str] | None = None  # the open value, if it is not certainly text
        self._types: tuple[str, ...] = ()
        self._name = ""
        self._lists: dict[str, list[str]] = {}  # the values of parameters that are lists
        self._is_held = False  # the last value is one of a list and was not passed on yet
        self._is_repeated = False  # a parameter was given twice
        self.given: set[str] = set()

    @property
    def is_open(self) -> bool:
        return self._calls.is_open

    def types_of(self, name: str) -> tuple[str, ...]:
        """The types that the schema allows for a parameter; empty if it does not say."""
        return schema_types(self.properties.get(name), self._schema)

    def begin(self, name: str, types: tuple[str, ...] | None = None) -> None:
        """`types` is for families that know better than the schema which type they wrote."""
        if not name:
            raise ParseError("a parameter without a name")
        self._types = self.types_of(name) if types is None else types
        if self._is_held and name == self._name:
            self._raw = []
            return
        self.flush()
        self._is_repeated = self._is_repeated or name in self.given
        self._calls.append(f'{", " if self.given else "{"}"{escape_json(name)}": ')
        self.given.add(name)
        self._name = name
        if self._types in STRING_TYPES:
            self._raw = None
            self._calls.append('"')
        else:
            self._raw = []

    def write(self, chunk: str) -> None:
        if not chunk.isascii():
            chunk = self._calls.spelled(chunk)
        if self._raw is None:
            self._calls.append(escape_json(chunk))
        else:
            self._raw.append(chunk)

    def end(self) -> None:
        if self._raw is None:
            self._calls.append('"')
        elif "array" in self.types_of(self._name):
            self._lists.setdefault(self._name, []).append(to_json("".join(self._raw), self._types))
            self._is_held = True
        else:
            self._calls.append(to_json("".join(self._raw), self._types))

    def leave_open(self, buffer: TextBuffer) -> None:
        """The output ends inside of a value. Its words are not lost, unless a limit may have cut the last one."""
        if self._raw and not buffer.truncated:
            self._calls.append("".join(self._raw))

    def flush(self) -> None:
        """Pass on the list that was held back."""
        if self._is_held:
            values, schema = self._lists[self._name], self.properties.get(self._name)
            item = schema.get("items") if isinstance(schema, Mapping) else None
            self._calls.append(values[0] if len(values) == 1 else join_items(values, item, self._schema))
            self._is_held = False

    def finish(self) -> None:
        self.flush()
        self._calls.finish("}" if self.given else "{}", is_repeated=self._is_repeated)

    def finish_at_end(self, buffer: TextBuffer) -> None:
        """The output ends before the call does: complete if the model ended it and nothing required is missing."""
        required = self._schema.get("required") or ()
        if buffer.truncated or not self.given.issuperset(required):
            raise ParseError("the output ends inside a call")
        self.finish()

    def read_json(self, buffer: TextBuffer) -> Incremental[None]:
        """All arguments as one JSON object."""
        yield from JsonReader(buffer, self._calls.append).read()
        self._calls.finish()

    def expects(self, name: str) -> bool:
        """Whether this parameter was not given yet, and the schema knows it or knows none."""
        return name not in self.given and (not self.properties or name in self.properties)


# --- values between tags ----------------------------------------------------------------------------------------------


def parameter_name(raw: str) -> str:
    """The name without quotes and without the attributes that may follow it."""
    name = raw.strip()
    return name[1:].partition(name[0])[0] if name[:1] in ("'", '"') else name.strip("\"'")


class ParameterTags(Struct, frozen=True):
    """`opening` begins the name of a parameter, `named` ends it. `ends` close the call, `after` can follow the call."""

    opening: str
    named: str
    closing: str
    ends: tuple[str, ...]
    after: tuple[str, ...]
    on_lines: bool = True  # line breaks around a value belong to its tags
    after_tags: str = ""  # what may follow any of these tags
    name: Callable[[str], str] = parameter_name


def read_parameters(
    buffer: TextBuffer,
    tags: ParameterTags,
    arguments: ArgumentWriter,
    read_one: Callable[[TextBuffer, ArgumentWriter], Incremental[None]],
) -> Incremental[None]:
    """All parameters of a call. `read_one` reads one after its opening tag."""
    opening, ends = buffer.encoded(tags.opening), tuple(map(buffer.encoded, (*tags.ends, *tags.after)))
    try:
        while arguments.is_open:
            yield from buffer.skip_space()
            found = yield from buffer.match((opening, *ends))
            if found == opening:
                buffer.skip(len(opening))
                yield from read_one(buffer, arguments)
            elif found:
                arguments.finish()
            elif (yield from buffer.peek()) == "":
                arguments.finish_at_end(buffer)
            else:
                raise ParseError("expected a parameter or the end of the call")
    except ParseError:
        if arguments.is_open:
            arguments.flush()
        raise


def has_value(buffer: TextBuffer, tags: ParameterTags) -> Incremental[bool]:
    """Whether a value follows a key. The next key or the end of the call may come in its place."""
    return not (yield from buffer.is_next(tags.opening, *tags.ends, *tags.after))


def read_value(
    buffer: TextBuffer,
    tags: ParameterTags,
    arguments: ArgumentWriter,
    name: str,
    types: tuple[str, ...] | None = None,
) -> Incremental[None]:
    """The value of a parameter, up to its closing tag."""
    reader = TagValueReader(buffer, tags, arguments)
    if name and (yield from reader.is_missing()):
        return
    arguments.begin(name, types)
    yield from reader.read()
    arguments.end()


class TagValueReader:
    """Reads one value into `arguments`. What certainly belongs to it is streamed."""

    def __init__(self, buffer: TextBuffer, tags: ParameterTags, arguments: ArgumentWriter) -> None:
        self._buffer, self._arguments, self._on_lines = buffer, arguments, tags.on_lines
        self._opening, self._named, self._closing = map(buffer.encoded, (tags.opening, tags.named, tags.closing))
        self._ends = (*map(buffer.encoded, tags.ends), *buffer.turn_ends)
        self._after = tuple(map(buffer.encoded, tags.after))
        self._after_tags, self._name_in = buffer.encoded(tags.after_tags), tags.name
        self._skipped = (*self._ends, *filter(None, [self._after_tags]))
        self._newline = ""  # a held line break that belongs to the closing tag if one follows
        self._quoted = self._quoted_calls = 0  # parameters and calls that the value itself opens and has not closed yet

    def is_missing(self) -> Incremental[bool]:
        """Whether the call ends before the value begins."""
        offset = yield from self._skip_space(0)
        found = yield from self._buffer.match(self._ends, offset)
        if found is None:
            return False
        after = yield from self._skip_space(offset + len(found))
        is_over = self._buffer.ended and self._buffer.pos + after >= len(self._buffer.text)
        if not is_over and not (yield from self._buffer.match((*self._ends, *self._after), after)):
            return False
        self._buffer.skip(offset)
        return True

    def read(self) -> Incremental[None]:
        """Up to its closing tag, or to what follows it."""
        buffer = self._buffer
        if self._on_lines and (yield from buffer.peek()) == "\n":
            buffer.skip(1)
        while True:
            found = _TAG.search(buffer.text, buffer.pos)
            self._write(buffer.take_to(found.start() if found else len(buffer.text)))
            if (yield from buffer.peek()) == "":
                self._arguments.leave_open(buffer)
                raise ParseError("a value without an end")
            if found and (yield from self._is_closed()):
                return
            if found:
                self._write(buffer.skip(1))

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._on_lines:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if text:
            self._arguments.write(text)

    def _is_closed(self) -> Incremental[bool]:
        """Whether the tag that comes next ends the value."""
        buffer = self._buffer
        tag = yield from buffer.match((self._closing, self._opening, *self._ends, *self._after))
        if tag is None:
            return False
        if tag == self._closing:
            if (yield from self._is_end(len(tag))):
                buffer.skip(len(tag))
                return True
            self._quoted = max(0, self._quoted - 1)
        elif tag == self._opening:
            return (yield from self._is_next_parameter())
        elif tag in self._after:
            self._quoted_calls += 1
        elif (yield from self._is_call_end()):
            return True
        else:
            self._quoted_calls = max(0, self._quoted_calls - 1)
        return False

    def _is_next_parameter(self) -> Incremental[bool]:
        """Whether the closing tag before this opening tag was forgotten.

        It was if the schema knows the name. Without known names it was unless the tag is part of a call that the value
        quotes. Otherwise the tag is text.
        """
        name, arguments = (yield from self._name(0)), self._arguments
        is_next = name in arguments.properties or not (arguments.properties or self._quoted_calls)
        if name is not None and is_next and name not in arguments.given:
            return True
        self._quoted += name is not None
        return False

    def _is_end(self, offset: int) -> Incremental[bool]:
        """Whether what follows the closing tag can follow a value."""
        buffer = self._buffer
        offset = yield from self._skip_space(offset)
        found = yield from buffer.match((self._opening, *self._ends, *self._after), offset)
        if found is None:
            return buffer.ended and buffer.pos + offset >= len(buffer.text)
        if found == self._opening:
            name = yield from self._name(offset)
            return name is not None and (not self._quoted or self._arguments.expects(name))
        return not self._quoted or (yield from buffer.is_output_end(offset, self._skipped, may_repeat=False))

    def _is_call_end(self) -> Incremental[bool]:
        """Whether the end of the call, without the end of the value, is followed only by what can follow a call."""
        may_repeat = not self._quoted_calls
        return (yield from self._buffer.is_output_end(0, self._skipped, self._after, may_repeat=may_repeat))

    def _skip_space(self, offset: int) -> Incremental[int]:
        offset = yield from self._buffer.skip_space_ahead(offset)
        if self._after_tags and (yield from self._buffer.match((self._after_tags,), offset)):
            offset = yield from self._buffer.skip_space_ahead(offset + len(self._after_tags))
        return offset

    def _name(self, offset: int) -> Incremental[str | None]:
        """The name in the parameter tag at `offset`, or None if it has none."""
        buffer, start = self._buffer, offset + len(self._opening)
        while True:
            end = buffer.text.find(self._named, buffer.pos + start, buffer.pos + start + NAME_LIMIT)
            if end >= 0:
                name = self._name_in(buffer.text[buffer.pos + start : end])
                return name if _IS_NAME.match(name) or self._arguments.expects(name) else None
            if buffer.ended or len(buffer.text) - buffer.pos - start >= NAME_LIMIT:
                return None
            yield
