"""Minimal values of JSON schemas."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.engines.fake.instance import instance

NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"const": 3},
    {"enum": ["b", "a"]},
    {"type": ["string", "null"]},
    {"type": "string", "minLength": 9},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    {"type": "string", "format": "date-time"},
    {"type": "integer", "exclusiveMinimum": 4.5},
    {"type": "integer", "maximum": -3},
    {"type": "integer", "minimum": 5, "multipleOf": 4},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "items": {"type": "string"}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "minItems": 2},
    {"type": "object", "minProperties": 2, "properties": {"a": {"type": "null"}}},
    {"properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}], "type": "object"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"},
    {"$defs": {"a/b": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}, "required": ["x"]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_instance_is_valid(schema: dict[str, Any]) -> None:
    jsonschema.validate(instance(schema), schema)


def test_true_allows_anything() -> None:
    assert instance(True) == "text"


def test_endless_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="never ends"):
        instance({"type": "object", "properties": {"me": {"$ref": "#"}}, "required": ["me"]})


def test_huge_schema_is_refused_quickly() -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        instance({"type": "array", "items": {"type": "null"}, "minItems": 20_000})


def test_huge_counts_do_not_eat_the_memory() -> None:
    for schema in ({"type": "string", "minLength": 10**12}, {"type": "array", "minItems": 10**12}):
        with pytest.raises(InvalidRequest, match="too large"):
            instance(schema)


leaves = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": st.integers(0, 9)}),
    st.fixed_dictionaries({"type": st.just("integer")}, optional={"minimum": st.integers(-9, 9)}),
    st.fixed_dictionaries({"enum": st.lists(st.integers(), min_size=1, max_size=3)}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}]),
)


def objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.text(max_size=3), children, max_size=3)
    return properties.map(lambda p: {"type": "object", "properties": p, "required": list(p)})


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda s, n: {"type": "array", "items": s, "minItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(schemas)
def test_every_schema_gets_a_valid_instance(schema: dict[str, Any]) -> None:
    jsonschema.validate(instance(schema), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": None},
        {"type": "object", "required": [None]},
        {"enum": []},
        {"$ref": 5},
        {"type": "array", "minItems": "x"},
    ],
)
def test_a_schema_that_is_none_is_the_clients_fault(schema: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        instance(schema)
    assert caught.value.code == "invalid_json_schema"
