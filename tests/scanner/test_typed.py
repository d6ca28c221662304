from __future__ import annotations

from typing import Any

import pytest

from modelyard.scanner.typed import convert, quoted, types

ROOT = {"$defs": {"Level": {"enum": [1, 2, "max"]}, "Self": {"$ref": "#/$defs/Self"}, "a/b": {"type": "array"}}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string"}, ("string",)),
        ({"type": ["integer", "null"]}, ("integer", "null")),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, ("number", "null")),
        ({"oneOf": [{"type": "string"}, {"anyOf": [{"type": "object"}]}]}, ("string", "object")),
        ({"enum": ["a", "b"]}, ("string",)),
        ({"const": True}, ("boolean",)),
        ({"$ref": "#/$defs/Level"}, ("integer", "string")),
        ({"$ref": "#/$defs/a~1b"}, ("array",)),
        ({"$ref": "#/$defs/Self"}, ()),
        ({"$ref": "#/nowhere"}, ()),
        ({"properties": {}}, ("object",)),
        ({"items": {}}, ("array",)),
        ({"type": "integer", "nullable": True}, ("integer", "null")),
        ({"type": "fancy"}, ()),
        ({"type": "float"}, ("number",)),
        ({"type": ["int", "None"]}, ("integer", "null")),
        ({"type": "uint64"}, ("integer",)),
        ({"type": "Dict[str, int]"}, ("object",)),
        ({"type": "list<str>"}, ("array",)),
        ({"type": "bool"}, ("boolean",)),
        ({"type": "varchar"}, ("string",)),
        ({"type": "any"}, ("any",)),
        ({"type": "integrity"}, ()),
        ({"type": 5}, ()),
        ({"type": [5, "str"]}, ("string",)),
        ({}, ()),
        (None, ()),
        (True, ()),
    ],
)
def test_types_are_read_from_a_schema(schema: Any, found: tuple[str, ...]) -> None:
    assert types(schema, ROOT) == found


@pytest.mark.parametrize(
    ("raw", "allowed", "json"),
    [
        ("5", ("integer",), "5"),
        (" 5\n", ("integer",), "5"),
        ("5.0", ("integer",), "5"),
        ("5.5", ("integer",), '"5.5"'),
        ("5.50", ("number",), "5.50"),
        ("1e3", ("number",), "1e3"),
        ("five", ("integer",), '"five"'),
        ("True", ("boolean",), "true"),
        ("false", ("boolean",), "false"),
        ("maybe", ("boolean",), '"maybe"'),
        ("null", ("integer", "null"), "null"),
        ("None", ("string", "null"), "null"),
        ("null", ("string",), '"null"'),
        ("none", ("string", "null"), '"none"'),
        ("5", ("string", "integer"), "5"),
        ("5", ("integer", "string"), "5"),
        ("x", ("integer", "string"), '"x"'),
        ("05", ("integer", "string"), '"05"'),
        ("5.0", ("integer", "string"), '"5.0"'),
        ("1", ("boolean", "string"), '"1"'),
        ("1", ("boolean", "integer"), "1"),
        ("1", ("boolean",), "true"),
        ("TRUE", ("string", "boolean"), "true"),
        ("True", ("string", "boolean"), "true"),
        ('{"a": 1}', ("string", "object"), '{"a": 1}'),
        ("{'a': 1}", ("string", "object"), "\"{'a': 1}\""),
        ("{a}", ("string", "object"), '"{a}"'),
        ("[1]", ("string", "object"), '"[1]"'),
        ("{'a': 1}", ("null", "object"), '{"a": 1}'),
        ("5", ("any",), "5"),
        ("five", ("any",), '"five"'),
        ("[1, 'a']", ("array",), '[1, "a"]'),
        ('{"a": 1}', ("array", "object"), '{"a": 1}'),
        ("[1", ("array",), "[1]"),
        ("not json", ("object",), '"not json"'),
        ('[{\\"a\\": 1}]', ("array",), '[{"a": 1}]'),
        ("\"{'a': 1}\"", ("object",), '{"a": 1}'),
        ('"[1]"', ("array", "null"), "[1]"),
        ('"[1]"', ("array", "string"), '"\\"[1]\\""'),
        ('"text"', ("array",), '"\\"text\\""'),
        (" a\n", ("string",), '" a\\n"'),
        ("true", ("integer",), '"true"'),
    ],
)
def test_a_value_becomes_what_its_schema_allows(raw: str, allowed: tuple[str, ...], json: str) -> None:
    assert convert(raw, allowed) == json


def test_half_characters_do_not_break_a_string() -> None:
    assert quoted("a\ud800b") == "a?b"
