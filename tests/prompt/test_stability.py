"""What a client has re-serialised, reordered or left out is told in the model's own words; what it changed is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Message, Text, Thinking, ToolCall
from modelyard.gateway.replay_memory import GeneratedCall, call_ids, generated_calls, restored, with_line_breaks
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin
from modelyard.tokenizer.hf import HuggingFaceTokenizer
from tests.prompt.histories import TALKING, TOOL, ask, result, say
from tests.tokenizer import tokenizers_made as made

VOCAB = HuggingFaceTokenizer.from_text(made.byte_level())
OWN = '{"timeout":5000.0,  "path": "a.txt"}'


def reply(*parts: Any) -> Reply:
    return Reply(Started("r", "m", 0), tuple(Block(part) for part in parts), Finished("tool_calls", Usage()))


def call(arguments: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id, "read_file", arguments)


SAID = generated_calls(reply(Thinking("Look first."), Text("Looking."), call(OWN), call("{}", "call_2")))


def one(*parts: Any) -> Message:
    (message,) = restored([say("assistant", *parts)], SAID)
    return message


def test_reasoning_is_kept_with_the_first_call_of_its_turn() -> None:
    assert set(SAID) == {"call_1", "call_2"}
    assert (SAID["call_1"], SAID["call_2"]) == (GeneratedCall(OWN, "Look first."), GeneratedCall("{}"))


def test_a_call_that_was_cut_off_is_nothing_to_remember() -> None:
    cut = Reply(Started("r", "m", 0), (Block(call('{"pa'), complete=False),), Finished("max_tokens", Usage()))
    assert generated_calls(cut) == {}


@pytest.mark.parametrize("echo", [OWN, '{"path": "a.txt", "timeout": 5000}', '{"path":"a.txt","timeout":5000.0}'])
def test_arguments_that_mean_the_same_are_in_the_models_own_words(echo: str) -> None:
    found = one(Thinking("Look first.", "sealed"), Text("Looking."), call(echo))
    assert found.parts[2] == ToolCall("call_1", "read_file", OWN, verbatim=True)
    assert found.parts[0] == Thinking("Look first.", "sealed")


@pytest.mark.parametrize("echo", ['{"path": "b.txt", "timeout": 5000}', '{"path": "a.t', "{}", "[1]"])
def test_arguments_that_mean_something_else_are_the_clients_word(echo: str) -> None:
    assert one(Thinking("Mine."), call(echo)).parts[1] == call(echo)


def test_reasoning_that_was_left_out_or_redacted_stands_in_front_again() -> None:
    assert one("Looking.", call(OWN)).parts[:2] == (Thinking("Look first."), Text("Looking."))
    assert one(Thinking("", "foreign", redacted=True), call(OWN)).parts[0] == Thinking("Look first.")
    assert not [part for part in one(call("{}", "call_2")).parts if isinstance(part, Thinking)]


def test_calls_of_others_and_other_roles_stay_as_they_are() -> None:
    talk = (say("user", "hi"), say("assistant", call(OWN, "foreign")), say("assistant", "text"))
    assert restored(talk, SAID) == talk
    assert list(call_ids(talk)) == ["foreign"]


@pytest.mark.parametrize(
    ("raw", "separator", "expected"),
    [
        ("Looking.\n<call>", "\n", ""),
        ("Looking.\n\n<call>", "\n", "Looking.\n"),
        ("<think>Looking?</think>Looking.\n\n<call>", "", "Looking.\n\n"),
        ("Looking.<call>", "\n", ""),
        ("Looking. <call>", "\n", ""),
        ("Something else.<call>", "\n", ""),
    ],
)
def test_line_breaks_behind_a_text_are_told_but_for_the_templates_own(raw: str, separator: str, expected: str) -> None:
    assert with_line_breaks(reply(Text("Looking."), call("{}")), raw, separator) == expected


def test_several_texts_or_none_are_told_as_they_are() -> None:
    assert with_line_breaks(reply(Text("a"), call("{}"), Text("b")), "a\n\n<call>b", "\n") == ""
    assert with_line_breaks(reply(call("{}")), "\n\n<call>", "\n") == ""


def test_a_text_is_told_with_its_line_breaks_where_it_is_the_same_text() -> None:
    said = generated_calls(reply(Text("Looking."), call("{}")), "Looking.\n")
    same, other = (restored([say("assistant", text, call("{}"))], said)[0].parts[0] for text in ("Looking.", "No."))
    assert (same, other) == (Text("Looking.\n"), Text("No."))


# --- through real templates -------------------------------------------------------------------------------------------


def prompt(name: str, *echo: Any, known: bool = True) -> str:
    renderer = Renderer(ChatTemplate(builtin(name)), VOCAB)
    history = (say("user", "read it"), say("assistant", *echo), result("call_1"))
    return renderer.apply(ask(*(restored(history, SAID) if known else history), tools=(TOOL,))).text


@pytest.mark.parametrize("name", TALKING)
def test_every_template_tells_a_reordered_call_as_it_tells_the_models_own(name: str) -> None:
    own = prompt(name, Thinking("Look first."), "Looking.", call(OWN))
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}')) == own
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}'), known=False) != own


@pytest.mark.parametrize("name", ["generic", "qwen3"])
def test_where_calls_are_json_they_are_spelled_as_they_were_generated(name: str) -> None:
    assert f'"arguments": {OWN}}}' in prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}'))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), VALUES, max_size=4), st.booleans(), st.booleans())
def test_whatever_the_arguments_an_echo_renders_as_what_was_said(
    value: dict[str, Any], compact: bool, escaped: bool
) -> None:
    own = json.dumps(value, separators=(",", ":") if compact else None, ensure_ascii=escaped)
    said = generated_calls(reply(call(own)))
    echo = json.dumps(dict(reversed(value.items())), ensure_ascii=False)
    renderer = Renderer(ChatTemplate(builtin("generic")), VOCAB)

    def told(arguments: str) -> str:
        history = (say("user", "go"), say("assistant", call(arguments)), result("call_1"))
        return renderer.text(ask(*restored(history, said), tools=(TOOL,)))

    assert told(echo) == told(own)
