"""Which parts of a tool's schema a grammar can enforce, and the warnings about the rest."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint, Tool
from modelyard.gateway.constraints import enforceable, enforceable_format


def reduced(schema: Any) -> tuple[Any, list[str]]:
    (tool,), warnings = enforceable([Tool("t", parameters={"properties": {"a": schema}})])
    return tool.parameters["properties"]["a"], warnings


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-z]+$", "format": "date"},
        {"type": "string", "pattern": r"^[^$\]]\$\^+$"},
        {"type": ["string", "null"]},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "multipleOf": 2},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"enum": ["a", 1, None]},
        {"const": None},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "properties": {"x": True}, "required": ["x"], "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1},
        {"$ref": "#/properties/a/$defs/x", "$defs": {"x": {"type": "string"}}},
    ],
)
def test_supported_keywords_are_unchanged(schema: dict[str, Any]) -> None:
    assert reduced(schema) == (schema, [])


@pytest.mark.parametrize(
    ("schema", "kept", "dropped"),
    [
        ({"type": "string", "not": {"const": "x"}}, {"type": "string"}, ["not"]),
        ({"if": {}, "then": {}, "else": {}}, {}, ["if", "then", "else"]),
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, ["uniqueItems"]),
        ({"type": "string", "format": "phone"}, {"type": "string"}, ["format"]),
        ({"type": "string", "pattern": "(?=a)b"}, {"type": "string"}, ["pattern"]),
        ({"type": "string", "pattern": "["}, {"type": "string"}, ["pattern"]),
        ({"type": "string", "pattern": "^a$|^b$"}, {"type": "string"}, ["pattern"]),
        ({"type": "any"}, {}, ["type"]),
        ({"$ref": "https://example.com/schema"}, {}, ["$ref"]),
        ({"$ref": "#/$defs/missing"}, {}, ["$ref"]),
        ({"enum": []}, {}, ["enum"]),
        ({"anyOf": []}, {}, ["anyOf"]),
        ({"properties": []}, {}, ["properties"]),
        ({"required": "x"}, {}, ["required"]),
        ({"minLength": "3"}, {}, ["minLength"]),
        ({"minimum": 1, "exclusiveMinimum": True}, {"minimum": 1}, ["exclusiveMinimum"]),
        ({"multipleOf": 0}, {}, ["multipleOf"]),
        ({"minLength": 5, "maxLength": 2}, {"minLength": 5}, ["maxLength"]),
        ({"properties": {"x": True}, "minProperties": 1}, {"properties": {"x": True}}, ["minProperties"]),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, {}, ["patternProperties"]),
        ({"oneOf": [True], "anyOf": [True]}, {"anyOf": [True]}, ["oneOf"]),
        ({"properties": {"x": {"not": {}}}}, {"properties": {"x": {}}}, ["properties/x/not"]),
        ({"items": {"anyOf": [{"not": {}}]}}, {"items": {"anyOf": [{}]}}, ["items/anyOf/0/not"]),
        ({"items": "string"}, {"items": {}}, ["items"]),
    ],
)
def test_unsupported_keywords_are_dropped_and_named(schema: Any, kept: Any, dropped: list[str]) -> None:
    assert reduced(schema) == (kept, [f"schema keyword not enforced: t/properties/a/{word}" for word in dropped])


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"title": "A", "description": "d", "default": 1, "examples": [1], "x-own": 1, "type": "string"}, "string"),
        ({"type": "string", "nullable": True}, ["string", "null"]),
        ({"type": "array", "uniqueItems": False}, "array"),
        ({"type": "integer", "format": "int32"}, "integer"),
    ],
)
def test_annotations_are_dropped_silently(schema: dict[str, Any], kept: Any) -> None:
    assert reduced(schema) == ({"type": kept}, [])


def test_one_of_becomes_any_of() -> None:
    assert reduced({"oneOf": [{"type": "string"}, {"type": "null"}]}) == (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        [],
    )


def test_item_lists_of_older_drafts_are_supported() -> None:
    schema = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}
    assert reduced(schema) == (schema, [])


def test_a_recursive_schema_is_cut_off() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    _, warnings = reduced(deep)
    assert len(warnings) == 1


def test_other_fields_of_tools_are_unchanged() -> None:
    tool = Tool("t", "does", {"type": "object"}, strict=True, namespace="n")
    assert enforceable([tool, Tool("u")])[0] == (tool, Tool("u"))


@pytest.mark.parametrize(
    "pattern",
    ["[" * 30_000, "[" * 2000, "(?:" * 600 + "a" + ")" * 600, "[\u0001-\uffff]" * 400, "\\" * 2001, "a" * 3000],
)
def test_no_pattern_of_a_client_takes_long(pattern: str) -> None:
    """Each took seconds: a quadratic search, or the tables that `re.compile` makes."""
    began = time.process_time()
    enforceable([Tool("t", parameters={"properties": {"a": {"type": "string", "pattern": pattern}}})])
    assert time.process_time() - began < 0.2


def test_a_pattern_over_the_limit_is_not_enforced() -> None:
    (tool,), warnings = enforceable([Tool("t", parameters={"pattern": "a" * 2049})])
    assert (tool.parameters, warnings) == ({}, ["schema keyword not enforced: t/pattern"])
    assert enforceable([Tool("t", parameters={"pattern": "a" * 2048})])[1] == []


_words = st.sampled_from(
    [
        *("type", "enum", "const", "required", "pattern", "format", "multipleOf", "minimum", "maximum", "minLength"),
        *("maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "exclusiveMinimum", "nullable"),
        *("items", "prefixItems", "additionalProperties", "properties", "patternProperties", "$defs"),
        *("anyOf", "oneOf", "not", "if", "uniqueItems", "$ref", "title"),
    ]
)
_values = st.sampled_from(
    ["string", "object", "array", "^a+$", "a$b", "#/$defs/x", "date", 0, 1, 2.5, -1, True, None, [], {}]
)
_schemas = st.recursive(
    _values, lambda inner: st.dictionaries(_words, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=12
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_words, _schemas, max_size=5))
def test_no_schema_raises_an_error(schema: dict[str, Any]) -> None:
    (tool,), warnings = enforceable([Tool("t", parameters=schema)])
    assert isinstance(tool.parameters, dict)
    assert all(warning.startswith("schema keyword not enforced: t/") for warning in warnings)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_words, _schemas, max_size=5))
def test_every_reduced_schema_compiles_to_a_grammar(schema: dict[str, Any]) -> None:
    """Unless it allows no value at all, which is its author's own mistake."""
    llguidance = pytest.importorskip("llguidance")
    (tool,), _ = enforceable([Tool("t", parameters=schema)])
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: %json {json.dumps(tool.parameters)}")
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None)
    assert not is_error or "nsatisfiable" in messages[0], (tool.parameters, messages)


