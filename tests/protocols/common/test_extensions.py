"""The extension fields: the same names and checks in every protocol."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import fields

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint, Priority, Request, Sampling
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    check_positive,
    read_constraint,
    read_priority,
    read_sampling,
    write_extensions,
)
from tests import strategies


@settings(deadline=None, max_examples=100)
@given(strategies.samplings())
def test_every_sampling_field_reads_back_equal(sampling: Sampling) -> None:
    body = msgspec.json.encode(write_extensions(Request(model="m", sampling=sampling)))
    assert read_sampling(msgspec.json.decode(body, type=ExtensionFields)) == sampling


def test_every_sampling_field_is_an_extension_field() -> None:
    assert set(Sampling.__struct_fields__) <= set(ExtensionFields.__struct_fields__)


def test_null_means_not_set() -> None:
    body = msgspec.json.decode(
        b'{"temperature":null,"seed":null,"logit_bias":null,"priority":null}', type=ExtensionFields
    )
    assert (read_sampling(body), read_constraint(body), read_priority(body)) == (Sampling(), None, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101.0}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"mirostat": 3}, "mirostat"),
        ({"beam_size": 0}, "beam_size"),
        ({"logit_bias": {"word": 1.0}}, "logit_bias"),
    ],
)
def test_values_outside_their_range_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_sampling(ExtensionFields(**fields))
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("value", [10**40, -(10**40), 2**64, -(2**63) - 1])
@pytest.mark.parametrize("name", [field.name for field in fields(Sampling) if field.type == int | None])
def test_whole_numbers_fit_into_a_message_to_another_process(name: str, value: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be between"):
        read_sampling(ExtensionFields(**{name: value}))


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"json_schema": {"type": "object"}}, Constraint("json_schema", '{"type":"object"}')),
        ({"grammar": "root ::= x"}, Constraint("gbnf", "root ::= x")),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"lark": 'start: "a"'}, Constraint("lark", 'start: "a"')),
    ],
)
def test_each_constraint_field_has_its_kind(fields: dict[str, Any], constraint: Constraint) -> None:
    assert read_constraint(ExtensionFields(**fields)) == constraint


@pytest.mark.parametrize(
    ("value", "priority"),
    [("background", "background"), ("low", "background"), ("batch", "background"), ("main", "main"), ("flex", "main")],
)
def test_priorities_map_to_main_or_background(value: str, priority: Priority) -> None:
    assert read_priority(ExtensionFields(priority=value)) == priority


def test_counts_must_be_positive() -> None:
    check_positive("n", None)
    check_positive("n", 1)
    with pytest.raises(InvalidRequest, match="n must be at least 1, got 0"):
        check_positive("n", 0)


def test_fields_that_are_not_set_are_not_written() -> None:
    assert write_extensions(Request(model="m")) == {}


def test_the_other_fields_are_written_under_their_names() -> None:
    request = Request(
        model="m",
        lora_adapter="a",
        chat_template_kwargs={"x": 1},
        documents=({"text": "d"},),
        priority="background",
    )
    assert write_extensions(request) == {
        "lora_adapter": "a",
        "chat_template_kwargs": {"x": 1},
        "documents": ({"text": "d"},),
        "priority": "background",
    }


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"ebnf": 'root ::= "a"'}, Constraint("gbnf", 'root ::= "a"')),
        ({"guided_json": {"type": "object"}}, Constraint("json_schema", '{"type":"object"}')),
        ({"guided_json": '{"type": "object"}'}, Constraint("json_schema", '{"type": "object"}')),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_choice": ["yes", "n.o"]}, Constraint("regex", "(yes|n\\.o)")),
        ({"guided_grammar": 'root ::= "a"'}, Constraint("gbnf", 'root ::= "a"')),
        ({"guided_grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
        ({"structured_outputs": {"json": {"type": "object"}}}, Constraint("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object")),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint("regex", "(a|b)")),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint("gbnf", 'root ::= "a"')),
        ({"structured_outputs": {}}, None),
    ],
)
def test_constraints_are_read_under_the_names_of_other_servers(fields: Any, constraint: Constraint | None) -> None:
    body = msgspec.json.decode(msgspec.json.encode(fields), type=ExtensionFields)
    assert read_constraint(body) == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"grammar": "a", "json_schema": {}}, "grammar"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused_by_its_name(fields: Any, param: str) -> None:
    body = msgspec.json.decode(msgspec.json.encode(fields), type=ExtensionFields)
    with pytest.raises(InvalidRequest) as caught:
        read_constraint(body)
    assert caught.value.param == param
