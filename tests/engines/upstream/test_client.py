"""The HTTP client: its requests, and the errors of the network."""

from __future__ import annotations

import httpx
import pytest

from modelyard.core.errors import Incomplete, Timeout, Unavailable
from modelyard.engines.upstream import client
from modelyard.engines.upstream.client import UpstreamAddress, UpstreamHttpClient, transport_error
from tests.engines.upstream.fake_upstream import Answer, fake_upstream


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (httpx.ConnectError("refused"), Unavailable, "upstream_unreachable"),
        (httpx.ConnectTimeout(""), Unavailable, "upstream_unreachable"),
        (httpx.PoolTimeout(""), Unavailable, "upstream_unreachable"),
        (httpx.ReadTimeout(""), Timeout, "upstream_timeout"),
        (httpx.WriteTimeout(""), Timeout, "upstream_timeout"),
        (httpx.ReadError(""), Unavailable, "upstream_lost"),
        (httpx.RemoteProtocolError("peer closed"), Unavailable, "upstream_lost"),
    ],
)
def test_transport_error_names_the_upstream(error: httpx.HTTPError, kind: type, code: str) -> None:
    mapped = transport_error(error, "the upstream of 'm'")
    assert (type(mapped), mapped.code) == (kind, code)
    assert "the upstream of 'm'" in mapped.message


async def test_short_request_returns_status_and_body() -> None:
    async with fake_upstream(Answer(200, [b"a", b"b"]), Answer(404, [b"what?"])) as upstream:
        http = UpstreamHttpClient(UpstreamAddress(name="it", base_url=upstream.url, headers={"x-team": "t"}))
        assert await http.request("GET", "/a") == (200, b"ab")
        assert await http.request("POST", "/b", b"[]") == (404, b"what?")
        await http.close()
    assert [(r.method, r.path, r.body) for r in upstream.requests] == [("GET", "/a", None), ("POST", "/b", [])]
    assert upstream.requests[1].headers["x-team"] == "t"
    assert upstream.requests[1].headers["content-type"] == "application/json"


async def test_reply_that_is_too_long_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_BODY", 10)
    async with fake_upstream(Answer(200, [b"12345678", b"12345678"])) as upstream:
        http = UpstreamHttpClient(UpstreamAddress(name="it", base_url=upstream.url))
        async with await http.post("/", b"{}") as reply:
            with pytest.raises(Incomplete, match="longer than 10 bytes"):
                await reply.read()
        await http.close()
