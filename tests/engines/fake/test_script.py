"""The script language, and the conversation that rules are matched against."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.core.errors import Overloaded, Unavailable
from modelyard.core.request import Message, Request, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard_fake import Options
from modelyard_fake.script import PromptView, RequestView, Script, ScriptRule, ScriptStep, find_tools, unroll
from tests.engines.fake.helpers import WEATHER, answer, chatml, tokenizer


def conversation(user: str, result: str | None = None) -> RequestView:
    results = () if result is None else (Message("tool", (ToolResult("1", (Text(result),)),)),)
    return RequestView(Request(model="m", messages=(Message("user", (Text(user),)), *results)))


def rule(**fields: Any) -> ScriptRule:
    return ScriptRule.model_validate({"steps": [{"text": "x"}]} | fields)


def test_first_matching_rule_wins() -> None:
    rules = [rule(when="rain"), rule(when="sun"), rule()]
    script = Script(rules)
    assert script.choose(conversation("will the sun shine")) is rules[1]
    assert script.choose(conversation("rain or sun")) is rules[0]
    assert script.choose(conversation("neither")) is rules[2]


def test_no_rule_may_match() -> None:
    assert Script([rule(when="rain")]).choose(conversation("sun")) is None


def test_turn_counts_the_matches_of_a_pattern_in_a_session() -> None:
    first, second = rule(when="go", turn=1), rule(when="go", turn=2)
    script = Script([first, second])
    assert script.choose(conversation("go"), "a") is first
    assert script.choose(conversation("go"), "b") is first
    assert script.choose(conversation("stay"), "a") is None
    assert script.choose(conversation("go"), "a") is second
    assert script.choose(conversation("go"), "a") is None


def test_result_is_searched_in_tool_results() -> None:
    script = Script([rule(result="sunny")])
    assert script.choose(conversation("x", "it is sunny")) is not None
    assert script.choose(conversation("sunny")) is None


def test_rules_are_read_from_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text('[[script]]\nwhen = "hi"\nsteps = [{text = "hello"}, {delay = 0.5}]\n')
    (read,) = Options(script=path).script
    assert read.when == "hi"
    assert [step.text for step in read.steps] == ["hello", None]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("[[script", "not valid TOML"), ("x = 1", r"only \[\[script\]\] tables")],
)
def test_unreadable_script_file_is_named_in_the_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "demo.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValidationError, match=message):
        Options(script=str(path))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({}, "has none"),
        ({"text": "a", "think": "b"}, "text and think"),
        ({"text": "a", "progress": 3}, "'progress' belongs to a 'prefill' step"),
        ({"text": "a", "kind": "invalid"}, "'kind' belongs to a 'fail' step"),
        ({"fail": "x", "kind": "cancelled"}, "kind must be one of"),
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"speak": "a"}, "Extra inputs"),
    ],
)
def test_invalid_step_is_refused_with_a_reason(step: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScriptStep.model_validate(step)


def test_invalid_pattern_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        rule(when="(")


def test_error_has_the_kind_of_its_step() -> None:
    assert isinstance(ScriptStep(fail="full", kind="overloaded").error, Overloaded)
    assert isinstance(ScriptStep(die="boom").error, Unavailable)
    assert ScriptStep(text="x").error is None


@pytest.mark.parametrize("kind", ["invalid", "rate_limited", "not_found", "timeout", "internal", "too_large"])
def test_every_kind_of_failure_can_be_scripted(kind: Any) -> None:
    error = ScriptStep(fail="why", kind=kind).error
    assert error is not None
    assert error.kind == kind
    assert error.message == "why"


async def test_rules_match_the_last_user_message_of_the_prompt() -> None:
    script = [{"when": "^sun$", "steps": [{"text": "warm"}]}, {"steps": [{"text": "cold"}]}]
    assert await answer("sun", script=script) == "warm"
    assert await answer("the sun", script=script) == "cold"


def test_repeats_are_unrolled_lazily() -> None:
    steps = unroll([ScriptStep(repeat=10**12, steps=(ScriptStep(text="a"), ScriptStep(repeat=0)))])
    assert [next(steps).text for _ in range(5)] == ["a"] * 5


async def test_repeated_steps_are_played() -> None:
    script = [{"steps": [{"repeat": 3, "steps": [{"text": "ab "}]}, {"repeat": 0, "steps": [{"text": "never"}]}]}]
    assert await answer(script=script) == "ab ab ab "


# --- views of the conversation ----------------------------------------------------------------------------------------


def view_of(text: str) -> PromptView:
    return PromptView(tokenizer().encode(text), tokenizer())


def test_last_user_message_of_chatml_is_found() -> None:
    view = view_of(chatml(("system", "be kind"), ("user", "one"), ("assistant", "two"), ("user", "three\nlines")))
    assert view.user == "three\nlines"
    assert view.result is None


@pytest.mark.parametrize("turn", [("tool", "18 degrees"), ("user", "<tool_response>\n18 degrees\n</tool_response>")])
def test_tool_results_are_not_user_messages(turn: tuple[str, str]) -> None:
    view = view_of(chatml(("user", "weather"), ("assistant", "<tool_call>…</tool_call>"), turn, turn))
    assert view.user == "weather"
    assert view.result == "18 degrees\n18 degrees"


def test_results_before_the_last_user_message_are_ignored() -> None:
    view = view_of(chatml(("user", "a"), ("tool", "old"), ("assistant", "b"), ("user", "c")))
    assert (view.user, view.result) == ("c", None)


def test_harmony_turns_are_read() -> None:
    text = (
        "<|start|>system<|message|>rules<|end|><|start|>user<|message|>weather?<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get<|message|>{"a":1}<|call|>'
        "<|start|>functions.get to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
    )
    assert (view_of(text).user, view_of(text).result) == ("weather?", "sunny")


def test_prompt_without_markers_is_the_user_message() -> None:
    assert view_of("Once upon a time").user == "Once upon a time"
    assert view_of("").user == ""


def test_prompt_without_a_user_has_no_user_message() -> None:
    assert view_of(chatml(("system", "x"))).user == ""


def test_tools_are_found_as_json_xml_and_harmony() -> None:
    assert find_tools(f"<tools>\n{WEATHER}\nnot json\n[1]\n</tools>")["get_weather"]["required"] == ["city"]
    assert find_tools("<tools><function><name>ls</name></function></tools>") == {"ls": {}}
    assert find_tools("namespace functions {\ntype ls = (_: {\n}) => any;\n}") == {"ls": {}}
    assert find_tools("nothing") == {}


def test_reasoning_opened_by_the_template_is_recognized() -> None:
    assert view_of(chatml(("user", "x"), opening="<think>\n")).starts_in_reasoning
    assert not view_of(chatml(("user", "x"), opening="<think>\n\n</think>\n\n")).starts_in_reasoning
    assert not view_of(chatml(("user", "x"))).starts_in_reasoning


def test_request_has_the_same_view() -> None:
    call = ToolCall("1", "get", "{}")
    messages = (
        Message("user", (Text("old"),)),
        Message("user", (Text("weather"), Text("in Rome"))),
        Message("assistant", (Thinking("hm"), call)),
        Message("tool", (ToolResult("1", (Text("sunny"),)), ToolResult("2", (Text("warm"),)))),
    )
    view = RequestView(Request(model="m", messages=messages, tools=(Tool("get"), Tool("web", kind="server"))))
    assert (view.user, view.result) == ("weather\nin Rome", "sunny\nwarm")
    assert list(view.tools) == ["get"]


def test_raw_prompt_is_the_user_message() -> None:
    assert RequestView(Request(model="m", prompts=("say x",))).user == "say x"
