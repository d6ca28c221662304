"""The request of a chat in each protocol, and as code."""

from __future__ import annotations

import json
import shlex

import pytest

from modelyard.core.chat import Chat, Turn
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Audio, Document, Image, Part, Text, ToolCall, ToolResult
from modelyard.http.errors import load_protocol
from modelyard.workbench.chat_request import (
    PROTOCOLS,
    ProgressReader,
    attached_part,
    chat_request,
    curl_snippet,
    format_body,
    progress_text,
    python_snippet,
    read_tools,
    refusal,
    wire_protocol,
)

CHAT = load_protocol("openai_chat")


def chat(*parts: Part) -> Chat:
    made = Chat()
    made.settings.system = "Be brief."
    made.add(Turn(role="user", parts=parts or (Text("Hello, it's me"),)))
    return made


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_reads_back_the_request(name: str) -> None:
    made, protocol = chat(), load_protocol(name)
    made.settings.temperature, made.settings.max_tokens = 0.5, 7
    read = protocol.read_request(protocol.write_request(chat_request(made, "m")), {})
    assert (read.model, read.stream, read.max_tokens, read.sampling.temperature) == ("m", True, 7, 0.5)
    assert [part.text for message in read.messages for part in message.parts] == ["Be brief.", "Hello, it's me"]  # type: ignore[union-attr]


def test_the_message_that_is_being_typed_can_be_counted() -> None:
    request = chat_request(chat(), "m", draft=(Text("and you"),))
    assert request.messages[-1].parts == (Text("and you"),)


def test_tool_results_refer_to_their_calls() -> None:
    made = chat()
    answer = made.add(Turn(parent=made.head, role="assistant", parts=(ToolCall("c1", "weather", "{}"),)))
    made.add(Turn(parent=answer.id, role="tool", parts=(ToolResult("c1", (Text("sunny"),)),)))
    body = json.loads(CHAT.write_request(chat_request(made, "m")))
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_tools_are_read_in_the_format_of_any_protocol() -> None:
    for text in (
        '[{"name": "f", "parameters": {"type": "object"}}]',
        '[{"name": "f", "input_schema": {"type": "object"}}]',
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}',
    ):
        (tool,) = read_tools(text)
        assert (tool.name, tool.parameters) == ("f", {"type": "object"})
    assert read_tools("  ") == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"description": "no name"}]', '[{"name": "f", "parameters": 3}]'])
def test_invalid_tools_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tool|parameters"):
        read_tools(text)


def test_images_are_shortened_in_the_shown_body() -> None:
    made = chat(Image("data:image/png;base64," + "A" * 5000), Text("look"))
    shown = format_body(CHAT.write_request(chat_request(made, "m")))
    assert len(shown) < 1000
    assert "(5022 characters)" in shown


def test_the_curl_snippet_has_the_exact_body_and_no_key() -> None:
    body = CHAT.write_request(chat_request(chat(), "m"))
    words = shlex.split(curl_snippet("http://x", "/v1/chat/completions", body, needs_key=True))
    assert words[words.index("-d") + 1].encode() == body
    assert "authorization: Bearer $MODELYARD_API_KEY" in words


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_python_snippet_compiles_and_has_the_exact_body(needs_key: bool) -> None:
    body = CHAT.write_request(chat_request(chat(), "m"))
    code = python_snippet("http://x", "/v1/chat/completions", body, needs_key)
    compile(code, "snippet", "exec")
    head = code.partition("with httpx")[0].replace("import httpx", "").replace("headers = ", "pass; headers = lambda: ")
    namespace: dict[str, object] = {}
    exec(head, namespace)  # everything before the request
    assert namespace["body"] == json.loads(body)
    assert ("os" in namespace) == needs_key


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "part"),
    [
        ("image/png", Image("data:image/png;base64,YWJj")),
        ("audio/x-wav", Audio("data:audio/wav;base64,YWJj")),
        ("audio/mp3", Audio("data:audio/mpeg;base64,YWJj")),
        ("application/pdf", Document("data:application/pdf;base64,YWJj", "a file")),
    ],
)
def test_a_file_becomes_a_part(content_type: str, part: Part) -> None:
    assert attached_part("a file", content_type, b"abc") == part


@pytest.mark.parametrize("content_type", ["audio/ogg", "text/html", ""])
def test_other_files_are_refused_in_one_sentence(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a file.* cannot be attached: images, WAV, MP3, FLAC and PDF can"):
        attached_part("a file", content_type, b"abc")


def test_a_model_that_takes_no_such_file_is_named() -> None:
    taken = {"sees": ["text", "image"], "reads": ["text"]}
    image, sound, pdf = Image("data:,"), Audio("data:,"), Document("data:,")
    assert refusal(sound, "a.wav", taken) == "sees takes text and image only: a.wav is not attached."
    assert refusal(image, "a.png", taken) == "reads takes text only: a.png is not attached."
    assert refusal(pdf, "a.pdf", taken) == ""


@pytest.mark.parametrize("name", PROTOCOLS)
def test_files_reach_the_server_in_every_protocol(name: str) -> None:
    protocol = load_protocol(name)
    pdf, sound = Document("data:application/pdf;base64,YWJj", "a.pdf"), Audio("data:audio/wav;base64,YWJj")

    def read_back(part: Part) -> tuple[Part, ...]:
        body = protocol.write_request(chat_request(chat(part, Text("What is it?")), "m"))
        return protocol.read_request(body, {}).messages[-1].parts

    assert read_back(pdf)[0] == pdf
    if name == "anthropic_messages":
        with pytest.raises(Unsupported, match="takes no audio"):
            read_back(sound)
    else:
        assert read_back(sound)[0] == sound


# --- progress, and tools that the server runs ------------------------------------------------------------------------


def test_progress_is_found_in_comments_wherever_the_stream_is_cut() -> None:
    data = b': x-modelyard-progress: {"state":"queued","waiting":2}\n\n: keep-alive\n\ndata: {"a": 1}\n\n'
    for size in (1, 5, 1000):
        reader = ProgressReader()
        found = [one for at in range(0, len(data), size) for one in reader.feed(data[at : at + size])]
        assert found == [{"state": "queued", "waiting": 2}]


@pytest.mark.parametrize(
    ("progress", "text", "share"),
    [
        ({"state": "queued", "waiting": 1}, "Waiting for a free slot", 0),
        ({"state": "queued", "waiting": 3}, "Waiting for a free slot, with 2 other requests", 0),
        ({"state": "loading", "phase": "weights", "progress": 0.5}, "Loading the model: weights · 50 %", 0.5),
        ({"state": "reading", "done": 5, "total": 20}, "Reading the prompt: 5 of 20 tokens", 0.25),
    ],
)
def test_what_a_message_waits_for_is_said_in_words(progress: dict[str, object], text: str, share: float) -> None:
    assert progress_text(progress) == (text, share)


def test_calls_that_the_server_ran_go_back_only_where_the_protocol_has_items_for_them() -> None:
    made = Chat()
    made.add(Turn(role="user", parts=(Text("add"),)))
    ran = (ToolCall("1", "add", "{}", server="sums"), ToolResult("1", (Text("2"),)), Text("Two."))
    made.add(Turn(parent=made.head, role="assistant", parts=ran, end="finished"))
    made.settings.mcp = ["sums"]
    named = chat_request(made, "m")
    assert named.messages[1].parts == ran
    assert named.tools[0].parameters == {"server_label": "sums", "require_approval": "never"}
    assert wire_protocol(made.settings) == "openai_responses"
    made.settings.mcp = []
    assert chat_request(made, "m").messages[1].parts == (Text("Two."),)
