"""Answers without a matching rule: the demo, and values that satisfy a constraint."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import End
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard_fake.answers import OutputEncoder, regex_sample, schema_instance
from modelyard_fake.script import ScriptStep
from tests.engines.fake.helpers import WEATHER, answer, chatml, prompt, text_engine, tokenizer
from tests.engines.reading import ids, read

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 18}},
    "required": ["name", "age"],
}
TOOLS = ("system", f"<tools>\n{WEATHER}\n</tools>")


def called(text: str) -> dict[str, object]:
    found = re.search(r"<tool_call>\n(.*)\n</tool_call>", text)
    assert found
    return dict(json.loads(found[1]))


async def test_demo_introduces_itself_and_quotes_the_user() -> None:
    text = await answer("What is “up”? 你好 🎉")
    assert "built-in fake engine" in text
    assert "What is “up”? 你好 🎉" in text


async def test_demo_quotes_only_the_beginning_of_a_long_text() -> None:
    assert len(await answer("word " * 1000)) < 1000


async def test_demo_thinks_on_request() -> None:
    assert (await answer("think about it")).startswith("<think>")


async def test_demo_calls_the_tool_that_the_user_names() -> None:
    text = await answer(chatml(TOOLS, ("user", "please call get_weather.")))
    assert called(text) == {"name": "get_weather", "arguments": {"city": "text"}}


async def test_demo_takes_arguments_from_the_user() -> None:
    text = await answer(chatml(TOOLS, ("user", 'call get_weather {"city": "Rome"}')))
    assert called(text)["arguments"] == {"city": "Rome"}


async def test_demo_calls_no_tool_that_is_not_offered() -> None:
    assert "<tool_call>" not in await answer(chatml(TOOLS, ("user", "call format_disk")))
    assert "<tool_call>" not in await answer("call get_weather")


async def test_demo_answers_a_tools_result_instead_of_calling_again() -> None:
    text = await answer(chatml(TOOLS, ("user", "call get_weather"), ("tool", "18 degrees")))
    assert text == "The tool answered: 18 degrees"


async def test_demo_names_a_tool_that_it_can_call() -> None:
    assert "call get_weather" in await answer(chatml(TOOLS, ("user", "which tools do you know?")))


async def test_echo_repeats_the_user_message() -> None:
    assert await answer("repeat after me", echo=True) == "repeat after me"


async def test_json_constraints_are_obeyed() -> None:
    assert json.loads(await answer(fields={"constraint": Constraint("json_object")})) == {}
    made = json.loads(await answer(fields={"constraint": Constraint("json_schema", json.dumps(SCHEMA))}))
    jsonschema.validate(made, SCHEMA)


async def test_a_schema_beside_calls_is_obeyed_unless_the_user_asks_for_a_call() -> None:
    either = {"constraint": Constraint("lark", "start: …", tools=("get_weather",), schema=json.dumps(SCHEMA))}
    jsonschema.validate(json.loads(await answer(fields=either)), SCHEMA)
    assert called(await answer("call get_weather", fields=either))["name"] == "get_weather"


async def test_regex_constraint_is_obeyed() -> None:
    pattern = r"(yes|no)-\d{3}[^a-y]"
    assert re.fullmatch(pattern, await answer(fields={"constraint": Constraint("regex", pattern)}))


async def test_forced_tool_is_called_with_valid_arguments() -> None:
    conversation = chatml(TOOLS, ("user", "hello"))
    for constraint in (Constraint("tools"), Constraint("tools", tools=("get_weather",))):
        text = await answer(conversation, fields={"constraint": constraint})
        assert called(text) == {"name": "get_weather", "arguments": {"city": "text"}}


async def test_constraint_with_a_trigger_forces_nothing() -> None:
    waiting = Constraint("tools", trigger="<tool_call>", tools=("get_weather",))
    assert "fake engine" in await answer(fields={"constraint": waiting})


async def test_unsupported_grammar_leaves_the_answer_free() -> None:
    assert "fake engine" in await answer(fields={"constraint": Constraint("lark", "start: X")})


async def test_constraint_wins_over_an_unconditional_rule_only() -> None:
    fields = {"constraint": Constraint("json_object")}
    assert await answer(fields=fields, script=[{"steps": [{"text": "words"}]}]) == "{}"
    assert await answer(fields=fields, script=[{"when": "hello", "steps": [{"text": "words"}]}]) == "words"


async def test_invalid_schema_fails_the_job_with_a_reason() -> None:
    engine = await text_engine()
    for text, message in (("{", "not JSON"), ('{"$ref": "#/$defs/x"}', "no definition")):
        (last,) = await read(engine.generate(prompt(constraint=Constraint("json_schema", text))))
        assert isinstance(last, End)
        assert last.error is not None
        assert message in last.error.message


# --- JSON schema ------------------------------------------------------------------------------------------------------

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
    {"allOf": [{"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"required": ["c"]}]},
    {"$defs": {"x": {"required": ["b"]}}, "allOf": [{"$ref": "#/$defs/x"}, {"required": ["c"]}]},
    {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"},
    {"$defs": {"a/b": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}, "required": ["x"]},
]


def test_schema_instance_is_valid() -> None:
    for schema in SCHEMAS:
        jsonschema.validate(schema_instance(schema), schema)


def test_schema_true_gets_a_value() -> None:
    assert schema_instance(True) == "text"


def test_infinite_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="never ends"):
        schema_instance({"type": "object", "properties": {"me": {"$ref": "#"}}, "required": ["me"]})


def test_huge_schema_is_refused_quickly() -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        schema_instance({"type": "array", "items": {"type": "null"}, "minItems": 20_000})


def test_huge_counts_are_refused_before_allocation() -> None:
    for schema in ({"type": "string", "minLength": 10**12}, {"type": "array", "minItems": 10**12}):
        with pytest.raises(InvalidRequest, match="too large"):
            schema_instance(schema)


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


@settings(max_examples=40, deadline=None)
@given(schemas)
def test_every_schema_gets_a_valid_instance(schema: dict[str, Any]) -> None:
    jsonschema.validate(schema_instance(schema), schema)


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
def test_malformed_schema_is_an_invalid_request(schema: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        schema_instance(schema)
    assert caught.value.code == "invalid_json_schema"


# --- regular expressions ----------------------------------------------------------------------------------------------

PATTERNS = [
    "",
    "abc",
    "a|b",
    "[a-f0-9]{8}",
    r"\d{4}-\d\d-\d\d",
    r"(\w+)=\1",
    r"^(?:yes|no)$",
    ".{3}",
    "[^a-zA-Z0-9]x",
    r"\s\S\D\W",
    "(a(b(c)?)+)*d",
    "x+?y{2,}",
    "[^x]",
    "(?i:abc)",
    "(?>ab)c",
    r"(?P<a>[\u4e00-\u9fff]|x)(?P=a)\x41\101\n\.",
    r"(?=a)a(?#note)[]a]{,3}[^]]{2}\\|b",
    "(?x) a [ ] # note (\n b{2}",
    r"(a|b(c))\1{1}{",
]


def test_regex_sample_matches_its_pattern() -> None:
    for pattern in PATTERNS:
        assert re.fullmatch(pattern, regex_sample(pattern)), pattern


def test_invalid_regex_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a regular expression"):
        regex_sample("(")


@pytest.mark.parametrize("pattern", ["((" * 5000, "(" * 3000 + "a" + ")" * 3000, r"[^\s\S]", "a{99999999999999}"])
def test_a_regex_that_cannot_be_read_or_matched_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        regex_sample(pattern)
    assert refused.value.code == "invalid_regex"
    assert len(refused.value.message) < 500


def test_a_rare_character_is_found_without_a_search_through_all() -> None:
    pattern = "[^\x00-\U0010fffe]" * 2000
    assert regex_sample(pattern) == "\U0010ffff" * 2000
    assert regex_sample("[\u4e00-\u9fff]") == "\u4e00"


def test_huge_regex_sample_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        regex_sample("(a{60000}){60000}")


STEPS: list[dict[str, Any]] = [
    {"think": "hm"},
    {"text": "Look: "},
    {"call": [{"name": "f", "arguments": {"a": 1, "b": "x"}}, {"name": "g"}]},
]


async def test_hermes() -> None:
    assert await answer(script=[{"steps": STEPS}]) == (
        "<think>\nhm\n</think>\n\nLook: "
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )


async def test_qwen3_coder() -> None:
    assert (await answer(script=[{"steps": STEPS}], format="qwen3_coder")).endswith(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )


async def test_harmony() -> None:
    assert await answer(script=[{"steps": STEPS}], format="harmony") == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Look: <|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>"
    )


async def test_harmony_continues_an_open_message_and_closes_it() -> None:
    steps: list[dict[str, Any]] = [{"repeat": 3, "steps": [{"text": "a "}]}]
    assert await answer(script=[{"steps": steps}], format="harmony") == ("<|channel|>final<|message|>a a a <|return|>")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([{"think": "hm"}, {"text": "Yes"}], "hm\n</think>\n\nYes"),
        ([{"text": "Yes"}], "\n</think>\n\nYes"),
        ([{"raw": "as it is"}], "as it is\n</think>\n\n"),
    ],
)
async def test_reasoning_opened_by_the_template_is_closed_once(steps: list[dict[str, Any]], expected: str) -> None:
    opened = chatml(("user", "x"), opening="<think>\n")
    assert await answer(opened, script=[{"steps": steps}]) == expected


async def test_only_raw_steps_produce_control_tokens() -> None:
    marker = tokenizer().specials["<tool_call>"]
    for step, special in (({"text": "<tool_call>"}, False), ({"raw": "<tool_call>"}, True)):
        engine = await text_engine(script=[{"steps": [step]}])
        assert (marker in ids(await read(engine.generate(prompt())))) is special


async def test_broken_arguments_are_written_verbatim() -> None:
    script = [{"steps": [{"call": {"name": "f", "arguments": '{"a": '}}]}]
    assert '\n{"name": "f", "arguments": {"a": }\n' in await answer(script=script)
    assert '\n<function=f>\n{"a": \n</function>\n' in await answer(script=script, format="qwen3_coder")


async def test_format_without_a_writer_uses_hermes() -> None:
    assert await answer(script=[{"steps": STEPS}], format="plain") == await answer(script=[{"steps": STEPS}])


async def test_reasoning_of_several_steps_is_one_block() -> None:
    steps: list[dict[str, Any]] = [{"repeat": 2, "steps": [{"think": "hm "}]}, {"text": "Yes"}]
    assert await answer(script=[{"steps": steps}]) == "<think>\nhm hm \n</think>\n\nYes"


# --- token ids --------------------------------------------------------------------------------------------------------


def test_steps_without_output_stay_steps() -> None:
    delay, failure = ScriptStep(delay=1), ScriptStep(fail="x")
    encoded = OutputEncoder(tokenizer()).encode([delay, ScriptStep(text="a"), failure], in_reasoning=False)
    assert list(encoded) == [delay, tokenizer().encode("a"), failure]


def test_filler_words_are_one_token_each() -> None:
    tokens = OutputEncoder(tokenizer()).filler(500)
    assert len(tokens) == 500
    assert len(tokenizer().decode(tokens).split()) == 500
