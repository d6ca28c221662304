"""The three chat protocols as clients: request bodies, parsed replies and streams, and the form of errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import httpx

DONE = "[DONE]"


class ServerSentEvent(NamedTuple):
    """`event` is the name in the `event:` line: "" without one, ":" for a comment. `data` is decoded if it is JSON."""

    event: str
    data: Any


def parse_events(text: str) -> list[ServerSentEvent]:
    return list(iter_events([text]))


def iter_events(pieces: Iterable[str]) -> Iterator[ServerSentEvent]:
    """Events as they become complete."""
    rest = ""
    for piece in pieces:
        *blocks, rest = (rest + piece).split("\n\n")
        yield from (_parse_event(block) for block in blocks if block)
    assert rest == "", f"the stream ended within an event: {rest!r}"


def _parse_event(block: str) -> ServerSentEvent:
    event, data = "", ""
    for line in block.split("\n"):
        name, _, value = line.partition(": ")
        if line.startswith(":"):
            return ServerSentEvent(":", line)
        if name == "event":
            event = value
        else:
            assert name == "data", f"neither event nor data: {line!r}"
            data = value
    return ServerSentEvent(event, data if data == DONE else json.loads(data))


def event_names(stream: Iterable[ServerSentEvent]) -> list[str]:
    return [event.event for event in stream]


# --- protocols --------------------------------------------------------------------------------------------------------

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "get_time": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
}


class Usage(NamedTuple):
    prompt: int
    cached: int
    output: int
    reasoning: int


NO_USAGE = Usage(0, 0, 0, 0)


@dataclass
class ParsedReply:
    """A reply independent of the protocol, except for `stop`: the finish reason in the words of the protocol."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    stop: str = ""
    usage: Usage = NO_USAGE


