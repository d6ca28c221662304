"""Bodies are read completely or refused early; replies carry the request id."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.core.protocol import WireError
from modelyard.gateway.request_work import run_sized
from modelyard.http import request_context
from modelyard.http.request_context import (
    MAX_CONTAINERS,
    MAX_VALUES,
    RequestContext,
    fallback_header,
    json_fault,
    read_body,
    send_error,
    send_json,
)
from modelyard.http.settings import HttpSettings
from modelyard.telemetry.history import SkippedModel

SETTINGS = HttpSettings(max_body_bytes=1000, max_json_depth=5)


def context(**headers: str) -> RequestContext:
    return RequestContext("abc", "/v1/messages", {name.replace("_", "-"): value for name, value in headers.items()})


class Client:
    """The chunks that a client sends; `taken` counts those that were received."""

    def __init__(self, *chunks: bytes, leaves: bool = False) -> None:
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": leaves or at < len(chunks) - 1}
            for at, chunk in enumerate(chunks)
        ]
        self._messages += [{"type": "http.disconnect"}]
        self.taken = 0

    async def __call__(self) -> Any:
        self.taken += 1
        return self._messages[self.taken - 1]


@pytest.mark.parametrize("chunks", [(b"{}",), (b"{", b"}"), (b"", b"", b"{}"), (b"{}", b""), (b"x" * 1000,)])
async def test_a_body_is_read_completely_from_any_chunks(chunks: tuple[bytes, ...]) -> None:
    assert await read_body(Client(*chunks), context(), SETTINGS) == b"".join(chunks)


@pytest.mark.parametrize(
    ("chunks", "headers", "taken"),
    [
        ((b"x" * 1001,), {}, 1),
        ((b"x" * 600, b"x" * 600, b"x" * 600), {}, 2),
        ((b"x" * 1001,), {"content_length": "1001"}, 0),
        ((b"x" * 1001,), {"content_length": "9" * 5000}, 0),
    ],
)
async def test_a_large_body_is_refused_as_early_as_possible(chunks: Any, headers: Any, taken: int) -> None:
    client = Client(*chunks)
    with pytest.raises(TooLarge, match=r"1000 bytes \(http.max_body_bytes\)"):
        await read_body(client, context(**headers), SETTINGS)
    assert client.taken == taken


@pytest.mark.parametrize("length", ["1000", "", "-1", "abc", "²"])
async def test_an_invalid_content_length_is_ignored(length: str) -> None:
    assert await read_body(Client(b"{}"), context(content_length=length), SETTINGS) == b"{}"


async def test_a_client_that_disconnects_within_its_body_is_noticed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await read_body(Client(b"{", leaves=True), context(), SETTINGS)
    assert caught.value.code == "disconnected"


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidRequest, match="compressed"):
        await read_body(Client(b"{}"), context(content_encoding=encoding), SETTINGS)


@pytest.mark.parametrize("encoding", ["", "identity"])
async def test_the_identity_encoding_is_accepted(encoding: str) -> None:
    assert await read_body(Client(b"{}"), context(content_encoding=encoding), SETTINGS) == b"{}"


async def test_a_deep_body_is_refused_before_it_is_parsed() -> None:
    assert await read_body(Client(b"[" * 5 + b"]" * 5), context(), SETTINGS)
    with pytest.raises(InvalidRequest, match="more than 5 levels deep") as caught:
        await read_body(Client(b"[" * 6 + b"]" * 6), context(), SETTINGS)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(("size", "here"), [(0, True), (1 << 18, True), ((1 << 18) + 1, False)])
async def test_work_on_large_bodies_runs_in_a_thread(size: int, here: bool) -> None:
    assert (await run_sized(size, threading.get_ident) == threading.get_ident()) is here


async def sent(deed: Any, *args: Any) -> tuple[dict[str, Any], dict[bytes, bytes]]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await deed(send, *args)
    start, body = messages
    headers = dict(start["headers"])
    assert len(headers) == len(start["headers"]), "a header is duplicated"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    return start, headers


async def test_a_reply_has_the_request_id_under_both_names() -> None:
    start, headers = await sent(send_json, context(), 200, b"{}")
    assert (start["status"], headers[b"content-type"]) == (200, b"application/json")
    assert headers[b"x-request-id"] == headers[b"request-id"] == b"req_abc"


async def test_an_error_keeps_its_headers_and_its_status_is_noted() -> None:
    seen = context()
    error = WireError(503, b"{}", {"retry-after": "2", "x-request-id": "abc"})
    start, headers = await sent(send_error, seen, error)
    assert (start["status"], seen.status, headers[b"retry-after"]) == (503, 503, b"2")
    assert b"connection" not in headers


async def test_a_body_that_is_too_large_closes_the_connection() -> None:
    _, headers = await sent(send_error, context(), WireError(413, b"{}"))
    assert headers[b"connection"] == b"close"


def test_the_first_failure_is_the_one_that_is_counted() -> None:
    seen = context()
    seen.failed(ModelyardError("x", code="first"))
    seen.failed(ModelyardError("x", code="second"))
    assert seen.error == "first"


def test_a_caller_is_named_by_its_key_and_never_by_its_secret() -> None:
    seen = context(authorization="Bearer hush")
    seen.key, seen.allow_remote = "ann", True
    caller = seen.caller()
    assert (caller.key, caller.endpoint, caller.allow_remote) == ("ann", "/v1/messages", True)
    assert "hush" not in repr(caller)


async def test_ignored_parameters_and_cache_reuse_are_response_headers() -> None:
    seen = context()
    seen.ignored = ("top_k", "min_p")
    _, headers = await sent(send_json, seen, 200, b"{}")
    assert headers[b"x-modelyard-ignored"] == b"top_k, min_p"


# How a body is built is seen without parsing it, exactly as a parser would see it.

TREES = st.recursive(
    st.none() | st.integers() | st.text('"\\[]{},a\u00e9', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\[]{}', max_size=3), inner, max_size=3),
    max_leaves=30,
)


def levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@given(TREES, st.integers(1, 6), st.booleans(), st.integers(1, 9))
@example([["\\"]], 1, True, 1)
@example(['"', [["\\\\"]]], 2, False, 2)
def test_depth_matches_that_of_a_parser(tree: Any, limit: int, ascii_only: bool, cut: int) -> None:
    """`cut` lets strings and escapes fall across the borders of the slices that are looked at."""
    whole, request_context._SLICE = request_context._SLICE, cut
    try:
        found = json_fault(json.dumps(tree, ensure_ascii=ascii_only).encode(), limit)
    finally:
        request_context._SLICE = whole
    assert (found is not None) == (levels(tree) > limit)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"messages":' + b"[" * 65 + b'"' + b'\\"' * 100,
        b"]" * 100 + b"[" * 65,
        b"[]" * 100 + b"[" * 65,
    ],
)
def test_unclosed_brackets_are_too_deep(body: bytes) -> None:
    assert json_fault(body, 64) == "the JSON body is nested more than 64 levels deep"


@pytest.mark.parametrize(
    "body", [b"", b"hello", b'"' + b"[" * 1000 + b'"', b'["' + b'\\"[' * 1000 + b'"]', b'["\\\\"]' * 200, b"]" * 1000]
)
def test_brackets_in_strings_and_closing_brackets_do_not_count(body: bytes) -> None:
    assert json_fault(body, 64) is None


def test_the_number_of_containers_and_values_is_limited() -> None:
    assert json_fault(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]", 64) is None
    assert "arrays and objects" in str(json_fault(b"[" + b"[]," * MAX_CONTAINERS + b"[]]", 64))
    assert json_fault(b"[" + b"1," * (MAX_VALUES - 1) + b"1]", 64) is None
    assert "values" in str(json_fault(b"[" + b"1," * (MAX_VALUES + 1) + b"1]", 64))
    assert json_fault(b'["' + b"," * (MAX_VALUES + 1) + b'"]', 64) is None


def test_names_of_models_that_could_not_answer_cannot_break_their_header() -> None:
    skipped = [SkippedModel("a; b\r\nx: y", "full"), SkippedModel("模型", "lost")]
    assert fallback_header(skipped, "c/d:e") == (
        "from=a%3B%20b%0D%0Ax:%20y; reason=full; to=%E6%A8%A1%E5%9E%8B, from=%E6%A8%A1%E5%9E%8B; reason=lost; to=c/d:e"
    )
