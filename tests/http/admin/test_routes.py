"""The admin API of a live server with a scripted model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import wait_until
from tests.http.app_client import app_client
from tests.live_server import LiveServer, demo_config, live_server

CHAT_BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
ENDLESS_BODY = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "endless"}]}
SCRIPT = [
    {"when": "^endless", "steps": [{"text": "so far"}, {"hang": True}]},
    {"when": "^slowly", "steps": [{"repeat": 1000, "steps": [{"text": "tick "}, {"delay": 0.02}]}]},
    {"steps": [{"text": "Hello there."}]},
]


def config() -> dict[str, Any]:
    client = demo_config(SCRIPT, replica_max=2, description="For tests", aliases=["other"])
    client["models"]["broken"] = {"backend": "llama_cpp", "path": "/no/such/file.gguf", "enabled": False}
    return client


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=server.owner) as client:
        yield client


def model(client: httpx.Client, name: str = "demo") -> Any:
    return client.get(f"/v1/admin/models/{name}").json()


# --- models -----------------------------------------------------------------------------------------------------------


def test_every_configured_model_is_listed_with_its_state(client: httpx.Client) -> None:
    listed = client.get("/v1/admin/models").json()
    demo_row, broken = listed["data"]
    assert (demo_row["id"], demo_row["state"], demo_row["loaded"], demo_row["backend"]) == (
        "demo",
        "ready",
        True,
        "fake",
    )
    assert (broken["id"], broken["state"], broken["loaded"]) == ("broken", "stopped", False)
    assert demo_row["description"] == "For tests"
    assert demo_row["aliases"] == ["other"]
    assert demo_row["definition"]["replica_max"] == 2
    assert demo_row["replicas"]["max"] == 2
    assert demo_row["queue"]["slots"] == 6
    assert set(demo_row["capabilities"]) >= {
        "modalities", "multi_turn", "thinking_modes", "tools", "structured", "streaming", "lora",
    }  # fmt: skip
    assert demo_row["caches"]["main"]["window"] == 4096


def test_a_model_is_unloaded_and_loaded_again(client: httpx.Client) -> None:
    unloaded = client.post("/v1/admin/models/demo/unload")
    assert (unloaded.status_code, unloaded.json()["state"]) == (200, "stopped")
    assert client.post("/v1/chat/completions", json=CHAT_BODY).status_code == 409
    loaded = client.post("/v1/admin/models/demo/load")
    assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
    assert client.post("/v1/chat/completions", json=CHAT_BODY).status_code == 200


def test_wait_false_returns_at_once(client: httpx.Client) -> None:
    client.post("/v1/admin/models/demo/unload")
    assert client.post("/v1/admin/models/demo/load?wait=false").status_code == 202
    wait_until(lambda: model(client)["state"] == "ready", "the model is ready")


def test_a_failed_load_reports_its_reason_and_keeps_it_in_the_record(client: httpx.Client) -> None:
    reply = client.post("/v1/admin/models/broken/load")
    assert reply.status_code == 503
    assert "/no/such/file.gguf" in reply.json()["error"]["message"]
    assert model(client, "broken")["state"] == "failed"
    assert "/no/such/file.gguf" in model(client, "broken")["reason"]


def test_a_load_refuses_fields_that_cannot_be_overridden(client: httpx.Client) -> None:
    client.post("/v1/admin/models/demo/unload")
    reply = client.post("/v1/admin/models/demo/load", json={"model_path": "/etc/passwd"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "model_path"
    assert model(client)["state"] == "stopped"


def test_replicas_are_added_and_removed(client: httpx.Client) -> None:
    up = client.post("/v1/admin/models/demo/replicas", json={"replicas": 2}).json()
    assert [one["state"] for one in up["replicas"]["items"]] == ["ready", "ready"]
    assert up["queue"]["slots"] == 12
    down = client.post("/v1/admin/models/demo/replicas", json={"replicas": 1}).json()
    assert len(down["replicas"]["items"]) == 1


@pytest.mark.parametrize("body", [{}, {"replicas": "2"}, {"replicas": True}, {"replicas": 3}, {"replicas": 0}])
def test_invalid_replica_counts_are_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    reply = client.post("/v1/admin/models/demo/replicas", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "replicas"


@pytest.mark.parametrize("order", ["load", "unload", "drain", "replicas"])
def test_an_unknown_model_is_not_found(client: httpx.Client, order: str) -> None:
    reply = client.post(f"/v1/admin/models/unknown/{order}", json={"replicas": 1} if order == "replicas" else None)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


def test_a_drained_model_finishes_running_requests_and_refuses_new_ones(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS_BODY) as running:
        lines = running.iter_lines()
        next(lines)
        assert client.post("/v1/admin/models/demo/drain").json()["state"] == "draining"
        assert client.post("/v1/chat/completions", json=CHAT_BODY).status_code == 503
    wait_until(lambda: model(client)["queue"]["running"] == 0, "the last request is gone")
    assert client.post("/v1/admin/models/demo/load").json()["state"] == "ready"


def test_a_forced_unload_fails_running_requests(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS_BODY) as running:
        lines = running.iter_lines()
        next(lines)
        assert client.post("/v1/admin/models/demo/unload?force=true").json()["state"] == "stopped"
        rest = "\n".join(lines)
    assert '"error"' in rest


# --- memory, caches, routes -------------------------------------------------------------------------------------------


def test_memory_is_reported_without_a_gpu(client: httpx.Client) -> None:
    body = client.get("/v1/admin/gpu-memory").json()
    assert body["ram"]["total"] > body["ram"]["free"] > 0
    assert body["ram"]["used_here"] > 10_000_000
    assert [row["id"] for row in body["models"]] == ["demo", "broken"]
    assert body["models"][0]["estimate"]["total"] > 0


def test_caches_are_listed_with_their_sizes(client: httpx.Client) -> None:
    rows = client.get("/v1/admin/caches").json()["data"]
    assert [(row["cache"], row["window"], row["parallel"]) for row in rows if row["model"] == "demo"] == [
        ("main", 4096, 4),
        ("fast", 2048, 2),
    ]


def test_a_name_is_resolved_as_a_request_would_be(client: httpx.Client) -> None:
    body = client.get("/v1/admin/route", params={"model": "claude-haiku-4", "endpoint": "/v1/messages"}).json()
    assert (body["model"], body["cache"], body["window"], body["backend"]) == ("demo", "fast", 2048, "fake")


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_running_request_is_listed_and_can_be_cancelled(client: httpx.Client, server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as others, httpx.Client(base_url=server.url) as second:
        reading = others.submit(second.post, "/v1/chat/completions", json=ENDLESS_BODY)
        wait_until(lambda: client.get("/v1/admin/requests").json()["live"], "the request runs")
        (live,) = client.get("/v1/admin/requests").json()["live"]
        assert (live["model"], live["cache"], live["state"]) == ("demo", "main", "running")
        assert client.get(f"/v1/admin/requests/{live['id']}").json()["live"][0]["trace"] == live["trace"]
        assert client.post(f"/v1/admin/requests/{live['id']}/cancel").json()["cancelled"] == 1
        assert '"error"' in reading.result(60).text
    wait_until(lambda: not client.get("/v1/admin/requests").json()["live"], "it is gone")
    assert client.post(f"/v1/admin/requests/{live['id']}/cancel").status_code == 404


def test_a_running_request_shows_its_progress_its_prompt_and_its_output(client: httpx.Client) -> None:
    """Without kept texts: the output since the first look, which begins to keep it."""
    body = {**ENDLESS_BODY, "messages": [{"role": "user", "content": "slowly"}]}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        wait_until(lambda: "tick" in next(lines), "tokens arrive")
        path = f"/v1/admin/requests/{reply.headers['x-request-id']}"
        (live,) = client.get(path).json()["live"]
        assert live["progress"]["prompt"] == live["tokens"] == live["progress"]["read"]
        assert live["progress"]["output"] > 0
        assert live["progress"]["endpoint"] == "/v1/chat/completions"
        wait_until(lambda: "tick" in client.get(path).json()["texts"]["output"], "the output grows")
        assert "slowly" in client.get(path).json()["texts"]["prompt"]


def test_kept_texts_of_a_running_request_are_complete(client: httpx.Client) -> None:
    client.post("/v1/admin/history", json={"texts": True})
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS_BODY) as reply:
        lines = reply.iter_lines()
        wait_until(lambda: "so far" in next(lines), "tokens arrive")
        texts = client.get(f"/v1/admin/requests/{reply.headers['x-request-id']}").json()["texts"]
    assert (json.loads(texts["request"])["model"], texts["output"]) == ("demo", "so far")


def test_a_cancelled_request_keeps_its_token_counts_and_times(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS_BODY) as reply:
        lines = reply.iter_lines()
        wait_until(lambda: "so far" in next(lines), "tokens arrive")
        id = reply.headers["x-request-id"]
        client.post(f"/v1/admin/requests/{id}/cancel")
        for _ in lines:
            pass
    (record,) = client.get(f"/v1/admin/requests/{id}").json()["ended"]
    assert not record["failed"]
    assert record["usage"]["prompt"] > 0
    assert record["usage"]["output"] > 0
    assert record["timings"]["first_token"] is not None


def test_a_request_that_joined_an_identical_one_can_be_cancelled_alone(
    client: httpx.Client, server: LiveServer
) -> None:
    body = ENDLESS_BODY | {"temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        with (
            httpx.Client(base_url=server.url) as second,
            second.stream("POST", "/v1/chat/completions", json=body) as joined,
        ):
            id = joined.headers["x-request-id"]
            assert client.post(f"/v1/admin/requests/{id}/cancel").json() == {"id": id, "cancelled": 1}
            assert '"code":"cancelled"' in joined.read().decode()
        (live,) = client.get("/v1/admin/requests").json()["live"]
        client.post(f"/v1/admin/requests/{live['id']}/cancel")


def test_a_finished_request_keeps_its_timings_and_usage(client: httpx.Client) -> None:
    request_id = client.post("/v1/chat/completions", json=CHAT_BODY).headers["x-request-id"]
    body = client.get(f"/v1/admin/requests/{request_id}").json()
    (ended,) = body["ended"]
    assert (ended["state"], ended["status"], ended["usage"]["output"]) == ("finished", "end", 4)
    assert ended["timings"]["total"] > 0
    assert body["texts"] is None
    slices = client.get("/v1/admin/history").json()["slices"]
    assert sum(one["requests"] for one in slices) == 1


def test_texts_are_kept_after_the_switch_is_on(client: httpx.Client) -> None:
    assert client.post("/v1/admin/history", json={"texts": True}).json() == {"texts": True}
    request_id = client.post("/v1/chat/completions", json=CHAT_BODY).headers["x-request-id"]
    texts = client.get(f"/v1/admin/requests/{request_id}").json()["texts"]
    assert json.loads(texts["request"]) == CHAT_BODY
    assert "hi" in texts["prompt"]
    assert texts["output"].startswith("Hello there.")
    assert json.loads(texts["response"])["object"] == "chat.completion"
    client.post("/v1/admin/history", json={"texts": False})
    assert client.get(f"/v1/admin/requests/{request_id}").json()["texts"] is None


def test_an_unknown_request_is_not_found(client: httpx.Client) -> None:
    assert client.get("/v1/admin/requests/req_none").status_code == 404


@pytest.mark.parametrize("body", [None, {}, {"texts": "yes"}])
def test_the_switch_takes_a_boolean(client: httpx.Client, body: Any) -> None:
    assert client.post("/v1/admin/history", json=body).status_code == 400


@pytest.mark.parametrize("query", ["limit=-1", "limit=1001", "limit=many"])
def test_an_invalid_query_parameter_is_named(client: httpx.Client, query: str) -> None:
    reply = client.get(f"/v1/admin/requests?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "limit"


# --- changes as they happen -------------------------------------------------------------------------------------------


def test_changes_are_streamed_as_events(client: httpx.Client, server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as other, other.stream("GET", "/v1/admin/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: snapshot"
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["data"][0]["state"] == "ready"
        work = threading.Thread(target=lambda: client.post("/v1/admin/models/demo/unload"))
        work.start()
        states = []
        for line in lines:
            if line.startswith("data: "):
                states.append(json.loads(line.removeprefix("data: "))["state"])
                if states[-1] == "stopped":
                    break
        work.join()
    assert states[-1] == "stopped"


# --- who may ----------------------------------------------------------------------------------------------------------


def test_the_admin_api_needs_an_admin_key() -> None:
    keys = [{"name": "root", "key": "sk-root", "admin": True}, {"name": "user", "key": "sk-user"}]
    with live_server({**config(), "keys": keys}) as running, httpx.Client(base_url=running.url) as client:
        for path in ("models", "gpu-memory", "requests", "events", "history"):
            assert client.get(f"/v1/admin/{path}").status_code == 401
            assert client.get(f"/v1/admin/{path}", headers={"x-api-key": "sk-user"}).status_code == 403
        assert client.post("/v1/admin/models/demo/unload", headers={"x-api-key": "sk-user"}).status_code == 403
        assert client.get("/v1/admin/models", headers={"x-api-key": "sk-root"}).status_code == 200


KEYS = [{"name": "ann", "key": "a-member"}, {"name": "ops", "key": "an-operator", "admin": True}]
REFUSED = [  # the key, if there are any, and the roles that it lacks
    (None, {"operator": "owner_required", "owner": "owner_required"}),
    ("a-member", {"local": "admin_key_required", "operator": "admin_key_required", "owner": "owner_required"}),
    ("an-operator", {"owner": "owner_required"}),
]


@pytest.mark.parametrize(("key", "lacks"), REFUSED, ids=["without keys", "member", "operator"])
async def test_every_endpoint_refuses_those_without_its_role(key: str | None, lacks: dict[str, str]) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with app_client({**demo_config(), "keys": KEYS if key else []}) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        tried = [
            (method, path, about["x-role"])
            for path, methods in paths.items()
            for method, about in methods.items()
            if path.startswith("/v1/admin/") and lacks.get(about["x-role"])
        ]
        assert len(tried) >= 4
        for method, path, role in tried:
            reply = await client.request(method, path, headers=headers, content=b"not even JSON")
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, lacks[role]), (method, path)


def test_the_documentation_lists_every_endpoint(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/admin/models", "/v1/admin/gpu-memory", "/v1/admin/models/{name}/load"} <= set(paths)


# --- what pages ask ---------------------------------------------------------------------------------------------------


async def test_an_estimate_and_the_memory_page_respect_the_memory_limit() -> None:
    limited = demo_config() | {"scheduler": {"memory_limit": "1KiB"}}
    async with app_client(limited) as limited_client:
        body = (await limited_client.post("/v1/admin/models/demo/estimate")).json()
        assert (body["free"], body["limit"], body["fits"], body["possible"]) == (1024, 1024, False, False)
        memory = (await limited_client.get("/v1/admin/gpu-memory")).json()
        assert memory["limits"] == [{"device": "cpu", "limit": 1024, "taken": 0}]


def test_a_load_is_estimated_without_loading(client: httpx.Client) -> None:
    client.post("/v1/admin/models/demo/unload")
    body = client.post("/v1/admin/models/demo/estimate", json={"token_delay": 1}).json()
    assert (body["id"], body["fits"]) == ("demo", True)
    assert 0 < body["estimate"]["total"] < body["free"]
    assert model(client)["state"] == "stopped"


def test_an_estimate_refuses_what_a_load_refuses(client: httpx.Client) -> None:
    refused = client.post("/v1/admin/models/demo/estimate", json={"path": "/etc/passwd"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "override_not_allowed")
    unknown = client.post("/v1/admin/models/broken/estimate")
    assert unknown.status_code == 503
    assert "/no/such/file.gguf" in unknown.json()["error"]["message"]
    assert client.post("/v1/admin/models/unknown/estimate").status_code == 404


def test_ended_requests_can_be_listed_since_a_time(client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json=CHAT_BODY).status_code == 200
    (first,) = client.get("/v1/admin/requests").json()["ended"]
    assert client.post("/v1/chat/completions", json=CHAT_BODY).status_code == 200
    newer = client.get("/v1/admin/requests", params={"since": first["at"]}).json()["ended"]
    assert first["id"] in [one["id"] for one in newer]
    last = max(one["at"] for one in newer)
    assert client.get("/v1/admin/requests", params={"since": last + 1}).json()["ended"] == []


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_is_json_whatever_its_content_type(client: httpx.Client, content_type: str | None) -> None:
    """`curl -d` calls every body a form."""
    headers = {"content-type": content_type} if content_type else {}
    reply = client.post("/v1/admin/models/demo/replicas", content=b'{"replicas": 1}', headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"replicas=1", "the body is not JSON: Expecting value at character 0"), (b"[1]", "JSON object")],
)
def test_a_body_that_is_no_json_object_says_so(client: httpx.Client, body: bytes, words: str) -> None:
    reply = client.post("/v1/admin/models/demo/replicas", content=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_foreign_web_page_is_refused_whatever_its_content_type(client: httpx.Client) -> None:
    headers = {"content-type": "text/plain", "origin": "https://elsewhere.example"}
    reply = client.post("/v1/admin/models/demo/unload", content=b"{}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert model(client)["state"] == "ready"
