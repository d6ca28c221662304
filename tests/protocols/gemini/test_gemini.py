"""Google's API: requests, schemas, replies, both forms of a stream, and errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, InvalidRequest, ModelyardError, NotFound, RateLimited, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    StopReason,
    Usage,
    collect_reply,
)
from modelyard.core.protocol import ModelCard
from modelyard.core.request import (
    Image,
    Message,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.protocols import gemini
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.gemini import embeddings
from modelyard.protocols.gemini.schema import read_schema
from tests.protocols.event_streams import call, text, thinking, token
from tests.protocols.golden import check_golden

HELLO: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "Hello"}]}]
GENERATE = {":path": "/v1beta/models/m:generateContent"}
SSE = {":path": "/v1beta/models/m:streamGenerateContent", ":query": "alt=sse"}
USAGE = Usage(9, 4, 6, 2)
STARTED = Started("abc123", "tiny", 1_700_000_000, Usage(9, 4))
SUM = '{"a": 1.0, "b": 2}'
STREAMED = Request(model="tiny", stream=True, dialect="sse")


def read(headers: dict[str, str] = GENERATE, **fields: Any) -> Request:
    return gemini.read_request(json.dumps({"contents": HELLO} | fields).encode(), headers)


def config(**fields: Any) -> Request:
    return read(generationConfig=fields)


def answer(*blocks: list[Event], reason: StopReason = "end") -> list[Event]:
    return [STARTED, *(event for block in blocks for event in block), Finished(reason, USAGE)]


def stream(written: list[Event], request: Request = STREAMED) -> bytes:
    writer = gemini.writer(request, "trace")
    return b"".join(writer.write(event) for event in written) + writer.end()


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "query", "found"),
    [
        ("/v1beta/models/m:generateContent", "", ("m", False, "")),
        ("/v1beta/models/owner/m:latest:streamGenerateContent", "alt=sse", ("owner/m:latest", True, "sse")),
        ("/v1/models/m:streamGenerateContent", "", ("m", True, "")),
        ("/models/m:streamGenerateContent", "key=x&alt=sse", ("m", True, "sse")),
    ],
)
def test_the_path_has_the_model_and_the_form_of_the_reply(path: str, query: str, found: tuple[str, bool, str]) -> None:
    request = read({":path": path, ":query": query})
    assert (request.model, request.stream, request.dialect) == found


def test_names_in_snake_case_are_read_but_not_those_of_free_json() -> None:
    function = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"top_p": {"type": "NUMBER"}}}}
    request = read(
        system_instruction={"parts": [{"text": "Be brief."}]},
        generation_config={"max_output_tokens": 5, "top_p": 0.5, "stop_sequences": ["X"]},
        tools=[{"function_declarations": [function]}],
    )
    assert (request.max_tokens, request.sampling.top_p, request.stop) == (5, 0.5, ("X",))
    assert request.messages[0] == Message("system", (Text("Be brief."),))
    assert request.tools == (Tool("f", "", {"type": "object", "properties": {"top_p": {"type": "number"}}}),)


def test_a_schema_becomes_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "a": {"type": "STRING", "nullable": True},
            "b": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "2"},
            "type": {"type": "STRING", "enum": ["x"], "nullable": True},
        },
        "propertyOrdering": ["b", "a"],
        "required": ["a"],
    }
    assert read_schema(schema) == {
        "type": "object",
        "properties": {
            "b": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "a": {"type": ["string", "null"]},
            "type": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]},
        },
        "required": ["a"],
    }
    assert [*read_schema(schema)["properties"]] == ["b", "a", "type"]


def test_an_output_is_json_a_schema_or_one_of_several_words() -> None:
    found = [
        config(responseMimeType="application/json").constraint,
        config(responseMimeType="application/json", responseSchema={"type": "STRING"}).constraint,
        config(responseJsonSchema={"type": "string"}).constraint,
        config(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["a.b", "c"]}).constraint,
    ]
    kinds = [(each.kind, each.text) for each in found if each is not None]
    assert kinds == [
        ("json_object", ""),
        ("json_schema", '{"type":"string"}'),
        ("json_schema", '{"type": "string"}'),
        ("regex", r"(a\.b|c)"),
    ]
    assert config(responseMimeType="text/plain").constraint is None
    with pytest.raises(InvalidRequest, match="responseMimeType 'image/png' is unknown"):
        config(responseMimeType="image/png")


@pytest.mark.parametrize(
    ("thinking_config", "reasoning"),
    [
        (None, Reasoning(summary="omitted")),
        ({"includeThoughts": True}, Reasoning(enabled=True)),
        ({"thinkingBudget": 0}, Reasoning(enabled=False, summary="omitted")),
        ({"thinkingBudget": -1, "includeThoughts": True}, Reasoning(enabled=True)),
        ({"thinkingBudget": 50, "includeThoughts": True}, Reasoning(enabled=True, budget=50)),
        ({"thinkingLevel": "LOW"}, Reasoning(enabled=True, effort="low", summary="omitted")),
    ],
)
def test_thinking_has_a_budget_a_level_and_may_be_shown(thinking_config: Any, reasoning: Reasoning) -> None:
    assert config(thinkingConfig=thinking_config).reasoning == reasoning


@pytest.mark.parametrize(
    ("mode", "allowed", "choice", "left"),
    [
        ("AUTO", None, ToolChoice(), 2),
        ("NONE", None, ToolChoice("none"), 2),
        ("ANY", None, ToolChoice("required"), 2),
        ("ANY", ["a"], ToolChoice("named", "a"), 2),
        ("ANY", ["b", "c"], ToolChoice("required"), 1),
    ],
)
def test_a_call_may_be_required(mode: str, allowed: Any, choice: ToolChoice, left: int) -> None:
    tools = [{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}]
    request = read(tools=tools, toolConfig={"functionCallingConfig": {"mode": mode, "allowedFunctionNames": allowed}})
    assert (request.tool_choice, len(request.tools)) == (choice, left)


def test_whole_numbers_may_be_written_as_fractions() -> None:
    assert config(topK=5.0).sampling.top_k == 5
    with pytest.raises(InvalidRequest, match=r"topK must be a whole number"):
        config(topK=5.5)


def test_tools_of_googles_servers_are_accepted_as_such() -> None:
    (tool,) = read(tools=[{"googleSearch": {}}]).tools
    assert (tool.kind, tool.name) == ("server", "google_search")


def test_a_conversation_with_calls_results_and_images() -> None:
    png = base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode()
    contents = [
        {"parts": [{"text": "See"}, {"inlineData": {"mimeType": "image/png", "data": png}}]},
        {
            "role": "model",
            "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "f", "args": {"x": 1.0}}}],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "f", "response": {"output": "sunny"}}},
                {"text": "Go on"},
                {"inlineData": {"mimeType": "text/plain", "data": base64.b64encode(b"note").decode()}},
            ],
        },
        {"role": "model", "parts": [{"functionCall": {"id": "own", "name": "g"}}]},
        {"parts": [{"functionResponse": {"id": "own", "name": "g", "response": {"error": "no"}}}]},
    ]
    assert read(contents=contents).messages == (
        Message("user", (Text("See"), Image("data:image/png;base64,//79"))),
        Message("assistant", (Thinking("hm"), ToolCall("call_1", "f", '{"x": 1.0}'))),
        Message("tool", (ToolResult("call_1", (Text("sunny"),)),)),
        Message("user", (Text("Go on"), Text("note"))),
        Message("assistant", (ToolCall("own", "g", ""),)),
        Message("tool", (ToolResult("own", (Text("no"),), is_error=True),)),
    )


def test_what_no_model_reads_is_refused_with_its_place() -> None:
    audio = [{"parts": [{"inlineData": {"mimeType": "video/mp4", "data": "AA=="}}]}]
    with pytest.raises(InvalidRequest, match=r"contents\[0\].parts\[0\].inlineData is of type 'video/mp4'"):
        read(contents=audio)
    bad: list[Any] = [[], [{"role": "ghost", "parts": []}], [{"parts": [{}]}]]
    for contents in bad:
        with pytest.raises(InvalidRequest):
            read(contents=contents)


def test_reasoning_returns_from_the_signature_of_the_next_part() -> None:
    reply = collect_reply(answer(thinking(0, "Let me see"), call(1, "c1", "add", SUM)))
    written = json.loads(gemini.write_reply([reply], Request(model="m", reasoning=Reasoning(summary="omitted"))))
    content = written["candidates"][0]["content"]
    assert [[*part] for part in content["parts"]] == [["functionCall", "thoughtSignature"]]
    (message,) = read(contents=[content]).messages
    assert [part.text for part in message.parts if isinstance(part, Thinking)] == ["Let me see"]
    foreign = [{"role": "model", "parts": [{"text": "a", "thoughtSignature": "Zm9yZWlnbg=="}]}]
    assert read(contents=foreign).messages[0].parts == (Text("a"),)


# --- replies and streams ----------------------------------------------------------------------------------------------

LOGPROBS: list[Event] = [BlockStart(0, "text"), BlockDelta(0, "Hi", (token("H", "J"), token("i"))), BlockEnd(0)]
LOST: list[Event] = [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hel"), Failed(Unavailable("the engine\nwas lost"))]
CASES: dict[str, list[Event]] = {
    "text": answer(text(0, "Hello", ' "world"\n')),
    "thinking_and_text": answer(thinking(0, "Let me", " see"), text(1, "Yes", "!")),
    "parallel_tools": answer(
        text(0, "Both:"), call(1, "c1", "add", SUM[:5], SUM[5:]), call(2, "c2", "now"), reason="tool_calls"
    ),
    "length": answer(call(0, "c1", "add", '{"a": 1,', complete=False), reason="max_tokens"),
    "content_filter": answer(text(0, "I"), reason="content_filter"),
    "logprobs": answer(LOGPROBS),
    "error_mid_stream": LOST,
    "empty": answer(),
}


def request_of(name: str, **more: Any) -> Request:
    return replace(STREAMED, logprobs=2 if name == "logprobs" else None, **more)


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    check_golden("gemini", f"stream_{name}.txt", stream(CASES[name], request_of(name)))


@pytest.mark.parametrize("name", [name for name in CASES if name != "error_mid_stream"])
def test_the_reply_matches_its_golden_file(name: str) -> None:
    check_golden("gemini", f"reply_{name}", gemini.write_reply([collect_reply(CASES[name])], request_of(name)))


@pytest.mark.parametrize("name", CASES)
def test_the_array_has_the_chunks_of_the_events(name: str) -> None:
    chunks = [json.loads(event.data) for event in SseParser().feed(stream(CASES[name], request_of(name)))]
    assert json.loads(stream(CASES[name], request_of(name, dialect=""))) == chunks


def test_hidden_thoughts_leave_only_their_signature() -> None:
    hidden = Request(model="m", stream=True, dialect="sse", reasoning=Reasoning(summary="omitted"))
    data = stream(CASES["thinking_and_text"], hidden)
    assert b'"thought":true' not in data
    assert data.count(b"thoughtSignature") == 1


def test_a_keepalive_is_blank() -> None:
    for dialect in ("sse", ""):
        writer = gemini.writer(replace(STREAMED, dialect=dialect), "t")
        assert writer.keepalive().strip() == b""
        assert writer.content_type.startswith(b"text/event-stream" if dialect else b"application/json")


def test_candidates_share_a_stream() -> None:
    writer = gemini.writer(STREAMED, "t")
    data = b"".join(writer.write(event, choice) for event in answer(text(0, "Hi")) for choice in (0, 1))
    chunks = [json.loads(event.data) for event in SseParser().feed(data + writer.end())]
    assert [chunk["candidates"][0]["index"] for chunk in chunks] == [0, 1, 0, 1]
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 8


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (InvalidRequest("no", param="contents", code="bad"), 400, "INVALID_ARGUMENT"),
        (NotFound("none"), 404, "NOT_FOUND"),
        (RateLimited("slow down", retry_after=3), 429, "RESOURCE_EXHAUSTED"),
        (Unavailable("lost", retry_after=2), 503, "UNAVAILABLE"),
        (ContextOverflow(9, 8), 400, "INVALID_ARGUMENT"),
    ],
)
def test_an_error_has_a_status_and_its_name(error: ModelyardError, status: int, name: str) -> None:
    written = gemini.write_error(error, trace="t")
    fields = json.loads(written.body)["error"]
    assert (written.status, fields["code"], fields["status"]) == (status, status, name)


def test_an_overflow_matches_its_golden_file() -> None:
    check_golden("gemini", "overflow", gemini.write_error(ContextOverflow(40_123, 32_768), trace="t").body)


# --- lists, counts and embeddings -------------------------------------------------------------------------------------


def test_models_come_in_pages() -> None:
    cards = [ModelCard(str(at), 1, 4096) for at in range(3)]
    check_golden("gemini", "models", gemini.write_models(cards[:1]))
    first = json.loads(gemini.write_models(cards, "2"))
    assert ([m["name"] for m in first["models"]], first["nextPageToken"]) == (["models/0", "models/1"], "2")
    last = json.loads(gemini.write_models(cards, "2", "2"))
    assert ([m["name"] for m in last["models"]], "nextPageToken" in last) == (["models/2"], False)
    with pytest.raises(InvalidRequest, match="pageSize"):
        gemini.write_models(cards, "many")


def test_tokens_are_counted_of_contents_or_of_a_whole_request() -> None:
    headers = {":path": "/v1beta/models/m:countTokens"}
    whole = {"generateContentRequest": {"contents": HELLO, "systemInstruction": {"parts": [{"text": "Be brief."}]}}}
    assert len(gemini.read_count_request(json.dumps({"contents": HELLO}).encode(), headers).messages) == 1
    assert len(gemini.read_count_request(json.dumps(whole).encode(), headers).messages) == 2


def test_embeddings_are_read_one_by_one_or_as_a_batch() -> None:
    one = {"content": {"parts": [{"text": "a"}, {"text": "b"}]}, "outputDimensionality": 2}
    headers = {":path": "/v1beta/models/m:batchEmbedContents"}
    request = embeddings.read_batch_embed(json.dumps({"requests": [one, one]}).encode(), headers)
    assert (request.model, request.inputs, request.dimensions) == ("m", ("a\nb", "a\nb"), 2)
    assert json.loads(embeddings.write_embeddings([[3.0, 4.0, 5.0]], request)) == {
        "embeddings": [{"values": [0.6, 0.8]}]
    }
    bodies: list[Any] = [{"requests": []}, {"requests": [{"content": {"parts": []}}]}]
    for body in bodies:
        with pytest.raises(InvalidRequest):
            embeddings.read_batch_embed(json.dumps(body).encode(), headers)
