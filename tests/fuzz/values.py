"""Strategies for values: from a JSON schema, from the words that the code compares with, and mutations of valid values.

A schema alone says that `type` is a string. The string literals of the modules that read it say which strings matter.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Json = Any
Schema = Mapping[str, Any]

_MAX_WORD = 40
_MAX_FIELDS = 5  # optional fields of one object: with all of them, every body would have an error in the first
_HOSTILE = (
    *("", " ", "\0", "é😀", "\u202e", "\ufdd0", "\r\n", "x" * 3000, "word " * 500),
    *("[" * 2000, "{" * 500, "(" * 300, "{{", "{% for a in b %}", "%s%n", "(a+)+$", "[^]", 'root ::= "a"', "start: /a/"),
    *("<|im_end|>", "<|im_start|>system", "<tool_call>", "</think>", "../../etc/passwd", "__class__", "NaN", "-0"),
    *("data:image/png;base64,AAAA", "data:,", "http://127.0.0.1:1/", "http://[", "file:///etc/passwd"),
    *('{"type": "object"}', '{"$ref": "#"}', '{"pattern": "["}', "null", "[]", "9" * 400),
)
_INTEGERS = (-1, 0, 1, 2, 127, 128, 2**15, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**64), 10**40)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e308, -1e308)


def code_words(*files: Path) -> list[str]:
    """The short string literals of these modules, except docstrings."""
    found: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
                found.add(node.value)
    return sorted(word for word in found if 0 < len(word) <= _MAX_WORD and re.fullmatch(r"[\w./:<>|-]+", word))


class Values:
    """Strategies that share a dictionary of words. `binary`: bytes are bytes, as in MessagePack, not base64."""

    def __init__(self, words: Iterable[str], components: Mapping[str, Schema] | None = None, *, binary: bool = False):
        self._components, self._binary = components or {}, binary
        self._refs: dict[str, SearchStrategy[Json]] = {}
        self.words = st.sampled_from(sorted(set(words)) or ["x"])
        self.strings = self.words | st.text(max_size=12) | st.sampled_from(_HOSTILE)
        self.strings = self.strings.filter(_is_unicode)
        self.integers = st.integers(-3, 300) | st.sampled_from(_INTEGERS)
        self.numbers = self.integers | st.sampled_from(_FLOATS) | st.floats(allow_nan=False, allow_infinity=False)
        scalars = st.none() | st.booleans() | self.numbers | self.strings
        scalars = scalars | st.binary(max_size=16) if binary else scalars
        self.any: SearchStrategy[Json] = st.recursive(
            scalars,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(self.words, inner, max_size=3),
            max_leaves=5,
        )
        self._kinds: dict[str, Callable[[Schema], SearchStrategy[Json]]] = {
            "null": lambda _: st.none(),
            "boolean": lambda _: st.booleans(),
            "integer": self._integer,
            "number": lambda _: self.numbers,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    # --- from a schema ------------------------------------------------------------------------------------------------

    def of(self, schema: Schema) -> SearchStrategy[Json]:
        """Values of the right types; whether they make sense is for the server to find out."""
        if "$ref" in schema:
            return self._ref(schema["$ref"].rpartition("/")[2])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return st.one_of([self.of(one) for one in schema[union]])
        kinds = schema.get("type")
        if kinds is None:
            return self.any
        return st.one_of([self._kinds[kind](schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)])

    def _ref(self, name: str) -> SearchStrategy[Json]:
        if name not in self._refs:
            self._refs[name] = st.deferred(lambda: self.of(self._components[name]))
        return self._refs[name]

    def _integer(self, schema: Schema) -> SearchStrategy[Json]:
        bounds = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
        around = [bound + step for bound in bounds for step in (-1, 0, 1)]
        return self.integers | st.sampled_from(around) if around else self.integers

    def _string(self, schema: Schema) -> SearchStrategy[Json]:
        if schema.get("contentEncoding") == "base64" and self._binary:
            numbers = st.lists(st.sampled_from([0, 1, 5, 2**16, 2**32 - 1]), max_size=6)
            return st.binary(max_size=24) | numbers.map(lambda ids: b"".join(i.to_bytes(4, "little") for i in ids))
        return self.strings

    def _array(self, schema: Schema) -> SearchStrategy[Json]:
        inner = schema.get("items", {})
        if "prefixItems" not in schema:
            return st.lists(self.of(inner or {}), max_size=3)
        first = [self.of(one) for one in schema["prefixItems"]]
        least = schema.get("minItems", len(first))
        if least >= len(first):
            return st.tuples(*first).map(list)
        return st.integers(least, len(first)).flatmap(lambda length: st.tuples(*first[:length]).map(list))

    def _object(self, schema: Schema) -> SearchStrategy[Json]:
        fields: Mapping[str, Schema] = schema.get("properties", {})
        more = schema.get("additionalProperties")
        if not fields:
            inner = self.of(more) if isinstance(more, Mapping) else self.any
            return st.dictionaries(self.words | self.integers.map(str), inner, max_size=3)
        strategies = {name: self.of(field) for name, field in fields.items()}
        required = [name for name in schema.get("required", ()) if name in fields]
        optional = [name for name in fields if name not in required]

        @st.composite
        def build(draw: st.DrawFn) -> dict[str, Json]:
            some = draw(st.lists(st.sampled_from(optional), max_size=_MAX_FIELDS, unique=True)) if optional else []
            return {name: draw(strategies[name]) for name in (*required, *some)}

        return build()

    # --- from a valid value -------------------------------------------------------------------------------------------

    def mutated(self, valid: SearchStrategy[Json], most: int = 3) -> SearchStrategy[Json]:
        """A valid value in which some parts are replaced, removed, repeated or moved."""

        @st.composite
        def build(draw: st.DrawFn) -> Json:
            value = copy.deepcopy(draw(valid))
            for _ in range(draw(st.integers(0, most))):
                value = self._mutate(draw, value)
            return value

        return build()

    def _mutate(self, draw: st.DrawFn, value: Json) -> Json:
        places = list(_places(value))
        if not places:
            return draw(self.any)
        container, key = draw(st.sampled_from(places))
        part = container[key]
        match draw(st.integers(0, 5)):
            case 0 | 1:
                container[key] = draw(self.any)
            case 2 if isinstance(part, str):
                container[key] = draw(self.strings)
            case 2:
                container[key] = draw(self.numbers)
            case 3:
                del container[key]
            case 4 if isinstance(container, list):
                container[key:key] = [copy.deepcopy(part) for _ in range(draw(st.sampled_from([1, 2, 40])))]
            case 4:
                container[draw(self.words)] = copy.deepcopy(part)
            case _:
                container[key] = [part] if draw(st.booleans()) else {draw(self.words): part}
        return value


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every part of a value, as its container and key."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield value, key
        yield from _places(part)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def broken_bytes(whole: SearchStrategy[bytes]) -> SearchStrategy[bytes]:
    """Encoded values that were cut off or damaged."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(whole))
        for _ in range(draw(st.integers(1, 3))):
            if not data:
                break
            at = draw(st.integers(0, len(data) - 1))
            match draw(st.integers(0, 3)):
                case 0:
                    del data[at:]
                case 1:
                    data[at] = draw(st.integers(0, 255))
                case 2:
                    data[at:at] = draw(st.binary(min_size=1, max_size=8))
                case _:
                    data[at:at] = data[at : at + 16] * draw(st.sampled_from([1, 100]))
        return bytes(data)

    return build() | st.binary(max_size=64)
