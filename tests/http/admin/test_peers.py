"""Every gateway process lists the requests of all gateway processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.http.admin.peers import PeerGateways, merge_requests
from modelyard.library.models import pull
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.library.files import write_gguf

KEY = "the-key-of-the-house"
HEADERS = {"authorization": f"Bearer {KEY}"}
CONFIG = f"""
[models.demo]
backend = "fake"
token_delay = 0
script = [
    {{ when = "on", steps = [{{ text = "so far" }}, {{ hang = true }}] }},
    {{ steps = [{{ text = "Hello there." }}] }},
]
[caches.main]
model = "demo"
n_ctx = 4096
parallel = 8
[[keys]]
name = "admin"
key = "{KEY}"
admin = true
"""


def record(id: str, at: float = 0.0, progress: Any = None) -> dict[str, Any]:
    return {"id": id, "at": at, "progress": progress}


def test_lists_are_merged_newest_first_without_duplicates() -> None:
    own = {"live": [record("a")], "ended": [record("x", 3.0), record("y", 1.0)]}
    other = {"live": [record("a", progress={"read": 5}), record("b")], "ended": [record("z", 2.0)]}
    merged = merge_requests(own, [other], 2)
    assert {each["id"] for each in merged["live"]} == {"a", "b"}
    assert len(merged["live"]) == 2
    assert merged["live"][0]["progress"] == {"read": 5}, "as the gateway that runs it says"
    assert [each["id"] for each in merged["ended"]] == ["x", "z"]


async def test_without_peers_nothing_is_requested(tmp_path: Path) -> None:
    single, last = PeerGateways(), PeerGateways(str(tmp_path / "workbench-0"))
    try:
        assert await single.request("GET", "requests", {}) == []
        (tmp_path / "workbench-1").touch()  # left by a killed process
        assert await last.request("GET", "requests", {}) == []
    finally:
        await last.close()


# --- two real gateways ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    with (
        pytest.MonkeyPatch.context() as patch,
        cli_process.serve(
            folder, "--workers", "2", config=CONFIG, MODELYARD_LIBRARY="true", MODELYARD_CACHE=str(folder / "cache")
        ) as server,
    ):
        patch.setenv("MODELYARD_CACHE", str(folder / "cache"))
        server.until_count("listening on", 2)  # a broadcast must reach the last process, too
        wait_until(lambda: all(_is_ready(server.url) for _ in range(24)), "the models are ready", cli_process.DEADLINE)
        yield server.url


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/health/ready", timeout=cli_process.DEADLINE).status_code == 200


def get(url: str, path: str) -> httpx.Response:
    """Uses a new connection, so that any gateway process may serve it."""
    return httpx.get(f"{url}/v1/admin/{path}", headers=HEADERS, timeout=cli_process.DEADLINE)


def post(url: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers=HEADERS, timeout=cli_process.DEADLINE)


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


def test_each_gateway_lists_the_requests_of_all(gateways: str) -> None:
    assert post(gateways, "/v1/admin/history", {"texts": True}).json() == {"texts": True}
    replies = [post(gateways, "/v1/chat/completions", chat_body("Hi.")) for _ in range(12)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    for _ in range(8):
        merged = get(gateways, "requests").json()
        assert ids <= {record["id"] for record in merged["ended"]}
        assert [record["at"] for record in merged["ended"]] == sorted(
            (record["at"] for record in merged["ended"]), reverse=True
        )
    for id in ids:
        merged = get(gateways, f"requests/{id}").json()
        assert (merged["ended"][0]["id"], bool(merged["texts"])) == (id, True)
    assert len(get(gateways, "requests?limit=3").json()["ended"]) == 3
    assert get(gateways, "requests/req_nobody").status_code == 404


def test_each_gateway_shows_the_log_of_all(gateways: str) -> None:
    replies = [post(gateways, "/v1/chat/completions", chat_body("Hi.")) for _ in range(8)]
    ids = {reply.headers["x-request-id"].removeprefix("req_") for reply in replies}
    for _ in range(4):
        lines = get(gateways, "logs?level=info").json()["lines"]
        assert ids <= {line.get("request_id") for line in lines}
        assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    (one,) = get(gateways, f"logs?id={next(iter(ids))}").json()["lines"]
    assert one["path"] == "/v1/chat/completions"
    assert get(gateways, "logs?level=loud").status_code == 400


def test_each_gateway_cancels_the_requests_of_all(gateways: str) -> None:
    with ExitStack() as stack:
        client = [stack.enter_context(httpx.Client(timeout=cli_process.DEADLINE)) for _ in range(6)]
        url, body = f"{gateways}/v1/chat/completions", chat_body("Go on.", stream=True)
        streams = [stack.enter_context(record.stream("POST", url, json=body, headers=HEADERS)) for record in client]
        lines = [stream.iter_lines() for stream in streams]
        for line in lines:
            next(line)
        ids = [stream.headers["x-request-id"] for stream in streams]
        assert {record["id"] for record in get(gateways, "requests").json()["live"]} == set(ids)
        for id in ids:
            assert post(gateways, f"/v1/admin/requests/{id}/cancel").json()["cancelled"] == 1
        for line in lines:
            assert any("error" in each for each in line)
    assert post(gateways, "/v1/admin/requests/req_nobody/cancel").status_code == 404


def test_peers_refuse_requests_without_a_key(gateways: str) -> None:
    assert httpx.get(f"{gateways}/v1/admin/requests", timeout=cli_process.DEADLINE).status_code == 401


def test_every_gateway_offers_a_new_model_of_the_library(gateways: str, tmp_path: Path) -> None:
    pull(str(write_gguf(tmp_path / "new.gguf")), name="new-one")
    wait_until(lambda: all("new-one" in _names(gateways) for _ in range(12)), "all offer it", cli_process.DEADLINE)


def _names(url: str) -> set[str]:
    """Uses a new connection, as `get` does."""
    models = httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=cli_process.DEADLINE).json()["data"]
    return {model["id"] for model in models}
