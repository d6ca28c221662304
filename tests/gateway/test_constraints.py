"""Which constraint a request gets, and when."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint, Request, Tool, ToolChoice
from modelyard.gateway.constraints import constrain, enforceable, enforceable_format
from modelyard.scanner.formats import load
from tests.gateway.harness import CALLER, GatewayHarness, make_request, model, with_settings
from tests.scanner.patches import APPLY_PATCH
from tests.strategies import requests

LOOK = Tool("look_at", "Looks.", {"type": "object", "properties": {"at": {"type": "string", "not": {}}}})
NOW = Tool("now")
MUST = ToolChoice("required")
TAIL = "<|im_start|>assistant\n"


def constraint_for(
    prompt: str = TAIL, format: str = "hermes", calls: bool = False, **request: Any
) -> Constraint | None:
    parts = msgspec.structs.replace(model().pipeline, format=load(format))
    changed = with_settings(msgspec.structs.replace(model(), text=parts), constrain_calls=calls)
    return constrain(make_request(**{"tools": (LOOK, NOW)} | request), changed, prompt)[0]


def test_a_required_call_is_a_grammar_from_the_first_token() -> None:
    found = constraint_for(tool_choice=MUST)
    assert found
    assert (found.kind, found.trigger, found.tools) == ("lark", None, ("look_at", "now"))
    assert f"<[{model().pipeline.tokenizer.specials['<tool_call>']}]>" in found.text


def test_a_named_tool_is_the_only_one_in_the_constraint() -> None:
    found = constraint_for(tool_choice=ToolChoice("named", "now"))
    assert found
    assert found.tools == ("now",)


def test_an_optional_call_is_unconstrained() -> None:
    assert constraint_for() is None


@pytest.mark.parametrize(
    "fields", [{"calls": True}, {"tools": (LOOK, Tool("now", strict=True))}, {"tools": (LOOK, APPLY_PATCH)}]
)
def test_an_optional_call_is_constrained_if_a_setting_or_tool_demands_it(fields: dict[str, Any]) -> None:
    found = constraint_for(**fields)
    assert found
    assert found.trigger == "<tool_call>"


def test_an_unsupported_grammar_of_a_custom_tool_is_a_warning() -> None:
    endless = Tool("brackets", kind="custom", grammar={"syntax": "lark", "definition": 'start: "(" start? ")"'})
    found, warnings = constrain(make_request(tools=(LOOK, endless)), model(), TAIL)
    assert (found, warnings) == (None, ["grammar_not_enforced: brackets: the rule 'start' refers to itself"])
    found, warnings = constrain(make_request(tools=(endless,), tool_choice=MUST), model(), TAIL)
    assert found
    assert warnings == ["grammar_not_enforced: brackets: the rule 'start' refers to itself"]


def test_the_constraint_of_the_client_wins() -> None:
    own = Constraint("regex", "a+")
    assert constraint_for(tool_choice=MUST, constraint=own) is own


def test_unsupported_keywords_of_a_response_schema_are_dropped_with_a_warning() -> None:
    own = Constraint("json_schema", '{"type": "array", "uniqueItems": true}', name="pets")
    found, warnings = constrain(make_request(constraint=own), model(), TAIL)
    assert found == Constraint("json_schema", '{"type": "array"}', name="pets")
    assert warnings == ["schema keyword not enforced: pets/uniqueItems"]


def test_an_invalid_schema_is_left_for_the_engine_to_refuse() -> None:
    for text in ("{", "[1]", "true"):
        own = Constraint("json_schema", text)
        assert constrain(make_request(constraint=own), model(), TAIL) == (own, [])


def test_without_tools_there_is_no_constraint() -> None:
    assert constraint_for(tools=(), calls=True) is None


def test_a_format_without_a_grammar_names_the_required_tools() -> None:
    found = constraint_for(format="think", tool_choice=MUST)
    assert found == Constraint("tools", tools=("look_at", "now"))
    assert constraint_for(format="think", calls=True) is None


def test_open_reasoning_in_the_prompt_can_be_finished() -> None:
    opened, closed = (
        constraint_for(TAIL + "<think>\n", tool_choice=MUST),
        constraint_for(TAIL + "<think>\n</think>", tool_choice=MUST),
    )
    assert opened
    assert closed
    assert opened.text.startswith("start: ANY")
    assert not closed.text.startswith("start: ANY")


@pytest.mark.parametrize("own", [Constraint("json_object"), Constraint("json_schema", '{"type": "object"}', name="x")])
def test_a_response_schema_applies_after_open_reasoning(own: Constraint) -> None:
    opened, closed = (
        constraint_for(TAIL + "<think>\n", constraint=own, tools=()),
        constraint_for(TAIL + "<think>\n</think>", constraint=own, tools=()),
    )
    assert opened
    assert (opened.kind, opened.name, opened.trigger) == ("lark", own.name, None)
    assert '%json {"type": "object"' in opened.text
    assert "</think>" in opened.text or f"<[{model().pipeline.tokenizer.specials['</think>']}]>" in opened.text
    assert closed == own


def test_a_response_schema_leaves_room_for_calls() -> None:
    """An agent with tools and a typed answer: it calls its tools first."""
    own = Constraint("json_schema", '{"type": "object"}', name="x")
    found = constraint_for(constraint=own)
    assert found
    assert (found.kind, found.trigger, found.tools, found.schema) == ("lark", None, ("look_at", "now"), own.text)
    opened = constraint_for(TAIL + "<think>\n", constraint=own)
    assert opened
    assert opened.text.startswith("start: ANY")
    assert opened.tools


def test_a_required_call_wins_over_a_response_schema() -> None:
    own = Constraint("json_schema", '{"type": "object"}')
    assert constraint_for(constraint=own, tool_choice=MUST) == constraint_for(tool_choice=MUST)
    assert constraint_for(constraint=own, tool_choice=MUST, tools=()) == own


def test_a_format_without_a_grammar_keeps_the_schema_and_warns() -> None:
    own = Constraint("json_schema", '{"type": "object"}')
    parts = msgspec.structs.replace(model().pipeline, format=load("think"))
    found, warnings = constrain(
        make_request(tools=(NOW,), constraint=own), msgspec.structs.replace(model(), text=parts), TAIL
    )
    assert found == own
    assert warnings == ["calls_excluded: the format has no grammar for calls beside a response schema"]


def test_parallel_tool_calls_false_allows_one_call() -> None:
    one, many = constraint_for(tool_choice=MUST, parallel_tool_calls=False), constraint_for(tool_choice=MUST)
    assert one
    assert many
    assert ")*" in many.text
    assert ")*" not in one.text


async def test_an_unsupported_schema_keyword_is_logged_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    harness = GatewayHarness()
    caplog.set_level("INFO", "modelyard.gateway")
    prepared = await harness.gateway.prepare(make_request(tools=(LOOK,), tool_choice=MUST), CALLER)
    assert prepared.constraint
    assert '"not"' not in prepared.constraint.text
    assert "schema keyword not enforced: look_at/properties/at/not" in caplog.text
    assert prepared.request.tools == (LOOK,)


@settings(max_examples=50, deadline=None)
@given(requests(tools=False, constrained=False), st.sampled_from(["text", "chat"]), st.booleans())
def test_requests_without_constraint_and_tools_are_unconstrained(request: Request, kind: Any, structured: bool) -> None:
    changed = with_settings(msgspec.structs.replace(model(), kind=kind), constrain_calls=True)
    assert (request.constraint, request.tools) == (None, ())
    assert constrain(request, changed, TAIL, structured=structured) == (None, ())


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
