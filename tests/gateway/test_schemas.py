"""Schemas in the words that a grammar can enforce: what is written allows only what the original allows."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.grammar_check import translated
from modelyard.gateway.constraints import enforceable_format
from modelyard.gateway.schemas import rewritten

_END = 256


class _Bytes:
    """A vocabulary of all bytes and an end token."""

    eos_token_id, bos_token_id = _END, None

    def __init__(self) -> None:
        self.special_token_ids, self.tokens = [_END], [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def vocabulary() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    bytes_only: Any = _Bytes()
    return LLTokenizer(TokenizerWrapper(bytes_only), slices=[])


def matcher(schema: dict[str, Any]) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(vocabulary(), translated("json_schema", json.dumps(schema)), log_level=0)


def sample(start: Any, chance: random.Random) -> list[Any]:
    """A random text that the grammar allows, as a value; none if it becomes long."""
    grammar, out, hurry = start.deep_copy(), bytearray(), chance.choice([0.2, 0.6, 0.9])
    while not grammar.is_stopped() and len(out) < 300:
        allowed = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        choices = [int(each) for each in allowed if each <= _END]
        if _END in choices and (len(choices) == 1 or chance.random() < 0.5):
            return [json.loads(out)]
        choices = [each for each in choices if each != _END and each < 127] or choices
        closing = [each for each in choices if each in b'"}],']
        byte = chance.choice(closing if closing and chance.random() < hurry else choices)
        grammar.consume_token(byte)
        assert not grammar.is_error(), grammar.get_error()
        out.append(byte)
    return [json.loads(out)] if grammar.is_stopped() else []


def samples(schema: dict[str, Any], count: int = 30) -> list[Any]:
    """Values that the rewritten schema allows; each must match the original one."""
    made = rewritten(schema)
    assert made.not_enforced == []
    start, chance, check = matcher(made.schema), random.Random(1), Draft202012Validator(schema)
    assert not start.is_error(), start.get_error()
    found = [value for _ in range(count) for value in sample(start, chance)]
    assert [value for value in found if not check.is_valid(value)] == []
    return found


def allows(schema: dict[str, Any], value: Any) -> bool:
    grammar, text = matcher(rewritten(schema).schema), json.dumps(value, ensure_ascii=False).encode()
    return bool(grammar.try_consume_tokens(list(text)) == len(text) and grammar.is_accepting())


_KIND = {"type": "object", "additionalProperties": False, "required": ["kind"]}
_CAT, _DOG = {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, {"kind": {"const": "dog"}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, ["c", "a"], ["a", "a"]),
        (
            {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "uniqueItems": True},
            [2, 5],
            [2, 2],
        ),
        ({"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2}, [True, False], [True]),
        ({"type": "string", "not": {"const": "abc"}}, "abd", "abc"),
        ({"type": "string", "not": {"enum": ["", "a", "ab\n]"]}}, "ab", "a"),
        ({"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}}, 3, 2),
        ({"not": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}, {"a": 1}, {"a": ""}),
        ({"type": "array", "not": {"const": [1, 2]}, "items": {"type": "integer"}}, [1, 3], [1, 2]),
        ({"type": "object", "not": {"required": ["a"]}, "maxProperties": 1}, {}, {"a": 1}),
        (
            {
                "type": "object",
                "properties": {"country": {"enum": ["US", "DE"]}, "zip": {"type": "string"}},
                "required": ["country", "zip"],
                "additionalProperties": False,
                "if": {"properties": {"country": {"const": "US"}}},
                "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
                "else": {"properties": {"zip": {"pattern": "^D-[0-9]{5}$"}}},
            },
            {"country": "DE", "zip": "D-12345"},
            {"country": "DE", "zip": "12345"},
        ),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}}, {"ab": 1}, {"AB": 1}),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, {"y": None}, {"z": None}),
        ({"type": "object", "propertyNames": {"not": {"const": "id"}}, "maxProperties": 1}, {"i": 1}, {"id": 1}),
        (
            {
                "type": "object",
                "properties": {"card": {"type": "null"}, "address": {"type": "null"}},
                "additionalProperties": False,
                "dependentRequired": {"card": ["address"]},
            },
            {"card": None, "address": None},
            {"card": None},
        ),
        (
            {"properties": {"a": {"type": "null"}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
            {"a": None, "b": None},
            {"a": None, "b": 1},
        ),
        ({"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}}, [1, 7, 2], [1, 2]),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 1, "maxContains": 1}, [1, None], [None, None]),
        ({"oneOf": [{**_KIND, "properties": _CAT}, {**_KIND, "properties": _DOG}]}, {"kind": "dog"}, {"kind": "cow"}),
        ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, 7, 4),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
            {"b": None},
            {"a": None, "b": None},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
            {"a": None},
            {"b": 1},
        ),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"not": {"type": ["null", "object", "array"]}}}}, 1, None),
        ({"$id": "http://x.test/r", "$ref": "n", "$defs": {"n": {"$id": "n", "type": "null"}}}, None, 1),
    ],
)
def test_keywords_that_a_grammar_lacks_are_said_in_other_words(schema: Any, allowed: Any, forbidden: Any) -> None:
    assert samples(schema)
    assert allows(schema, allowed)
    assert not allows(schema, forbidden)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "string", "not": {"pattern": "a"}}, "/not"),
        ({"properties": {"x": {"not": {"type": "integer"}}}}, "/properties/x/not"),
        ({"if": {"multipleOf": 3}, "then": {"minimum": 3}}, "/if/not"),
        ({"type": "string", "format": "phone"}, "/format"),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern"),
        ({"type": "string", "pattern": "["}, "/pattern"),
        ({"type": "string", "pattern": "^a$|^b$"}, "/pattern"),
        ({"pattern": "a" * 2049}, "/pattern"),
        ({"type": "any"}, "/type"),
        ({"$ref": "https://example.com/schema"}, "/$ref"),
        ({"$ref": "#/$defs/missing"}, "/$ref"),
        ({"enum": []}, "/enum"),
        ({"anyOf": []}, "/anyOf"),
        ({"properties": []}, "/properties"),
        ({"required": "x"}, "/required"),
        ({"minLength": "3"}, "/minLength"),
        ({"minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"minProperties": 2}, "/minProperties"),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "/patternProperties"),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "/oneOf"),
        ({"items": "string"}, "/items"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ],
)
def test_what_cannot_be_said_is_left_out_and_named(schema: Any, named: str) -> None:
    made = rewritten(schema)
    assert made.not_enforced == [named]
    assert not matcher(made.schema).is_error()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-z]+$", "format": "date"},
        {"type": "string", "pattern": r"^[^$\]]\$\^+$"},
        {"type": "string", "pattern": r"C:\\[a-z]+"},
        {"type": ["string", "null"]},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "multipleOf": 2},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"enum": ["a", 1, None]},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "properties": {"x": True}, "required": ["x"], "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x": {"type": "string"}, "^y": {"type": "null"}}},
        {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
    ],
)
def test_what_a_grammar_can_enforce_is_unchanged(schema: dict[str, Any]) -> None:
    made = rewritten(schema)
    assert (made.schema, made.not_enforced, made.loop) == (schema, [], None)


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"title": "A", "default": 1, "examples": [1], "x-own": 1, "type": "string"}, {"type": "string"}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"maxItems": 2.0}, {"maxItems": 2}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"items": [{"type": "null"}], "additionalItems": False}, {"prefixItems": [{"type": "null"}], "items": False}),
    ],
)
def test_annotations_and_older_words_are_not_warned_about(schema: dict[str, Any], kept: Any) -> None:
    assert (rewritten(schema).schema, rewritten(schema).not_enforced) == (kept, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#me"}}, "$defs": {"m": {"$anchor": "me", "$ref": "#me"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_reference_that_leads_back_to_itself_is_refused_in_one_sentence(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^the schema describes no value: \$ref .* leads back to itself$"):
        enforceable_format(Constraint("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "integer", "minimum": 3, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"enum": [1, 2], "not": {"type": "number"}},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3},
        {"type": "object", "required": ["a"], "propertyNames": {"pattern": "^b"}},
        {"type": "array", "contains": {"type": "null"}, "items": {"type": "string"}},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"const": 1, "if": {"const": 1}, "then": {"const": 2}},
    ],
)
def test_a_schema_that_nothing_satisfies_does_not_compile(schema: dict[str, Any]) -> None:
    made = rewritten(schema)
    assert made.not_enforced == []
    assert "nsatisfiable" in matcher(made.schema).get_error()


@pytest.mark.parametrize(
    "pattern",
    ["[" * 30_000, "[" * 2000, "(?:" * 600 + "a" + ")" * 600, "[\u0001-\uffff]" * 400, "\\" * 2001, "a" * 3000],
)
def test_no_pattern_of_a_client_takes_long(pattern: str) -> None:
    """Each took seconds: a quadratic search, or the tables that `re.compile` makes."""
    began = time.process_time()
    rewritten({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert time.process_time() - began < 0.2


def _nested(word: str, count: int) -> Any:
    schema: Any = {"const": 1}
    for n in range(count):
        schema = {"oneOf": [schema, {"minimum": n}, {"maximum": -n}]} if word == "oneOf" else {word: schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        _nested("items", 500),
        _nested("not", 300),
        _nested("oneOf", 12),
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"not": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(400)}},
        {"not": {"not": {"$ref": "#"}}},
        {"items": {"enum": list(range(500))}, "uniqueItems": True},
        {"allOf": [{"contains": {"const": n}, "minContains": 3, "maxContains": 4} for n in range(100)]},
        {"dependentRequired": {f"p{n}": [f"q{n}"] for n in range(2000)}},
    ],
)
def test_no_schema_of_a_client_takes_long(schema: Any) -> None:
    began = time.process_time()
    rewritten(schema)
    assert time.process_time() - began < 0.5


_words = st.sampled_from(
    [
        *("type", "enum", "const", "required", "pattern", "format", "multipleOf", "minimum", "maximum", "minLength"),
        *("maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "exclusiveMinimum", "nullable"),
        *("items", "prefixItems", "additionalProperties", "properties", "patternProperties", "$defs", "contains"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "uniqueItems", "propertyNames", "$ref", "title"),
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "minContains", "$id"),
    ]
)
_values = st.sampled_from(
    ["string", "object", "array", "^a+$", "a$b", "#/$defs/x", "#", "date", 0, 1, 2.5, -1, True, False, None, [], {}]
)
_any_value = st.recursive(
    _values, lambda inner: st.dictionaries(_words, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=12
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_words, _any_value, max_size=5))
def test_no_schema_raises_an_error(schema: dict[str, Any]) -> None:
    made = rewritten(schema)
    json.dumps(made.schema)
    assert all(path.startswith("/") or path == "" for path in made.not_enforced)


_leaf = st.sampled_from(
    [
        True,
        {"type": "string"},
        {"type": "integer", "minimum": 0, "maximum": 3},
        {"enum": ["a", "b", 1, None]},
        {"const": 1},
        {"const": "a"},
        {"type": "boolean"},
        {"type": "null"},
        {"maxLength": 2},
        {"minimum": 2},
        {"required": ["a"]},
        {"type": "array", "maxItems": 2},
    ]
)
_valid = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner, "else": inner}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries(
            {"anyOf": st.lists(inner, min_size=1, max_size=2), "properties": st.fixed_dictionaries({"a": inner})}
        ),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "contains": inner, "maxItems": st.just(3)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "uniqueItems": st.just(True)}),
        st.fixed_dictionaries(
            {"properties": st.fixed_dictionaries({"a": inner, "b": inner}), "minProperties": st.just(1)}
        ),
        st.fixed_dictionaries({"type": st.just("object"), "dependentSchemas": st.fixed_dictionaries({"a": inner})}),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(_valid, st.integers(0, 1000))
def test_what_is_allowed_matches_the_original(schema: Any, seed: int) -> None:
    original = schema if isinstance(schema, dict) else {}
    made = rewritten(original)
    if made.not_enforced:
        return
    start, check, chance = matcher(made.schema), Draft202012Validator(original), random.Random(seed)
    if start.is_error():
        assert "nsatisfiable" in start.get_error(), (made.schema, start.get_error())
        return
    found = [value for _ in range(5) for value in sample(start, chance)]
    assert [value for value in found if not check.is_valid(value)] == []
