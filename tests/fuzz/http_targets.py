"""Every endpoint of a running server as a target: requests from its OpenAPI document, checks of each reply.

No reply is a 5xx, none takes longer than the deadline, every error is in the shape of its protocol, every stream ends
as its protocol says, and the log has no traceback.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import modelyard
from modelyard.core.protocol import WireProtocol
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from tests import strategies
from tests.e2e.protocols import DONE, ServerSentEvent, check_error, parse_events
from tests.fuzz.explore import DEADLINE_S, Finding, Target
from tests.fuzz.values import Json, Values, broken_bytes, code_words

_PACKAGE = Path(modelyard.__file__).parent
_READERS = [*(_PACKAGE / "protocols").rglob("request.py"), *(_PACKAGE / "protocols").glob("openai_*.py")]
_READERS += [_PACKAGE / "protocols/common/extensions.py", _PACKAGE / "protocols/common/openai_fields.py"]
_EDGE = [*(_PACKAGE / "http").rglob("*.py"), *(_PACKAGE / "gateway").glob("*.py")]
_WRITERS: dict[str, WireProtocol] = {
    "/v1/messages": anthropic_messages,
    "/v1/messages/count_tokens": anthropic_messages,
    "/v1/chat/completions": openai_chat,
    "/apply-template": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/responses/input_tokens": openai_responses,
}  # type: ignore[assignment]
_OPEN_ENDED = ("/v1/admin/events",)  # a stream without an end: the first event is enough
_OMITTED = ("content-length", "content-encoding", "transfer-encoding", "connection", "host", "upgrade", "expect")
_ENDS = {"message_stop", "error", "response.completed", "response.incomplete", "response.failed"}


class HttpCall(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None

    def __repr__(self) -> str:
        body = "" if self.body is None else self.body.decode("utf-8", "backslashreplace")
        return f"{self.method} {self.path} {self.headers or ''} {body}"


class HttpTargets:
    """`read_log` returns what the server has logged since the last call. `admin`: its endpoints too, which change the
    server, or its endpoints alone."""

    def __init__(self, client: httpx.Client, read_log: Callable[[], str], models: list[str]) -> None:
        self._client, self._read_log, self._models = client, read_log, models
        self._document: dict[str, Any] = client.get("/openapi.json").json()
        components = self._document["components"]["schemas"]
        overrides = _override_names(client)
        self._values = Values([*code_words(*_READERS), *models], components)
        self._admin_values = Values([*code_words(_PACKAGE / "http/admin/routes.py"), *overrides, *models], components)
        names = {word for word in code_words(*_EDGE) if word.startswith(("x-", "anthropic-")) or word == "session_id"}
        self._headers = st.dictionaries(
            st.sampled_from(sorted(names - set(_OMITTED))), st.text(_PRINTABLE, max_size=20), max_size=2
        )

    def targets(self, *, admin: bool) -> list[Target]:
        return [
            Target(f"{method.upper()} {path}", self._calls(method.upper(), path, operation), self.check)
            for path, operations in self._document["paths"].items()
            for method, operation in operations.items()
            if path.startswith("/v1/admin") == admin
        ]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _calls(self, method: str, path: str, operation: Mapping[str, Any]) -> SearchStrategy[HttpCall]:
        values = self._admin_values if path.startswith("/v1/admin") else self._values
        fields = {one["name"]: values.of(one["schema"]) for one in operation.get("parameters", ())}
        names = st.sampled_from(self._models) | values.strings
        inside = {name: names for name in fields if f"{{{name}}}" in path}
        query = {name: strategy | values.any for name, strategy in fields.items() if name not in inside}
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        bodies = st.none() if content is None else self._bodies(path, content["schema"], values)

        def build(
            inside: Mapping[str, Json], query: Mapping[str, Json], headers: dict[str, str], body: bytes | None
        ) -> HttpCall:
            url = path
            for name, value in inside.items():
                url = url.replace(f"{{{name}}}", quote(value[:500], safe="") or "-")
            asked = "&".join(f"{name}={quote(_as_text(value)[:500])}" for name, value in query.items())
            return HttpCall(method, f"{url}?{asked}" if asked else url, headers, body)

        return st.builds(
            build,
            st.fixed_dictionaries(inside),
            st.fixed_dictionaries({}, optional=query),
            self._headers if method == "POST" else st.just({}),
            bodies,
        )

    def _bodies(self, path: str, schema: Mapping[str, Any], values: Values) -> SearchStrategy[bytes | None]:
        """Half of them are valid requests in which little is changed, the others follow the schema or nothing."""
        built = values.mutated(values.of(schema), most=1)
        if (protocol := _WRITERS.get(path)) is not None:
            valid = _requests().map(lambda request: json.loads(protocol.write_request(request)))
            built = built | values.mutated(valid)
        aimed = st.builds(_aim, built, st.sampled_from([*self._models, None])) if "/admin/" not in path else built
        encoded = aimed.map(lambda body: json.dumps(body).encode())
        return encoded | encoded | encoded | broken_bytes(encoded)

    # --- replies ------------------------------------------------------------------------------------------------------

    def check(self, call: HttpCall) -> str:
        where = f"{call.method} {_template(call.path, self._document['paths'])}"
        try:
            status = self._check(call)
        except Finding as finding:
            raise Finding(finding.kind, where, finding.detail, call) from None
        except AssertionError as error:
            raise Finding("wrong shape", where, str(error).split("\n")[0][:300], call) from None
        logged = self._read_log()
        if "Traceback" in logged:
            raise Finding("traceback", where, _last_line(logged), f"{call!r}\n{logged[-3000:]}")
        return status

    def _check(self, call: HttpCall) -> str:
        began, text = time.monotonic(), b""
        try:
            request = self._client.build_request(call.method, call.path, headers=call.headers, content=call.body)
            with self._client.stream(call.method, request.url, headers=request.headers, content=call.body) as reply:
                for chunk in reply.iter_raw():
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
        if whole.status_code >= 500:
            raise Finding("5xx", "", f"{whole.status_code} {whole.text[:300]}")
        if whole.status_code >= 400:
            check_error(whole, _shape(call), whole.status_code)
        elif whole.headers["content-type"].startswith("text/event-stream"):
            _check_stream(parse_events(whole.text))
        elif whole.headers["content-type"].startswith("application/json"):
            assert isinstance(whole.json(), dict), "a reply that is not an object"
        return str(whole.status_code)


_PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)


def _requests() -> SearchStrategy[Any]:
    switches = {"logprobs": True, "custom": True, "namespaces": True, "server": True}
    return strategies.requests(**switches)


def _override_names(client: httpx.Client) -> Iterator[str]:
    """The fields that a load may set, as the admin API lists them."""
    described = client.get("/v1/admin/models").json()["data"]
    return chain.from_iterable(one["load_constraints"]["overrides"] for one in described)


def _aim(body: Json, model: str | None) -> Json:
    """Most bodies name a model that exists: else nothing behind the router would be reached."""
    return body | {"model": model} if model is not None and isinstance(body, dict) else body


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shape(call: HttpCall) -> str:
    """The path whose protocol the error must be in; a header chooses for paths that belong to no protocol."""
    path = call.path.partition("?")[0]
    own = path.startswith(("/v1/messages", "/v1/chat", "/v1/responses", "/v1/completions", "/v1/embeddings", "/tokenize"))
    if not own and not path.startswith(("/detokenize", "/apply-template")) and "anthropic-version" in call.headers:
        return "/v1/messages"
    return path


def _check_stream(events: list[ServerSentEvent]) -> None:
    events = [event for event in events if event.event != ":"]
    assert events, "an empty stream"
    last = events[-1]
    name = last.event or (last.data.get("type") if isinstance(last.data, dict) else "")
    assert last.data == DONE or name in _ENDS, f"a stream that ends with {str(last)[:200]}"


def _template(path: str, known: Mapping[str, Any]) -> str:
    """The path with its parameters in braces again."""
    steps = path.partition("?")[0].split("/")
    for one in known:
        pattern = one.split("/")
        if len(pattern) == len(steps) and all(p.startswith("{") or p == s for p, s in zip(pattern, steps, strict=True)):
            return str(one)
    return path[:60]


def _last_line(log: str) -> str:
    lines = [line for line in log.replace("\\n", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines)[-1].strip()[:200]
