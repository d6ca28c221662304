"""Content blocks: every type of the real API is accepted, and nothing is refused for being new."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Part, Text, Thinking, ToolCall, ToolReference, ToolResult
from modelyard.protocols.anthropic_messages import read_request
from modelyard.protocols.common.reasoning_signature import pack_reasoning


def parts_and_warnings(*blocks: Any, role: str = "user") -> tuple[tuple[Part, ...], tuple[str, ...]]:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": role, "content": blocks}]})
    request = read_request(body, {})
    return request.messages[0].parts, request.warnings


def part(block: Any, role: str = "user") -> Part:
    parts, warnings = parts_and_warnings(block, role=role)
    assert len(parts) == 1
    assert warnings == ()
    return parts[0]


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "QUJD"}, "data:image/png;base64,QUJD"),
        ({"type": "url", "url": "https://example.com/a.png"}, "https://example.com/a.png"),
        ({"type": "file", "file_id": "file_1"}, "file-id:file_1"),
    ],
)
def test_images_of_every_source_become_urls(source: Any, url: str) -> None:
    assert part({"type": "image", "source": source}) == Image(url)


def test_a_text_document_becomes_text_under_its_title() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert part({"type": "document", "source": source, "title": "Title", "context": None}) == Text("Title\n\nbody")


def test_a_document_of_blocks_becomes_its_blocks() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    parts, _ = parts_and_warnings({"type": "document", "source": source, "title": "T"})
    assert parts == (Text("T"), Text("a"), Text("b"))


def test_a_search_result_becomes_text_with_its_source() -> None:
    block = {
        "type": "search_result",
        "source": "https://a",
        "title": "T",
        "content": [{"type": "text", "text": "found"}],
    }
    assert part(block) == Text("T\nhttps://a\n\nfound")


@pytest.mark.parametrize(
    ("block", "warning"),
    [
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
            "document_dropped:base64",
        ),
        ({"type": "image", "source": {"type": "hologram"}}, "image_dropped:hologram"),
        ({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}, "block_dropped:server_tool_use"),
        (
            {"type": "web_search_tool_result", "tool_use_id": "a", "content": {"type": "error"}},
            "block_dropped:web_search_tool_result",
        ),
        ({"type": "smell", "text": {"a": 1}, "source": 5, "id": [], "content": 1.5}, "block_dropped:smell"),
    ],
)
def test_what_cannot_be_shown_is_dropped_with_a_warning(block: Any, warning: str) -> None:
    parts, warnings = parts_and_warnings({"type": "text", "text": "hi"}, block, block)
    assert (parts, warnings) == ((Text("hi"),), (warning,))


# --- thinking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "thinking"),
    [
        ({"type": "thinking", "thinking": "hm", "signature": "theirs"}, Thinking("hm", "theirs")),
        ({"type": "thinking", "thinking": "hm"}, Thinking("hm")),
        ({"type": "thinking", "thinking": "", "signature": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "thinking", "signature": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "thinking", "thinking": "", "signature": "theirs"}, Thinking("", "theirs")),
        ({"type": "redacted_thinking", "data": pack_reasoning("hm")}, Thinking("hm", pack_reasoning("hm"))),
        ({"type": "redacted_thinking", "data": "theirs"}, Thinking("", "theirs", redacted=True)),
    ],
)
def test_thinking_comes_back_from_its_text_or_its_seal(block: Any, thinking: Thinking) -> None:
    assert part(block, "assistant") == thinking


# --- calls and results ----------------------------------------------------------------------------------------------


def test_arguments_are_the_text_that_stood_on_the_wire() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"c","name":"f","input":{"b": 5000.0,\n "a":[ ]}}]}]}'
    )
    assert read_request(body, {}).messages[0].parts == (ToolCall("c", "f", '{"b": 5000.0,\n "a":[ ]}'),)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, "{}"),
        ({"input": None}, "{}"),
        ({"input": {"__unparsedToolInput": {"raw": '{"a": ', "len": 6}}}, '{"a": '),
        ({"input": {"__unparsedToolInput": 5}}, '{"__unparsedToolInput":5}'),
    ],
)
def test_absent_and_unparsed_input_are_understood(given: Any, arguments: str) -> None:
    assert part({"type": "tool_use", "id": "c", "name": "f"} | given, "assistant") == ToolCall("c", "f", arguments)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({}, ()),
        ({"content": None}, ()),
        ({"content": "ok"}, (Text("ok"),)),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "t"}]},
            (Text("a"), ToolReference("t")),
        ),
        ({"content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}, (Image("u"),)),
    ],
)
def test_results_hold_strings_texts_images_and_tool_references(content: Any, parts: Any) -> None:
    assert part({"type": "tool_result", "tool_use_id": "c"} | content) == ToolResult("c", parts)


def test_a_failed_result_says_so() -> None:
    result = part({"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True})
    assert result == ToolResult("c", (Text("no"),), is_error=True)


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "text", "text": 5}, "text"),
        ({"type": "tool_use", "name": "f"}, "id"),
        ({"type": "tool_result", "content": "x"}, "tool_use_id"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}, "content[0].text"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"text": "a"}]}, "content[0]"),
        ({"type": "image", "source": {"type": "base64", "data": "a"}}, "source.media_type"),
        ({"type": "image", "source": "a"}, "source"),
    ],
)
def test_a_broken_block_is_named_with_its_path(block: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parts_and_warnings({"type": "text", "text": "a"}, block)
    assert caught.value.param == f"messages[0].content[1].{param}"
    assert caught.value.message.startswith(f"messages[0].content[1].{param}: ")
