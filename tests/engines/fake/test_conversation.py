"""What the fake sees of a prompt."""

import pytest

from modelyard.core.request import Message, Request, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.engines.fake.conversation import PromptView, RequestView, tools_in
from tests.engines.fake.stage import WEATHER, chatml, vocabulary


def seen(text: str) -> PromptView:
    return PromptView(vocabulary().encode(text), vocabulary())


def test_last_user_turn_of_chatml_is_found() -> None:
    talk = seen(chatml(("system", "be kind"), ("user", "one"), ("assistant", "two"), ("user", "three\nlines")))
    assert talk.user == "three\nlines"
    assert talk.result is None


@pytest.mark.parametrize("turn", [("tool", "18 degrees"), ("user", "<tool_response>\n18 degrees\n</tool_response>")])
def test_tool_results_are_not_taken_for_the_user(turn: tuple[str, str]) -> None:
    talk = seen(chatml(("user", "weather"), ("assistant", "<tool_call>…</tool_call>"), turn, turn))
    assert talk.user == "weather"
    assert talk.result == "18 degrees\n18 degrees"


def test_results_before_the_last_user_turn_are_old_news() -> None:
    talk = seen(chatml(("user", "a"), ("tool", "old"), ("assistant", "b"), ("user", "c")))
    assert (talk.user, talk.result) == ("c", None)


def test_harmony_turns_are_read() -> None:
    text = (
        "<|start|>system<|message|>rules<|end|><|start|>user<|message|>weather?<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get<|message|>{"a":1}<|call|>'
        "<|start|>functions.get to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
    )
    assert (seen(text).user, seen(text).result) == ("weather?", "sunny")


def test_prompt_without_markers_is_the_users_own_text() -> None:
    assert seen("Once upon a time").user == "Once upon a time"
    assert seen("").user == ""


def test_prompt_without_a_user_has_no_user_text() -> None:
    assert seen(chatml(("system", "x"))).user == ""


def test_tools_are_found_as_json_xml_and_harmony() -> None:
    assert tools_in(f"<tools>\n{WEATHER}\nnot json\n[1]\n</tools>")["get_weather"]["required"] == ["city"]
    assert tools_in("<tools><function><name>ls</name></function></tools>") == {"ls": {}}
    assert tools_in("namespace functions {\ntype ls = (_: {\n}) => any;\n}") == {"ls": {}}
    assert tools_in("nothing") == {}


def test_opened_reasoning_is_noticed() -> None:
    assert seen(chatml(("user", "x"), opening="<think>\n")).thinks_already
    assert not seen(chatml(("user", "x"), opening="<think>\n\n</think>\n\n")).thinks_already
    assert not seen(chatml(("user", "x"))).thinks_already


def test_request_is_seen_the_same_way() -> None:
    call = ToolCall("1", "get", "{}")
    messages = (
        Message("user", (Text("old"),)),
        Message("user", (Text("weather"), Text("in Rome"))),
        Message("assistant", (Thinking("hm"), call)),
        Message("tool", (ToolResult("1", (Text("sunny"),)), ToolResult("2", (Text("warm"),)))),
    )
    talk = RequestView(Request(model="m", messages=messages, tools=(Tool("get"), Tool("web", kind="server"))))
    assert (talk.user, talk.result) == ("weather\nin Rome", "sunny\nwarm")
    assert list(talk.tools) == ["get"]


def test_raw_prompt_is_the_users_text() -> None:
    assert RequestView(Request(model="m", prompts=("say x",))).user == "say x"
