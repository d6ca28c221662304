"""Ollama's chat and generate: requests, replies, lines of a stream, and the client role."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    Timings,
    Usage,
    collect_reply,
)
from modelyard.core.protocol import EventWriter
from modelyard.core.request import (
    Image,
    Infill,
    Message,
    Reasoning,
    Request,
    Text,
    ToolCall,
    ToolResult,
)
from modelyard.protocols import ollama
from modelyard.protocols.ollama import generate
from tests.protocols.event_streams import call, text, thinking, token
from tests.protocols.golden import check_golden

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TIMES = Timings(queue=0.5, tokenize=0.25, prefill=0.125, decode=2.0, total=3.0)
USAGE = Usage(9, 4, 6, 2)
STARTED = Started("abc123", "tiny", 1_700_000_000, Usage(9, 4))
SUM = '{"a": 1.0, "b": 2}'
REQUEST = Request(model="tiny", stream=True, messages=(Message("user", (Text("Hello"),)),))


def read(**fields: Any) -> Request:
    return ollama.read_request(msgspec.json.encode({"model": "m", "messages": HELLO} | fields), {})


def prompt(**fields: Any) -> Request:
    return generate.read_request(msgspec.json.encode({"model": "m", "prompt": "Hello"} | fields), {})


def answer(*blocks: list[Event], reason: StopReason = "end") -> list[Event]:
    return [STARTED, *(event for block in blocks for event in block), Finished(reason, USAGE, timings=TIMES)]


def stream(protocol: Any, written: list[Event], request: Request = REQUEST) -> bytes:
    writer: EventWriter = protocol.writer(request, "trace")
    return b"".join(writer.write(event) for event in written) + writer.end()


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [msgspec.json.decode(line) for line in data[:-1].split(b"\n")]


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_reply_is_streamed_unless_the_client_forbids_it() -> None:
    assert read().stream
    assert not read(stream=False).stream


def test_options_are_sampling_and_the_limit() -> None:
    request = read(
        options={
            "temperature": 0, "top_k": 5, "repeat_penalty": 1.5, "num_predict": 7, "stop": ["X"], "seed": -1,
            "num_gpu": 9, "tfs_z": 1,
        }
    )  # fmt: skip
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.repetition_penalty) == (0, 5, 1.5)
    assert (request.max_tokens, request.stop, request.sampling.seed) == (7, ("X",), None)
    assert read(options={"num_predict": 7.0}).max_tokens == 7
    with pytest.raises(InvalidRequest, match=r"options.top_k must be a whole number"):
        read(options={"top_k": "many"})
    assert [read(options={"num_predict": limit}).max_tokens for limit in (-2, -1, 0)] == [None] * 3


def test_the_window_belongs_to_the_configuration() -> None:
    (warning,) = read(options={"num_ctx": 2048}).warnings
    assert warning.startswith("field_ignored:options.num_ctx")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(300, 300), (0, 0), ("0", 0), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (-1, math.inf), ("-1m", math.inf)],
)
def test_keep_alive_is_a_number_or_a_duration(value: Any, seconds: float) -> None:
    assert read(keep_alive=value).keep_alive == seconds


@pytest.mark.parametrize("value", ["soon", "5 minutes", "m", "-"])
def test_what_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive") as raised:
        read(keep_alive=value)
    assert raised.value.param == "keep_alive"


@pytest.mark.parametrize(
    ("think", "reasoning"),
    [
        (None, Reasoning()),
        (True, Reasoning(enabled=True)),
        (False, Reasoning(enabled=False)),
        ("high", Reasoning(enabled=True, effort="high")),
    ],
)
def test_think_is_a_switch_or_an_effort(think: Any, reasoning: Reasoning) -> None:
    assert read(think=think).reasoning == reasoning


def test_a_format_is_a_word_or_a_schema_with_its_own_text() -> None:
    assert [read(format=each).constraint for each in (None, "")] == [None, None]
    constraint = read(format="json").constraint
    assert constraint is not None
    assert constraint.kind == "json_object"
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "format": {"type": "number", "minimum": 1.0}}'
    )
    constraint = ollama.read_request(body, {}).constraint
    assert constraint is not None
    assert constraint.text == '{"type": "number", "minimum": 1.0}'
    with pytest.raises(InvalidRequest, match="format must be"):
        read(format="yaml")


def test_images_get_a_type_by_their_first_characters() -> None:
    message = {"role": "user", "content": "see", "images": ["iVBORw0", "/9j/4AA", "data:image/gif;base64,R0"]}
    (read_message,) = read(messages=[message]).messages
    urls = [part.url for part in read_message.parts if isinstance(part, Image)]
    assert urls == ["data:image/png;base64,iVBORw0", "data:image/jpeg;base64,/9j/4AA", "data:image/gif;base64,R0"]


def test_results_find_their_calls_by_id_by_name_and_by_order() -> None:
    def calls(*names: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in names]}

    messages = read(
        messages=[
            *HELLO,
            calls("a", "b"),
            {"role": "tool", "tool_name": "b", "content": "of b"},
            {"role": "tool", "content": "of a"},
            {"role": "assistant", "tool_calls": [{"id": "own", "function": {"name": "a", "arguments": {"x": 1.0}}}]},
            {"role": "tool", "tool_call_id": "own", "content": "of own"},
        ]
    ).messages
    results = [part for message in messages for part in message.parts if isinstance(part, ToolResult)]
    assert [(result.call_id, result.content) for result in results] == [
        ("call_2", (Text("of b"),)),
        ("call_1", (Text("of a"),)),
        ("own", (Text("of own"),)),
    ]
    (own,) = messages[3].parts
    assert own == ToolCall("own", "a", '{"x":1.0}')


def test_no_messages_load_or_unload_the_model() -> None:
    assert read(messages=[]).load_only
    assert prompt(prompt="").load_only
    loaded = Reply(STARTED, (), Finished("end", Usage()))
    reason = [
        msgspec.json.decode(ollama.write_reply([loaded], Request(model="m", load_only=True, keep_alive=seconds)))
        for seconds in (None, 0.0)
    ]
    assert [each["done_reason"] for each in reason] == ["load", "unload"]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role: unknown role 'ghost'"):
        read(messages=[{"role": "ghost", "content": "boo"}])


# --- generate ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_message_a_bare_text_or_the_text_before_a_gap() -> None:
    assert prompt(system="Be brief.").messages == (
        Message("system", (Text("Be brief."),)),
        Message("user", (Text("Hello"),)),
    )
    bare = prompt(raw=True)
    assert (bare.messages, bare.prompts) == ((), ("Hello",))
    assert prompt(suffix="end").infill == Infill("end")
    with pytest.raises(InvalidRequest, match="images belong to a message"):
        prompt(raw=True, images=["iVBOR"])


def test_a_context_continues_the_conversation() -> None:
    first = prompt(system="Be brief.")
    reply = collect_reply(answer(text(0, "Hi!")))
    context = msgspec.json.decode(generate.write_reply([reply], first))["context"]
    assert all(isinstance(number, int) for number in context)
    second = prompt(prompt="And?", context=context)
    assert [(m.role, *m.parts) for m in second.messages] == [
        ("system", Text("Be brief.")),
        ("user", Text("Hello")),
        ("assistant", Text("Hi!")),
        ("user", Text("And?")),
    ]
    assert lines(stream(generate, answer(text(0, "H", "i!")), first))[-1]["context"] == context


def test_a_foreign_context_is_ignored_and_a_damaged_one_refused() -> None:
    foreign = prompt(context=[1, 2, 3])
    assert len(foreign.messages) == 1
    assert foreign.warnings[0].startswith("field_ignored:context")
    context = msgspec.json.decode(generate.write_reply([collect_reply(answer(text(0, "Hi")))], prompt()))["context"]
    for damaged in ([*context[:2], 5, 5], [*context[:4], 999]):
        with pytest.raises(InvalidRequest, match="context is damaged"):
            prompt(context=damaged)


def test_a_bare_prompt_gets_no_context() -> None:
    assert "context" not in msgspec.json.decode(
        generate.write_reply([collect_reply(answer(text(0, "Hi")))], prompt(raw=True))
    )


# --- replies and streams ----------------------------------------------------------------------------------------------

LOGPROBS: list[Event] = [BlockStart(0, "text"), BlockDelta(0, "Hi", (token("H", "J"), token("i"))), BlockEnd(0)]
LOST: list[Event] = [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hel"), Failed(Unavailable("the engine was lost"))]
CASES: dict[str, list[Event]] = {
    "text": answer(text(0, "Hello", ' "world"\n')),
    "thinking_and_text": answer(thinking(0, "Let me", " see"), text(1, "Yes")),
    "parallel_tools": answer(
        text(0, "Both:"), call(1, "c1", "add", SUM[:5], SUM[5:]), call(2, "c2", "now"), reason="tool_calls"
    ),
    "length": answer(call(0, "c1", "add", '{"a": 1,', complete=False), reason="max_tokens"),
    "logprobs": answer(LOGPROBS),
    "error_mid_stream": LOST,
    "empty": answer(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    request = replace(REQUEST, logprobs=2) if name == "logprobs" else REQUEST
    check_golden("ollama", f"stream_{name}.txt", stream(ollama, CASES[name], request))


@pytest.mark.parametrize("name", [name for name in CASES if name != "error_mid_stream"])
def test_the_reply_matches_its_golden_file(name: str) -> None:
    request = replace(REQUEST, logprobs=2) if name == "logprobs" else REQUEST
    check_golden("ollama", f"reply_{name}", ollama.write_reply([collect_reply(CASES[name])], request))


@pytest.mark.parametrize("name", ["text", "thinking_and_text", "logprobs", "error_mid_stream"])
def test_the_stream_of_generate_matches_its_golden_file(name: str) -> None:
    check_golden("ollama_generate", f"stream_{name}.txt", stream(generate, CASES[name], prompt(raw=True)))


def test_a_keepalive_is_a_line_without_text_before_and_after_the_start() -> None:
    for protocol in (ollama, generate):
        writer: Any = protocol.writer(REQUEST, "trace")
        before = msgspec.json.decode(writer.keepalive())
        writer.write(STARTED)
        after = msgspec.json.decode(writer.keepalive())
        assert (before["done"], after["done"]) == (False, False)
        assert before.get("message", {}).get("content", before.get("response")) == ""
        assert after["created_at"] == "2023-11-14T22:13:20.000000Z"


def test_a_stream_without_an_end_is_an_error() -> None:
    assert "error" in lines(stream(ollama, answer(text(0, "Hi"))[:-1]))[-1]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("no"), 400), (NotFound("none"), 404), (Unavailable("lost"), 503), (ContextOverflow(9, 8), 400)],
)
def test_an_error_is_one_sentence_with_a_status(error: ModelyardError, status: int) -> None:
    written = ollama.write_error(error, trace="t")
    assert (written.status, [*msgspec.json.decode(written.body)]) == (status, ["error"])


def test_the_edges_clock_is_the_time_of_every_line() -> None:
    writer, now = ollama.writer(REQUEST, "t"), iter((1_700_000_000.25, 1_700_000_000.999_999, 1_700_000_001.0))
    writer.clock = lambda: next(now)
    lines = [writer.keepalive(), *(writer.write(event) for event in answer(text(0, "Hi")))]
    times = [msgspec.json.decode(line)["created_at"] for line in lines if line]
    assert times == ["2023-11-14T22:13:20.250000Z", "2023-11-14T22:13:20.999999Z", "2023-11-14T22:13:21.000000Z"]
