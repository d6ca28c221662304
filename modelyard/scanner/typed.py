"""Arguments of formats that write every value as text: what JSON they mean, by the tool's own schema.

Text stays text unless the schema says otherwise. Where it allows several types, the value is the first of null, number,
truth value, object and list that it spells; where text is one of them, it must spell it exactly. A value that fits none
of its types is passed on as a string: the tool can say what is wrong with it better than we can.

Schemas in the wild also name types as programming languages do: these count as what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from modelyard.core.request import Tool
from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import Unreadable
from modelyard.scanner.repair import mend, mended

_NAMES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_ORDER = ("null", "integer", "number", "boolean", "object", "array", "any", "string")
_SPOKEN = {
    "string": ("str", "text", "char", "varchar", "enum"),
    "integer": ("int", "uint", "long", "short", "unsigned", "bigint", "byte"),
    "number": ("num", "float", "double", "decimal", "real"),
    "boolean": ("bool",),
    "object": ("dict", "map", "mapping", "struct", "record"),
    "array": ("arr", "list", "tuple", "set", "sequence"),
    "null": ("none", "nonetype"),
}
_TYPES = {name: name for name in _ORDER} | {word: name for name, words in _SPOKEN.items() for word in words}
_BASE = re.compile(r"[a-z]+")  # `int64` and `list[str]` are an int and a list
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_MAX_REFS = 32
_WORDS = {"True": "true", "False": "false", "None": "null"}
ANY = ("any",)  # what the value looks like; for families that write everything but text as JSON


def quoted(text: str) -> str:
    """The text as a JSON string, without its quotes; half characters become the replacement character."""
    try:
        return msgspec.json.encode(text)[1:-1].decode()
    except UnicodeEncodeError:
        return quoted(text.encode("utf-8", "replace").decode())


def types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[str, ...]:
    """The JSON types that a schema allows, in its own order; empty: it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFS:
        return ()
    return tuple(dict.fromkeys(_named(schema, root, depth)))


def _named(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str | list):
        yield from filter(None, map(_type, [declared] if isinstance(declared, str) else declared))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        yield from (_NAMES.get(type(v), "object" if isinstance(v, dict) else "array") for v in values)
    elif isinstance(ref := schema.get("$ref"), str):
        yield from types(resolve(ref, root), root, depth + 1)
    else:
        yield from _combined(schema, root, depth)
    if schema.get("nullable") is True:
        yield "null"


def _type(declared: Any) -> str | None:
    base = _BASE.match(declared.strip().lower()) if isinstance(declared, str) else None
    return _TYPES.get(base.group()) if base else None


def _combined(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    for word in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(word) or ():
            yield from types(one, root, depth + 1)
    if "properties" in schema or "additionalProperties" in schema:
        yield "object"
    if "items" in schema:
        yield "array"


def resolve(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def convert(raw: str, allowed: tuple[str, ...]) -> str:
    """The JSON text of a raw value that may be of these types."""
    text, exact = raw.strip(), "string" in allowed
    for one in _ORDER if len(allowed) > 1 else allowed:
        if one in allowed and (found := _as(one, raw, text)) is not None and not (exact and _is_loose(text, found)):
            return found
    return f'"{quoted(raw)}"'


def _is_loose(text: str, found: str) -> bool:
    """What was found had to be mended out of a text that may just as well be one."""
    return found not in (text, text.lower(), _WORDS.get(text))


def _as(one: str, raw: str, text: str) -> str | None:
    if one == "string":
        return f'"{quoted(raw)}"'
    if one == "null":
        return "null" if text.lower() in ("null", "none") else None
    if one == "boolean":
        return _BOOLEANS.get(text.lower())
    if one in ("integer", "number"):
        return _number(text, whole=one == "integer")
    if one in ("object", "array"):
        return _container(text, "{" if one == "object" else "[")
    return _looks(text) if one == "any" else None


def _container(text: str, bracket: str) -> str | None:
    """The object or list that this spells, perhaps as a string of JSON, with its quotes around or without."""
    found = mend(text) or mend(_unescaped(text))
    if found and found.startswith('"'):
        found = mend(_unescaped(text))
    return found if found and found.startswith(bracket) else None


def _unescaped(text: str) -> str:
    try:
        return msgspec.json.decode(text if text.startswith('"') else f'"{text}"', type=str)
    except msgspec.DecodeError:
        return ""


def _looks(text: str) -> str | None:
    """The JSON that a value of unknown type spells, if it does."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return mend(text) if text[:1] in ("{", "[") else _WORDS.get(text)
    return text


def _number(text: str, *, whole: bool) -> str | None:
    try:
        found = mended(text)
    except Unreadable:
        return None
    if found in ("true", "false", "null"):
        return None
    if not whole or found.lstrip("-").isdigit():
        return found
    head, _, tail = found.partition(".")
    return head if tail and not tail.strip("0") else None


class TypedArguments:
    """Writes a call's arguments object member by member; values that are certainly text are streamed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        tool: Tool | None = calls.tool
        self._root: Mapping[str, Any] = tool.parameters if tool else {}
        properties = self._root.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._opened = False
        self._raw: list[str] | None = None
        self._types: tuple[str, ...] = ()
        self.given: set[str] = set()

    def allowed(self, name: str) -> tuple[str, ...]:
        """The types that the schema allows a parameter; empty: it does not say."""
        return types(self.properties.get(name), self._root)

    def begin(self, name: str, allowed: tuple[str, ...] | None = None) -> None:
        """`allowed` is for families that know better than the schema what type they wrote."""
        self._calls.put(f'{", " if self._opened else "{"}"{quoted(name)}": ')
        self._opened = True
        self.given.add(name)
        self._types = self.allowed(name) if allowed is None else allowed
        if self._types in ((), ("string",)):
            self._raw = None
            self._calls.put('"')
        else:
            self._raw = []

    def text(self, chunk: str) -> None:
        if self._raw is None:
            self._calls.put(quoted(chunk))
        else:
            self._raw.append(chunk)

    def end(self) -> None:
        self._calls.put('"' if self._raw is None else convert("".join(self._raw), self._types))

    def close(self) -> None:
        self._calls.put("}" if self._opened else "{}")
        self._calls.close()

    def may_begin(self, name: str, *, invented: bool = False) -> bool:
        """A parameter of that name can come next, as far as the schema knows, or even if it was `invented`."""
        return name not in self.given and (invented or not self.properties or name in self.properties)
