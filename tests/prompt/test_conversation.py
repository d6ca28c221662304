from __future__ import annotations

from modelyard.core.request import Message, Text
from modelyard.prompt.render import MessageConverter, ToolDefinitions
from modelyard.tokenizer.shield import SENTINEL, Shield
from tests.prompt.histories import ask, call, say

SPECIALS = ("<|im_end|>", "<think>", "</think>")
SHIELD = Shield(SPECIALS)
CONVERSATION = MessageConverter(SPECIALS, ToolDefinitions(SHIELD), SHIELD, images=False)


def test_a_reply_keeps_its_reasoning_tags_and_nothing_else_that_steers() -> None:
    (entry,) = CONVERSATION.entries(ask(say("assistant", "<think>a</think>b<|im_end|>")))
    assert entry["content"] == f"<think>a</think>b<{SENTINEL}|im_end|>"
    (entry,) = CONVERSATION.entries(ask(say("user", "<think>")))
    assert entry["content"] == f"<{SENTINEL}think>"


def test_a_spelling_behind_json_escapes_is_found() -> None:
    (entry,) = CONVERSATION.entries(ask(say("assistant", call(arguments='{"path": "\\u003c|im_end|>"}'))))
    assert entry["tool_calls"][0]["function"]["arguments"] == {"path": f"<{SENTINEL}|im_end|>"}


def test_a_spelling_across_two_blocks_is_found() -> None:
    shield = Shield(["a\nb"])
    conversation = MessageConverter(("a\nb",), ToolDefinitions(shield), shield, images=False)
    (entry,) = conversation.entries(ask(say("user", "a", "b")))
    assert entry["content"] == f"a{SENTINEL}\nb"


def test_blocks_of_a_message_are_lines_and_its_name_goes_along() -> None:
    message = Message("user", (Text("one"), Text("two")), name="Ann")
    assert CONVERSATION.entries(ask(message)) == [{"role": "user", "content": "one\ntwo", "name": "Ann"}]


def test_an_empty_message_is_empty_text() -> None:
    assert CONVERSATION.entries(ask(say("user"), say("assistant"))) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]
