"""Every endpoint of a running server as a target: requests from its OpenAPI document, checks of each reply.

No reply is a 5xx, none takes longer than the deadline, every error is in the shape of its protocol, every stream ends
as its protocol says, and the log has no traceback.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

import modelyard
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Request
from modelyard.protocols import anthropic_messages, openai_batches, openai_chat, openai_responses
from tests import strategies
from tests.e2e.protocols import DONE, FULL_BODIES, VALID_BODIES, ServerSentEvent, check_error, parse_events
from tests.fuzz.explore import DEADLINE_S, Finding, Target
from tests.fuzz.values import Json, Values, code_words, damaged, shrunk

_PACKAGE = Path(modelyard.__file__).parent
_READERS = [*(_PACKAGE / "protocols").rglob("request.py"), *(_PACKAGE / "protocols").glob("openai_*.py")]
_READERS += [
    _PACKAGE / "protocols/pool_responses.py",
    _PACKAGE / "protocols/common/extensions.py",
    _PACKAGE / "protocols/common/openai_fields.py",
]
_EDGE = [*(_PACKAGE / "http").rglob("*.py"), *(_PACKAGE / "gateway").glob("*.py")]
_WRITERS: dict[str, Callable[[Request], bytes]] = {
    "/v1/messages": anthropic_messages.write_request,
    "/v1/messages/count_tokens": anthropic_messages.write_request,
    "/v1/chat/completions": openai_chat.write_request,
    "/apply-template": openai_chat.write_request,
    "/api/chat": lambda request: as_ollama(request),
    "/v1beta/models/{id}:generateContent": lambda request: as_gemini(request),
    "/v1beta/models/{id}:streamGenerateContent": lambda request: as_gemini(request),
    "/v1/responses": openai_responses.write_request,
    "/v1/responses/input_tokens": openai_responses.write_request,
}
_ADMIN_BODIES: dict[str, Json] = {  # the schema says no more than «an object»
    "/v1/admin/models/{name}/load": {"overrides": {"n_ctx": 512}},
    "/v1/admin/models/{name}/estimate": {"n_ctx": 512},
    "/v1/admin/models/{name}/replicas": {"replicas": 1},
    "/v1/admin/history": {"texts": True},
}
_POOL_BODY: Json = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "instructions": "Be brief.",
    "thinking": "default",
    "decoding": {"max_tokens": 9, "temperature": 0.5, "stop": ["x"]},
}
_LIBRARY = ("/api/pull", "/api/copy", "/api/create", "/api/delete")  # they change the library of the user
_OPEN_ENDED = ("/v1/admin/events",)  # a stream without an end: the first event is enough
_ARRAYS = ("/embedding", "/slots", "/lora-adapters", ":streamGenerateContent")  # of llama-server, and Google's streams
_OMITTED = ("content-length", "content-encoding", "transfer-encoding", "connection", "host", "upgrade", "expect")
_SLOW_SHARE = 0.15
_MAX_REMEMBERED, _MAX_ACCEPTED = 4000, 400  # bytes of a body, bodies of a path
_ENDS = {"message_stop", "error", "response.completed", "response.incomplete", "response.failed"}


class HttpCall(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None

    def shrunk(self, still_fails: Callable[[HttpCall], bool]) -> HttpCall:
        try:
            body = None if self.body is None else json.loads(self.body)
        except ValueError:
            return self
        parts = {"headers": self.headers, "body": body}

        def call(parts: Json) -> HttpCall:
            data = None if parts.get("body") is None else json.dumps(parts["body"]).encode()
            return self._replace(headers=parts.get("headers", {}), body=data)

        return call(shrunk(parts, lambda smaller: still_fails(call(smaller))))

    def __repr__(self) -> str:
        body = "" if self.body is None else self.body.decode("utf-8", "backslashreplace")
        return f"{self.method} {self.path} {self.headers or ''} {body}"


class HttpTargets:
    """`read_log` returns what the server has logged since the last call. `models` are names that it serves; `slow` is
    one whose answers must be kept short, or they would look like hangs. `library`: the endpoints that change the
    library are targets too. `bounds` says what the server has exceeded since the last call: time on its event loop,
    memory, open files."""

    def __init__(
        self,
        client: httpx.Client,
        read_log: Callable[[], str],
        models: list[str],
        slow: str = "",
        *,
        library: bool = False,
        bounds: Callable[[], str] = lambda: "",
    ) -> None:
        self._client, self._read_log, self._models, self._slow, self._library = client, read_log, models, slow, library
        self._bounds = bounds
        self._document: dict[str, Any] = client.get("/openapi.json").json()
        components = self._document["components"]["schemas"]
        self._values = Values([*code_words(*_READERS), *models], components)
        admin = [*code_words(_PACKAGE / "http/admin/routes.py"), *_override_names(client), *models]
        self._admin_values = Values(admin, components)
        names = {
            word for word in code_words(*_EDGE) if word.startswith(("x-m", "x-s", "anthropic-")) or word == "session_id"
        }
        self._header_names = sorted(names - set(_OMITTED))
        self._accepted: dict[str, list[Json]] = {path: [body] for path, body in _ADMIN_BODIES.items()}
        self._has_valid: set[str] = set()
        self._ids: deque[str] = deque(maxlen=20)  # of stored responses
        self._accepted |= {
            path.replace("/demo:", "/{id}:"): [body, FULL_BODIES[path]] for path, body in VALID_BODIES.items()
        }
        self._accepted["/v1/responses"].append(_POOL_BODY)

    def targets(self, *, admin: bool) -> list[Target[HttpCall]]:
        """The endpoints of the admin API, which change the server, or all others."""
        return [
            Target(
                f"{method.upper()} {path}",
                partial(self._call, method.upper(), path, operation),
                self.check,
                lambda call, still_fails: call.shrunk(still_fails),
            )
            for path, operations in self._document["paths"].items()
            for method, operation in operations.items()
            if path.startswith("/v1/admin") == admin and (self._library or path not in _LIBRARY)
        ]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, operation: Mapping[str, Any], rng: Random) -> HttpCall:
        values = self._admin_values if path.startswith("/v1/admin") else self._values
        url, query = path, []
        for one in operation.get("parameters", ()):
            value = values.of(one["schema"], rng) if rng.random() < 0.8 else values.any(rng)
            if one["schema"].get("type") == "string" and rng.random() < 0.5:
                value = rng.choice([*self._models, *(self._ids if one["name"] == "id" else ())])
            if one["in"] == "path":
                url = url.replace(f"{{{one['name']}}}", quote(str(value)[:500], safe="") or "-")
            elif rng.random() < 0.5:
                query.append(f"{one['name']}={quote(_as_text(value)[:500])}")
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        body = None if content is None else self._body(path, content["schema"], values, rng)
        headers = {} if body is None or rng.random() < 0.05 else {"content-type": "application/json"}
        headers |= self._headers(rng) if rng.random() < 0.2 else {}
        return HttpCall(method, f"{url}?{'&'.join(query)}" if query else url, headers, body)

    def _headers(self, rng: Random) -> dict[str, str]:
        names = rng.sample(self._header_names, min(2, len(self._header_names)))
        return {name: "".join(chr(rng.randrange(0x21, 0x7F)) for _ in range(rng.randrange(20))) for name in names}

    def _body(self, path: str, schema: Mapping[str, Any], values: Values, rng: Random) -> bytes:
        """Bodies that were accepted before with a few changes, bodies by the schema, and broken ones."""
        accepted = self._accepted.get(path) or self._accepted.setdefault(path, [])
        if path in _WRITERS and path not in self._has_valid:
            self._has_valid.add(path)
            accepted += valid_bodies(_WRITERS[path])
        if accepted and rng.random() < 0.6:
            body = values.mutated(rng.choice(accepted), rng, rng.randrange(4))
        else:
            body = values.of(schema, rng)
        if isinstance(body, dict) and "/admin/" not in path and rng.random() < 0.95:
            body["model"] = rng.choice(self._models)  # else nothing behind the router would be reached
            if self._slow and rng.random() < _SLOW_SHARE:
                body |= {"model": self._slow, "max_tokens": 4, "max_output_tokens": 4} | (
                    {"n": 2} if "n" in body else {}
                )
                body.pop("max_completion_tokens", None)
                if path.startswith("/api/"):
                    body["options"] = {"num_predict": 4}
            if self._slow and path.startswith("/v1beta/"):  # its path may name the slow model
                body["generationConfig"] = {"maxOutputTokens": 4}
        data = json.dumps(body).encode()
        is_slow = isinstance(body, dict) and body.get("model") == self._slow
        return damaged(data, rng) if rng.random() < 0.1 and not is_slow else data

    def _remember(self, path: str, body: bytes | None) -> None:
        """What was accepted leads further in than what was not."""
        accepted = self._accepted.setdefault(path, [])
        if body and len(body) < _MAX_REMEMBERED and len(accepted) < _MAX_ACCEPTED:
            with suppress(ValueError):  # the admin API takes a body of no JSON for no body
                accepted.append(json.loads(body))

    # --- replies ------------------------------------------------------------------------------------------------------

    def check(self, call: HttpCall) -> str:
        path = _template(call.path, self._document["paths"])
        where = f"{call.method} {path}"
        try:
            status = self._check(call)
        except Finding as finding:
            raise Finding(finding.kind, where, finding.detail, call) from None
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise Finding("wrong shape", where, repr(error).split("\n")[0][:300], call) from None
        logged = self._read_log()
        if "Traceback" in logged:
            raise Finding("traceback", where, _last_line(logged), f"{call!r}\n{logged[-3000:]}")
        if exceeded := self._bounds():
            raise Finding("bounds", where, exceeded, call)
        if status == "200":
            self._remember(path, call.body)
        return status

    def _check(self, call: HttpCall) -> str:
        began, text = time.monotonic(), b""
        try:
            request = self._client.build_request(call.method, call.path, headers=call.headers, content=call.body)
            with self._client.stream(call.method, request.url, headers=request.headers, content=call.body) as reply:
                for chunk in reply.iter_bytes():
                    text += chunk
                    if call.path.startswith(_OPEN_ENDED):
                        return str(reply.status_code)
                    if time.monotonic() - began > DEADLINE_S:
                        raise Finding("hang", "", f"no end after {DEADLINE_S:g} s")
        except httpx.TimeoutException:
            raise Finding("hang", "", f"no reply after {DEADLINE_S:g} s") from None
        except httpx.HTTPError as error:
            raise Finding("cut", "", f"{type(error).__name__}: {error}") from None
        whole = httpx.Response(reply.status_code, headers=reply.headers, content=text)
        if whole.status_code >= 500 and not _hub_is_away(call, whole):
            raise Finding("5xx", "", f"{whole.status_code} {whole.text[:300]}")
        if whole.status_code >= 400:
            check_error(whole, _shape(call), whole.status_code)
        elif not whole.content:
            assert call.path.startswith(_LIBRARY), "an empty reply"
        elif whole.headers["content-type"].startswith("application/x-ndjson"):
            last = json.loads(whole.text.splitlines()[-1])
            assert last.get("done") or "error" in last or last.get("status") == "success", "a stream without an end"
        elif whole.headers["content-type"].startswith("text/event-stream"):
            _check_stream(parse_events(whole.text))
        elif whole.headers["content-type"].startswith("application/json"):
            data = whole.json()
            if call.path.partition("?")[0].endswith(_ARRAYS):
                assert isinstance(data, list), "a reply that is not an array"
                return str(whole.status_code)
            assert isinstance(data, list if _is_tei(call) else dict), "a reply that is not an object"
            if call.path.startswith("/v1/responses") and isinstance(id := data.get("id"), str):
                self._ids.append(id)
        return str(whole.status_code)


def valid_bodies(write: Callable[[Request], bytes]) -> list[Json]:
    """Bodies of whole requests, as a client of the protocol would send them."""
    found: list[Json] = []
    for request in _core_requests():
        with suppress(InvalidRequest):  # a temperature of more than 1 for Anthropic
            found.append(json.loads(write(request)))
    return found


def as_ollama(request: Request) -> bytes:
    """Chat Completions in Ollama's words: arguments are objects, images base64, sampling is options."""
    chat = json.loads(openai_chat.write_request(request))
    messages = []
    for message in chat["messages"]:
        parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"] or ""}]
        images = [part["image_url"]["url"].partition(";base64,")[2] for part in parts if "image_url" in part]
        calls = [call["function"] for call in message.get("tool_calls", ()) if "function" in call]
        functions = [{"name": call["name"], "arguments": _object(call["arguments"])} for call in calls]
        text = "".join(part.get("text", "") for part in parts)
        messages.append(
            {"role": message["role"], "content": text, "images": images}
            | ({"tool_calls": [{"function": function} for function in functions]} if functions else {})
        )
    tools = [tool for tool in chat.get("tools", ()) if tool["type"] == "function"]
    options = {name: chat[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop") if name in chat}
    body = {"model": chat["model"], "messages": messages, "tools": tools, "options": options}
    schema = chat.get("response_format", {}).get("json_schema", {}).get("schema")
    more = {"format": schema, "think": request.reasoning.enabled, "keep_alive": request.keep_alive}
    return msgspec.json.encode(body | {name: value for name, value in more.items() if value is not None})


def as_gemini(request: Request) -> bytes:
    """The same in Google's."""
    chat = json.loads(as_ollama(request))
    contents = []
    for message in chat["messages"]:
        parts = [{"text": message["content"]}] if message["content"] else []
        parts += [{"inlineData": {"mimeType": "image/png", "data": data}} for data in message["images"]]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        parts += [{"functionCall": {"name": call["name"], "args": call["arguments"]}} for call in calls]
        role = "model" if message["role"] == "assistant" else "user"
        contents += [{"role": role, "parts": parts}] if parts else []
    functions = [tool["function"] | {"parameters": {"type": "OBJECT"}} for tool in chat["tools"]]
    config = {"temperature": 0.5, "topP": 0.9, "stopSequences": ["x"], "thinkingConfig": {"thinkingBudget": 5}}
    if chat.get("format"):
        config |= {"responseMimeType": "application/json", "responseJsonSchema": chat["format"]}
    body = {"contents": contents, "generationConfig": config, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    return msgspec.json.encode(body | ({"tools": [{"functionDeclarations": functions}]} if functions else {}))


def _object(arguments: str) -> Json:
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@cache
def _core_requests(count: int = 25) -> list[Request]:
    found: list[Request] = []

    @seed(17)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(strategies.requests(logprobs=True, custom=True, namespaces=True, server=True))
    def draw(request: Request) -> None:
        found.append(request)

    draw()
    return found


def _override_names(client: httpx.Client) -> Iterator[str]:
    """The fields that a load may set, as the admin API lists them."""
    described = client.get("/v1/admin/models").json()["data"]
    return chain.from_iterable(one["load_constraints"]["overrides"] for one in described)


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_tei(call: HttpCall) -> bool:
    """Whether the reply is text-embeddings-inference's list."""
    if "rerank" not in call.path:
        return False
    body = json.loads((call.body or b"{}").decode(errors="replace"))  # fields that nobody reads may be no UTF-8
    return body.get("documents") is None and body.get("texts") is not None


def _shape(call: HttpCall) -> str:
    """The path whose protocol the error must be in; a header chooses for paths that belong to no protocol."""
    path = call.path.partition("?")[0]
    if path.startswith("/api/v0/"):  # LM Studio's are OpenAI's
        path = path.replace("/api/v0/", "/v1/", 1)
    if path.startswith(("/api/", "/v1beta/", "/upload/")):
        return path.removeprefix("/upload")
    has_protocol = path in VALID_BODIES or path in openai_batches.PATHS or path.startswith("/v1/responses")
    if not has_protocol and "anthropic-version" in call.headers:
        return "/v1/messages"
    return path


def _check_stream(events: list[ServerSentEvent]) -> None:
    events = [event for event in events if event.event != ":"]
    assert events, "an empty stream"
    last = events[-1]
    data = last.data if isinstance(last.data, dict) else {}
    is_end = (
        "finishReason" in (data.get("candidates") or [{}])[0]
        or last.data == DONE
        or (last.event or data.get("type")) in _ENDS
        or "error" in data
    )
    assert is_end, f"a stream that ends with {str(last)[:200]}"


def _template(path: str, known: Mapping[str, Any]) -> str:
    """The path with its parameters in braces again."""
    steps = path.partition("?")[0].split("/")
    for one in known:
        pattern = one.split("/")
        if len(pattern) == len(steps) and all(map(_fits, pattern, steps)):
            return str(one)
    return path[:60]


def _fits(pattern: str, step: str) -> bool:
    """A parameter may have a method behind it: `{id}:countTokens`."""
    return step.endswith(pattern.partition("}")[2]) if pattern.startswith("{") else pattern == step


def _last_line(log: str) -> str:
    lines = [line for line in log.replace("\\n", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines)[-1].strip()[:200]


def _hub_is_away(call: HttpCall, reply: httpx.Response) -> bool:
    """Without a network the hub's endpoints say so, with a status that a client may retry."""
    is_away = reply.status_code in (503, 529) and "fetch_failed" in reply.text  # 529 in Anthropic's protocol
    return call.path.startswith("/v1/admin/hub") and is_away