class Messages:
    path = "/v1/messages"

    def body(self, text: str, *, tools: bool = False, limit: int = 200, stop: str = "", **more: Any) -> dict[str, Any]:
        tool_list = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()] if tools else []
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": limit, **more}
        return body | ({"tools": tool_list} if tools else {}) | ({"stop_sequences": [stop]} if stop else {})

    def parse_reply(self, reply: dict[str, Any]) -> ParsedReply:
        parsed = ParsedReply(stop=self._stop(reply), usage=self._usage(reply["usage"]))
        for block in reply["content"]:
            self._add(parsed, block)
        return parsed

    def parse_stream(self, stream: Sequence[ServerSentEvent]) -> ParsedReply:
        blocks: list[dict[str, Any]] = []
        for _, data in stream:
            if data["type"] == "content_block_start":
                blocks.append(dict(data["content_block"]) | {"json": ""})
            elif data["type"] == "content_block_delta":
                self._append(blocks[-1], data["delta"])
            elif data["type"] == "message_delta":
                ended = data
        parsed = ParsedReply(stop=self._stop(ended["delta"]), usage=self._usage(ended["usage"]))
        for block in blocks:
            self._add(parsed, block | ({"input": json.loads(block["json"])} if block["json"] else {}))
        return parsed

    def _append(self, block: dict[str, Any], delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name != "type":
                block["json" if name == "partial_json" else name] += value

    def _add(self, parsed: ParsedReply, block: dict[str, Any]) -> None:
        if block["type"] == "tool_use":
            parsed.calls.append((block["name"], block["input"]))
        else:
            parsed.text += block.get("text", "")
            parsed.thinking += block.get("thinking", "")

    def _stop(self, data: dict[str, Any]) -> str:
        """Both keys are always present."""
        stop_sequence = data["stop_sequence"]
        return str(data["stop_reason"]) + (f" {stop_sequence}" if stop_sequence is not None else "")

    def _usage(self, data: dict[str, Any]) -> Usage:
        cached = data["cache_read_input_tokens"]
        prompt = data["input_tokens"] + cached + data["cache_creation_input_tokens"]
        return Usage(prompt, cached, data["output_tokens"], data["output_tokens_details"]["thinking_tokens"])


class Chat:
    path = "/v1/chat/completions"

    def body(self, text: str, *, tools: bool = False, limit: int = 200, stop: str = "", **more: Any) -> dict[str, Any]:
        functions = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()] if tools else []
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": limit, **more}
        if more.get("stream"):
            body["stream_options"] = {"include_usage": True}
        tool_list = [{"type": "function", "function": function} for function in functions]
        return body | ({"tools": tool_list} if tools else {}) | ({"stop": [stop]} if stop else {})

    def parse_reply(self, reply: dict[str, Any]) -> ParsedReply:
        (choice,) = reply["choices"]
        return self._parse(choice["message"], choice["finish_reason"], reply["usage"])

    def parse_stream(self, stream: Sequence[ServerSentEvent]) -> ParsedReply:
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        *chunks, last, done = [event.data for event in stream]
        assert done == DONE
        for chunk in chunks:
            (choice,) = chunk["choices"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    self._append(message["tool_calls"], value[0])
                elif name != "role":
                    message[name] += value
        return self._parse(message, choice["finish_reason"], last["usage"])

    def _append(self, calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
        if delta["index"] == len(calls):
            calls.append({"function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]

    def _parse(self, message: dict[str, Any], stop: str, usage: dict[str, Any]) -> ParsedReply:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
        return ParsedReply(
            message["content"] or "", message.get("reasoning_content") or "", calls, stop, self._usage(usage)
        )

    def _usage(self, data: dict[str, Any]) -> Usage:
        prompt, output = data["prompt_tokens"], data["completion_tokens"]
        assert data["total_tokens"] == prompt + output
        cached, reasoning = data["prompt_tokens_details"], data["completion_tokens_details"]
        return Usage(prompt, cached["cached_tokens"], output, reasoning["reasoning_tokens"])


class Responses:
    path = "/v1/responses"

    def body(self, text: str, *, tools: bool = False, limit: int = 200, stop: str = "", **more: Any) -> dict[str, Any]:
        body = {"model": "demo", "input": text, "max_output_tokens": limit, **more}
        tool_list = [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()]
        return body | ({"tools": tool_list} if tools else {}) | ({"stop": [stop]} if stop else {})

    def parse_reply(self, reply: dict[str, Any]) -> ParsedReply:
        details = reply["incomplete_details"]
        stop = reply["status"] + (f" {details['reason']}" if details else "")
        parsed = ParsedReply(stop=stop, usage=self._usage(reply["usage"]))
        for item in reply["output"]:
            if item["type"] == "function_call":
                parsed.calls.append((item["name"], json.loads(item["arguments"])))
            elif item["type"] == "reasoning":
                parsed.thinking += "".join(part["text"] for part in item["content"])
            else:
                parsed.text += "".join(part["text"] for part in item["content"])
        return parsed

    def parse_stream(self, stream: Sequence[ServerSentEvent]) -> ParsedReply:
        """Checks that the final response equals its items and deltas."""
        last = stream[-1].data
        items = [data["item"] for event, data in stream if event == "response.output_item.done"]
        assert items == last["response"]["output"]
        parsed = self.parse_reply(last["response"])
        assert parsed.text == self._joined(stream, "response.output_text.delta")
        assert parsed.thinking == self._joined(stream, "response.reasoning_text.delta")
        assert last["type"] == f"response.{last['response']['status']}"
        return parsed

    def _joined(self, stream: Sequence[ServerSentEvent], event: str) -> str:
        return "".join(data["delta"] for name, data in stream if name == event)

    def _usage(self, data: dict[str, Any]) -> Usage:
        prompt, output = data["input_tokens"], data["output_tokens"]
        assert data["total_tokens"] == prompt + output
        cached, reasoning = data["input_tokens_details"], data["output_tokens_details"]
        return Usage(prompt, cached["cached_tokens"], output, reasoning["reasoning_tokens"])


Protocol = Messages | Chat | Responses
MESSAGES, CHAT, RESPONSES = Messages(), Chat(), Responses()
PROTOCOLS: dict[str, Protocol] = {"messages": MESSAGES, "chat": CHAT, "responses": RESPONSES}


# --- valid bodies and the form of errors ------------------------------------------------------------------------------

_HI = [{"role": "user", "content": "hi"}]

VALID_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "demo", "max_tokens": 16, "messages": _HI},
    "/v1/messages/count_tokens": {"model": "demo", "messages": _HI},
    "/v1/chat/completions": {"model": "demo", "messages": _HI},
    "/v1/chat/completions/input_tokens": {"model": "demo", "messages": _HI},
    "/v1/responses": {"model": "demo", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "demo", "input": "hi"},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
    "/v1/embeddings": {"model": "demo", "input": "hi"},
    "/v1/rerank": {"model": "demo", "query": "hi", "documents": ["ho"]},
    "/v1/fim/completions": {"model": "demo", "prompt": "hi", "suffix": "ho"},
    "/infill": {"model": "demo", "input_prefix": "hi", "input_suffix": "ho"},
    "/completion": {"model": "demo", "prompt": "hi", "n_predict": 4},
    "/embedding": {"model": "demo", "content": "hi"},
    "/v1/score": {"model": "demo", "text_1": "hi", "text_2": "ho"},
    "/api/chat": {"model": "demo", "messages": _HI, "stream": False},
    "/api/generate": {"model": "demo", "prompt": "hi", "stream": False},
    "/api/embed": {"model": "demo", "input": "hi"},
    "/v1beta/models/demo:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/demo:streamGenerateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/demo:countTokens": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/demo:embedContent": {"content": {"parts": [{"text": "hi"}]}},
    "/tokenize": {"model": "demo", "content": "hi"},
    "/detokenize": {"model": "demo", "tokens": [1, 2]},
    "/apply-template": {"model": "demo", "messages": _HI},
}


_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "logit_bias": {"5": 1.5}, "stream": False,
    "chat_template_kwargs": {"enable_thinking": True}, "documents": [{"title": "t", "text": "x"}], "priority": "main",
    "dry_sequence_breakers": ["\n"], "lora_adapter": None, "user": "ann", "metadata": {"user_id": "u"},
}  # fmt: skip
_TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}

