"""A conversation as data: what is sent in each protocol, what stays of an answer, and the same request elsewhere."""

from __future__ import annotations

import json
import shlex

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Text, Thinking, ToolCall
from modelyard.workbench.talk import WIRES, Talk, curl, pretty, python, read_tools, wire

PICTURE = "data:image/png;base64,AAAA"


def asked() -> Talk:
    talk = Talk()
    talk.knobs.model, talk.knobs.system = "m", "Be brief."
    talk.say("Hello, it's me")
    return talk


def reply(*parts: Text | Thinking | ToolCall) -> Reply:
    return Reply(Started("t", "m", 0), tuple(map(Block, parts)), Finished("end", Usage()))


@pytest.mark.parametrize("name", WIRES)
def test_every_protocol_reads_back_what_was_asked(name: str) -> None:
    talk = asked()
    talk.knobs.temperature, talk.knobs.max_tokens = 0.5, 7
    read = wire(name).read_request(wire(name).write_request(talk.request()), {})
    assert (read.model, read.stream, read.max_tokens, read.sampling.temperature) == ("m", True, 7, 0.5)
    assert [part.text for message in read.messages for part in message.parts] == ["Be brief.", "Hello, it's me"]  # type: ignore[union-attr]


def test_pictures_go_along_with_the_next_message_only() -> None:
    talk = Talk()
    talk.pictures.append(PICTURE)
    talk.say("What is it?")
    talk.say("Really?")
    assert [len(message.parts) for message in talk.messages] == [2, 1]


def test_reasoning_does_not_come_back_with_the_next_question() -> None:
    talk = asked()
    talk.answered(reply(Thinking("hm"), Text("Hello.")))
    assert talk.messages[-1].parts == (Text("Hello."),)


def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    talk = asked()
    talk.broke_off("Hel")
    assert talk.messages[-1].parts == (Text("Hel"),)
    talk.say("Go on")
    talk.broke_off("")
    assert talk.messages[-1].parts == (Text("Hel"),)  # the question that got no answer can be asked again


def test_results_answer_their_calls() -> None:
    talk = asked()
    talk.answered(reply(ToolCall("c1", "weather", "{}")))
    talk.hand_over({"c1": "sunny"})
    body = json.loads(wire("openai_chat").write_request(talk.request()))
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "f", "parameters": {"type": "object"}}]',
        '[{"name": "f", "input_schema": {"type": "object"}}]',
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}',
    ],
)
def test_tools_are_read_in_any_protocols_words(text: str) -> None:
    (tool,) = read_tools(text)
    assert (tool.name, tool.parameters) == ("f", {"type": "object"})


@pytest.mark.parametrize("text", ["{", "[1]", '[{"description": "no name"}]', '[{"name": "f", "parameters": 3}]'])
def test_tools_that_are_none_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tool|parameters"):
        read_tools(text)
    assert read_tools("  ") == ()


def test_a_picture_is_cut_short_where_people_read() -> None:
    talk = Talk()
    talk.pictures.append("data:image/png;base64," + "A" * 5000)
    talk.say("look")
    shown = pretty(wire("openai_chat").write_request(talk.request()))
    assert len(shown) < 1000
    assert "(5022 characters)" in shown


def test_curl_carries_the_very_body_and_names_no_key() -> None:
    body = wire("openai_chat").write_request(asked().request())
    words = shlex.split(curl("http://x", "/v1/chat/completions", body, keyed=True))
    assert words[words.index("-d") + 1].encode() == body
    assert "authorization: Bearer $MODELYARD_API_KEY" in words


@pytest.mark.parametrize("keyed", [True, False])
def test_python_compiles_and_carries_the_very_body(keyed: bool) -> None:
    body = wire("openai_chat").write_request(asked().request())
    code = python("http://x", "/v1/chat/completions", body, keyed)
    compile(code, "snippet", "exec")
    head = code.partition("with httpx")[0].replace("import httpx", "").replace("headers = ", "pass; headers = lambda: ")
    found: dict[str, object] = {}
    exec(head, found)  # up to where it would ask
    assert found["body"] == json.loads(body)
    assert ("os" in found) == keyed