@pytest.mark.parametrize("pattern", [r"^\\d$", r"^a\\b$", r"C:\\[a-z]+", r"\\1"])
def test_a_letter_behind_an_escaped_backslash_is_a_letter(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    constraint, warnings = enforceable_format(Constraint("json_schema", json.dumps(schema)))
    assert (json.loads(constraint.text), warnings) == (schema, [])


@pytest.mark.parametrize(
    ("ref", "pointer"), [("#node", "#/$defs/n"), ("#/$defs/n", "#/$defs/n"), ("#/$defs/a%20b", "#/$defs/a b")]
)
def test_anchors_and_escapes_of_references_become_paths(ref: str, pointer: str) -> None:
    definitions = {"n": {"$anchor": "node", "type": "string"}, "a b": {"type": "integer"}}
    schema = {"type": "object", "properties": {"x": {"$ref": ref}}, "$defs": definitions}
    constraint, warnings = enforceable_format(Constraint("json_schema", json.dumps(schema)))
    assert (json.loads(constraint.text)["properties"], warnings) == ({"x": {"$ref": pointer}}, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#me"}}, "$defs": {"m": {"$anchor": "me", "$ref": "#me"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"oneOf": [{"$ref": "#/$defs/a"}]}},
        },
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "anyOf": [{"$ref": "#a"}, {"$ref": "#/$defs/x"}]}}},
        {"anyOf": [{"allOf": [{"$ref": "#/anyOf/0"}]}]},
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
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"],
        },
    ],
)
def test_a_tree_may_refer_to_itself(schema: dict[str, Any]) -> None:
    constraint, warnings = enforceable_format(Constraint("json_schema", json.dumps(schema)))
    assert (json.loads(constraint.text), warnings) == (schema, [])
