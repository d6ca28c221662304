"""What the fake says where no rule fits."""

import json
import re

import jsonschema

from modelyard.core.engine import End
from modelyard.core.request import Constraint
from tests.engines.fake.stage import WEATHER, answer, chatml, prompt, read, text_engine

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


async def test_demo_says_what_it_is_and_quotes_the_user() -> None:
    said = await answer("What is “up”? 你好 🎉")
    assert "built-in fake engine" in said
    assert "What is “up”? 你好 🎉" in said


async def test_demo_quotes_only_the_beginning_of_a_long_text() -> None:
    assert len(await answer("word " * 1000)) < 1000


async def test_demo_thinks_when_told_to() -> None:
    assert (await answer("think about it")).startswith("<think>")


async def test_demo_calls_the_tool_that_the_user_names() -> None:
    said = await answer(chatml(TOOLS, ("user", "please call get_weather.")))
    assert called(said) == {"name": "get_weather", "arguments": {"city": "text"}}


async def test_demo_takes_arguments_from_the_user() -> None:
    said = await answer(chatml(TOOLS, ("user", 'call get_weather {"city": "Rome"}')))
    assert called(said)["arguments"] == {"city": "Rome"}


async def test_demo_calls_no_tool_that_is_not_offered() -> None:
    assert "<tool_call>" not in await answer(chatml(TOOLS, ("user", "call format_disk")))
    assert "<tool_call>" not in await answer("call get_weather")


async def test_demo_answers_a_tools_result_instead_of_calling_again() -> None:
    said = await answer(chatml(TOOLS, ("user", "call get_weather"), ("tool", "18 degrees")))
    assert said == "The tool answered: 18 degrees"


async def test_demo_tells_which_tools_it_could_call() -> None:
    assert "call get_weather" in await answer(chatml(TOOLS, ("user", "which tools do you know?")))


async def test_echo_says_the_users_words() -> None:
    assert await answer("repeat after me", echo=True) == "repeat after me"


async def test_json_constraints_are_obeyed() -> None:
    assert json.loads(await answer(fields={"constraint": Constraint("json_object")})) == {}
    made = json.loads(await answer(fields={"constraint": Constraint("json_schema", json.dumps(SCHEMA))}))
    jsonschema.validate(made, SCHEMA)


async def test_regex_constraint_is_obeyed() -> None:
    pattern = r"(yes|no)-\d{3}[^a-y]"
    assert re.fullmatch(pattern, await answer(fields={"constraint": Constraint("regex", pattern)}))


async def test_forced_tool_is_called_with_valid_arguments() -> None:
    text = chatml(TOOLS, ("user", "hello"))
    for constraint in (Constraint("tools"), Constraint("tools", tools=("get_weather",))):
        said = await answer(text, fields={"constraint": constraint})
        assert called(said) == {"name": "get_weather", "arguments": {"city": "text"}}


async def test_constraint_that_waits_for_a_trigger_forces_nothing() -> None:
    waiting = Constraint("tools", trigger="<tool_call>", tools=("get_weather",))
    assert "fake engine" in await answer(fields={"constraint": waiting})


async def test_grammar_that_the_fake_cannot_read_leaves_the_answer_free() -> None:
    assert "fake engine" in await answer(fields={"constraint": Constraint("lark", "start: X")})


async def test_bare_rule_gives_way_to_a_constraint_and_a_fitting_one_does_not() -> None:
    fields = {"constraint": Constraint("json_object")}
    assert await answer(fields=fields, script=[{"steps": [{"text": "words"}]}]) == "{}"
    assert await answer(fields=fields, script=[{"when": "hello", "steps": [{"text": "words"}]}]) == "words"


async def test_bad_schema_fails_the_job_with_a_reason() -> None:
    engine = await text_engine()
    for text, complaint in (("{", "not JSON"), ('{"$ref": "#/$defs/x"}', "does not hold")):
        (last,) = await read(engine.generate(prompt(constraint=Constraint("json_schema", text))))
        assert isinstance(last, End)
        assert last.error is not None
        assert complaint in last.error.message