# Bodies with as many fields as a client can send at once.
FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": VALID_BODIES["/v1/messages"] | _SAMPLING | {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t"},
            ]},
            {"role": "system", "content": "Remember."},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": _SCHEMA, "strict": True}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "stop_sequences": ["STOP"],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    },
    "/v1/chat/completions": VALID_BODIES["/v1/chat/completions"] | _SAMPLING | {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_TOOL_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": _SCHEMA, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
        "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["STOP"], "max_completion_tokens": 9,
        "stream_options": {"include_usage": True}, "parallel_tool_calls": False, "reasoning_effort": "low",
    },
    "/v1/responses": VALID_BODIES["/v1/responses"] | _SAMPLING | {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "sh", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a"}]},
        ],
        "tools": [
            {"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": True},
            {"type": "custom", "name": "sh", "format": {"type": "grammar", "syntax": "lark", "definition": "s: /x/"}},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "inner"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 9, "store": True, "parallel_tool_calls": True, "previous_response_id": None,
    },
    "/v1/completions": VALID_BODIES["/v1/completions"] | _SAMPLING | {
        "prompt": ["one", "two"], "suffix": "x", "echo": True, "n": 1, "best_of": 1, "logprobs": 2, "max_tokens": 9,
        "stop": ["STOP"], "stream_options": {"include_usage": True},
    },
    "/v1/embeddings": {"model": "demo", "input": ["one", "two"], "encoding_format": "base64", "dimensions": 8},
    "/v1/rerank": {
        "model": "demo", "query": "hi", "documents": ["one", {"text": "two"}], "top_n": 1, "return_documents": True,
    },
    "/v1/fim/completions": {
        "model": "demo", "prompt": "one", "suffix": "two", "max_tokens": 9, "stop": ["STOP"], "random_seed": 3,
        "stream": False, "temperature": 0.5,
    },
    "/infill": {
        "model": "demo", "input_prefix": "one", "input_suffix": "two", "input_extra": [{"filename": "a", "text": "b"}],
        "prompt": "x", "n_predict": 9, "stop": ["STOP"], "response_fields": ["content"], "repeat_penalty": 1.1,
    },
    "/completion": {
        "model": "demo", "prompt": "one", "n_predict": 9, "stop": ["STOP"], "response_fields": ["content"],
        "repeat_penalty": 1.1, "n_probs": 2, "return_tokens": True, "logit_bias": [[5, 1.5]], "lora": [],
    },
    "/embedding": {"model": "demo", "content": ["one", "two"]},
    "/v1/score": {"model": "demo", "text_1": ["one"], "text_2": ["two"]},
    "/api/chat": {
        "model": "demo", "stream": False, "keep_alive": "5m", "think": True, "format": _SCHEMA, "logprobs": True,
        "top_logprobs": 2, "options": {"temperature": 0.5, "top_k": 5, "num_predict": 9, "stop": ["STOP"], "seed": 3},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
            ]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": _SCHEMA}}],
    },
    "/api/generate": {
        "model": "demo", "prompt": "hi", "stream": False, "system": "Be brief.", "suffix": "", "raw": False,
        "format": "json", "think": "low", "keep_alive": 60, "options": {"num_predict": 9}, "context": [1, 2],
    },
    "/api/embed": {"model": "demo", "input": ["one", "two"], "truncate": True, "dimensions": 8, "keep_alive": -1},
    "/v1beta/models/demo:generateContent": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Weather?"}]},
            {"role": "model", "parts": [
                {"text": "hm", "thought": True},
                {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Rome"}}, "thoughtSignature": "AA=="},
            ]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"output": "sunny"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "weather", "description": "d", "parameters": _SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
        "generationConfig": {
            "temperature": 0.5, "topP": 0.9, "topK": 5, "maxOutputTokens": 9, "stopSequences": ["STOP"], "seed": 3,
            "candidateCount": 2, "responseMimeType": "application/json", "responseSchema": _SCHEMA,
            "responseLogprobs": True, "logprobs": 2, "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
        },
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    },
    "/v1beta/models/demo:embedContent": {
        "content": {"parts": [{"text": "one"}, {"text": "two"}]}, "outputDimensionality": 8, "taskType": "CLUSTERING",
    },
    "/tokenize": {"model": "demo", "content": "one", "with_pieces": True, "add_special": True},
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
}  # fmt: skip
for _method in ("streamGenerateContent", "countTokens"):
    FULL_BODIES[f"/v1beta/models/demo:{_method}"] = FULL_BODIES["/v1beta/models/demo:generateContent"]
