"""Which constraint a request gets, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint, Request, Tool, ToolChoice
from modelyard.gateway.constraints import Constrained, constrain, enforceable
from modelyard.scanner.formats import load
from tests.gateway.harness import CALLER, GatewayHarness, make_request, model, with_settings
from tests.scanner.patches import APPLY_PATCH
from tests.strategies import requests

LOOK = Tool(
    "look_at", "Looks.", {"type": "object", "properties": {"at": {"type": "string", "not": {"format": "date"}}}}
)
NOW = Tool("now")
MUST = ToolChoice("required")
TAIL = "<|im_start|>assistant\n"


def constraint_for(
    prompt: str = TAIL, format: str = "hermes", calls: bool = False, **request: Any
) -> Constraint | None:
    parts = msgspec.structs.replace(model().pipeline, format=load(format))
    changed = with_settings(msgspec.structs.replace(model(), text=parts), constrain_calls=calls)
    return constrain(make_request(**{"tools": (LOOK, NOW)} | request), changed, prompt).constraint


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
    expected = (["brackets/grammar"], ["grammar_not_enforced: brackets: the rule 'start' refers to itself"])
    found = constrain(make_request(tools=(LOOK, endless)), model(), TAIL)
    assert (found.constraint, found.not_enforced, found.warnings) == (None, *expected)
    found = constrain(make_request(tools=(endless,), tool_choice=MUST), model(), TAIL)
    assert found.constraint
    assert (found.not_enforced, found.warnings) == expected


def test_the_constraint_of_the_client_wins() -> None:
    own = Constraint("regex", "a+")
    assert constraint_for(tool_choice=MUST, constraint=own) is own


def test_unsupported_keywords_of_a_response_schema_are_dropped_and_named() -> None:
    own = Constraint("json_schema", '{"type": "array", "uniqueItems": true}', name="pets")
    found = constrain(make_request(constraint=own), model(), TAIL)
    assert found == Constrained(Constraint("json_schema", '{"type": "array"}', name="pets"), ["pets/uniqueItems"], [])


def test_strict_refuses_a_keyword_that_cannot_be_enforced() -> None:
    own = Constraint("json_schema", '{"items": {"type": "array", "uniqueItems": true}}', name="pets", strict=True)
    with pytest.raises(InvalidRequest, match=r"^strict: uniqueItems cannot .*pets/items/uniqueItems") as refused:
        constrain(make_request(constraint=own), model(), TAIL)
    assert (refused.value.code, refused.value.param) == ("unsupported_schema", "response_format")
    tool = Tool("look", parameters={"properties": {"at": {"type": "array", "uniqueItems": True}}}, strict=True)
    with pytest.raises(InvalidRequest, match="look/properties/at/uniqueItems"):
        constrain(make_request(tools=(tool,)), model(), TAIL)
    offered = make_request(tools=(tool,), constraint=Constraint("json_schema", "{}"))
    with pytest.raises(InvalidRequest, match="look/properties/at/uniqueItems"):
        constrain(offered, model(), TAIL)


def test_a_format_that_writes_texts_without_quotes_names_what_it_cannot_enforce() -> None:
    parts = msgspec.structs.replace(model().pipeline, format=load("qwen3_coder"))
    coder = msgspec.structs.replace(model(), text=parts)
    day = {"type": "string", "format": "date"}
    words = {"day": day, "name": {"type": "string", "pattern": "^[a-z]+$"}, "n": {"type": "integer", "minimum": 1}}
    tool = Tool("plan", parameters={"type": "object", "properties": words, "required": ["day", "name", "n"]})
    found = constrain(make_request(tools=(tool,), tool_choice=MUST), coder, TAIL)
    assert found.constraint
    assert "[a-z]+" in found.constraint.text
    assert found.not_enforced == ["plan/properties/day/format"]
    strict = msgspec.structs.replace(tool, strict=True)
    with pytest.raises(InvalidRequest, match="plan/properties/day/format"):
        constrain(make_request(tools=(strict,)), coder, TAIL)


def test_a_strict_tool_is_named_if_its_calls_cannot_be_constrained() -> None:
    """Agents mark all of their tools as strict: they would not work with these models at all."""
    request = make_request(tools=(Tool("now", strict=True),))
    found = constrain(request, model(), TAIL, structured=False)
    assert (found.constraint, found.not_enforced) == (None, ["now/strict"])
    parts = msgspec.structs.replace(model().pipeline, format=load("think"))
    assert constrain(request, msgspec.structs.replace(model(), text=parts), TAIL).not_enforced == ["now/strict"]


def test_an_invalid_schema_is_left_for_the_engine_to_refuse() -> None:
    for text in ("{", "[1]", "true"):
        own = Constraint("json_schema", text)
        assert constrain(make_request(constraint=own), model(), TAIL) == Constrained(own, [])


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
    found = constrain(make_request(tools=(NOW,), constraint=own), msgspec.structs.replace(model(), text=parts), TAIL)
    assert found.constraint == own
    assert found.warnings == ["calls_excluded: the format has no grammar for calls beside a response schema"]


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
    assert "not_enforced: look_at/properties/at/not" in caplog.text
    assert prepared.not_enforced == ("look_at/properties/at/not",)
    assert prepared.request.tools == (LOOK,)


@settings(max_examples=50, deadline=None)
@given(requests(tools=False, constrained=False), st.sampled_from(["text", "chat"]), st.booleans())
def test_requests_without_constraint_and_tools_are_unconstrained(request: Request, kind: Any, structured: bool) -> None:
    changed = with_settings(msgspec.structs.replace(model(), kind=kind), constrain_calls=True)
    assert (request.constraint, request.tools) == (None, ())
    assert constrain(request, changed, TAIL, structured=structured) == Constrained()


def test_other_fields_of_tools_are_unchanged() -> None:
    tool = Tool("t", "does", {"type": "object"}, strict=True, namespace="n")
    assert enforceable([tool, Tool("u")])[0] == (tool, Tool("u"))