FULL_BODIES["/v1/messages/count_tokens"] = FULL_BODIES["/v1/messages"]
FULL_BODIES["/v1/responses/input_tokens"] = FULL_BODIES["/v1/responses"]
FULL_BODIES["/v1/chat/completions/input_tokens"] = FULL_BODIES["/v1/chat/completions"]
FULL_BODIES["/apply-template"] = FULL_BODIES["/v1/chat/completions"]


def check_error(reply: httpx.Response, path: str, status: int) -> dict[str, Any]:
    """The error object of a reply, after checks of its form; it has `code` and `param` in every protocol."""
    assert reply.status_code == status, reply.text[:500]
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"] == reply.headers["request-id"]
    data = reply.json()
    error = data["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str)
        assert set(data) == {"error"}
        assert error
        code = "invalid_json" if "JSON" in error or "levels deep" in error else None  # the wire has only the sentence
        return {"code": code, "param": None, "message": error}
    assert isinstance(error["message"], str)
    if path.startswith("/v1beta/"):
        assert (error["code"], set(data)) == (400 if status == 405 else status, {"error"})
        info: dict[str, Any] = next((one for one in error.get("details", ()) if "reason" in one), {})
        return {
            "code": info.get("reason", "").lower() or None,
            "param": info.get("metadata", {}).get("field"),
            "message": error["message"],
        }
    assert error["message"]
    assert isinstance(error["type"], str)
    if path.startswith("/v1/messages"):
        assert data["type"] == "error"
        assert data["request_id"] == reply.headers["request-id"]
        return {"code": None, "param": None, **error}
    assert set(data) == {"error"}
    assert {"message", "type", "param", "code"} <= set(error)
    return dict(error)


def send(client: httpx.Client, protocol: Protocol, stream: bool, text: str, **fields: Any) -> ParsedReply:
    reply = client.post(protocol.path, json=protocol.body(text, stream=stream, **fields))
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if not stream:
        assert reply.headers["content-type"] == "application/json"
        return protocol.parse_reply(reply.json())
    assert reply.headers["content-type"].startswith("text/event-stream")
    return protocol.parse_stream(parse_events(reply.text))


# --- Ollama and Gemini: other paths, other streams, the same answers --------------------------------------------------


class Ollama:
    stops: ClassVar = {"end": "stop", "tools": "stop", "limit": "length", "string": "stop"}

    def path(self, stream: bool) -> str:
        return "/api/chat"

    def body(
        self, text: str, *, stream: bool, tools: bool = False, limit: int = 200, stop: str = "", **more: Any
    ) -> dict[str, Any]:
        options = {"num_predict": limit} | ({"stop": [stop]} if stop else {})
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "options": options, "stream": stream}
        functions = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in TOOLS.items()]
        return body | more | ({"tools": functions} if tools else {})

    def parse(self, reply: httpx.Response, stream: bool) -> ParsedReply:
        kind = "application/x-ndjson" if stream else "application/json"
        assert reply.headers["content-type"] == kind
        lines = [json.loads(line) for line in reply.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        parsed, last = ParsedReply(stop=lines[-1]["done_reason"]), lines[-1]
        for message in (line["message"] for line in lines):
            parsed.text += message["content"]
            parsed.thinking += message.get("thinking", "")
            parsed.calls += [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        parsed.usage = Usage(last["prompt_eval_count"], 0, last["eval_count"], 0)
        assert last["total_duration"] >= last["eval_duration"] >= 0
        return parsed


class Gemini:
    stops: ClassVar = {"end": "STOP", "tools": "STOP", "limit": "MAX_TOKENS", "string": "STOP"}

    def path(self, stream: bool) -> str:
        return f"/v1beta/models/demo:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"

    def body(
        self, text: str, *, stream: bool, tools: bool = False, limit: int = 200, stop: str = "", **more: Any
    ) -> dict[str, Any]:
        del stream  # the path says it
        settings = {"maxOutputTokens": limit, "thinkingConfig": {"includeThoughts": True}}
        settings |= {"stopSequences": [stop]} if stop else {}
        body = {"contents": [{"role": "user", "parts": [{"text": text}]}], "generationConfig": settings} | more
        functions = [{"name": name, "parametersJsonSchema": schema} for name, schema in TOOLS.items()]
        return body | ({"tools": [{"functionDeclarations": functions}]} if tools else {})

    def parse(self, reply: httpx.Response, stream: bool) -> ParsedReply:
        assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
        chunks = [event.data for event in parse_events(reply.text)] if stream else [reply.json()]
        parsed = ParsedReply()
        for candidate in (chunk["candidates"][0] for chunk in chunks):
            for part in candidate["content"]["parts"]:
                if call := part.get("functionCall"):
                    parsed.calls.append((call["name"], call["args"]))
                elif part.get("thought"):
                    parsed.thinking += part["text"]
                else:
                    parsed.text += part["text"]
        parsed.stop, usage = candidate["finishReason"], chunks[-1]["usageMetadata"]
        thoughts = usage.get("thoughtsTokenCount", 0)
        output = usage["candidatesTokenCount"] + thoughts
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + output
        parsed.usage = Usage(usage["promptTokenCount"], usage.get("cachedContentTokenCount", 0), output, thoughts)
        return parsed


OtherWire = Ollama | Gemini
OTHER_WIRES: dict[str, OtherWire] = {"ollama": Ollama(), "gemini": Gemini()}
