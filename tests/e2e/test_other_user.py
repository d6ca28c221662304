"""Another user of the machine, on a server without keys: uses the models that are configured, and nothing else.

The requests come from a process of the user 65534. Without root it keeps its user, and its requests are the same: what
makes the owner is the token, which is not sent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.library.cache_dir import run_dir
from tests.cli_process import ServerProcess, run, serve
from tests.e2e.helpers import wait_until

OTHER_USER = """
import encodings.idna, http.client, json, os, sys  # before it loses the right to read them
url, files, requests = json.load(sys.stdin)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
def send(method, path, body):
    connection = http.client.HTTPConnection(*url.split(":"), timeout=180)
    connection.request(method, path, None if body is None else json.dumps(body))
    reply = connection.getresponse()
    return reply.status, reply.read().decode()
def read(folder):
    try:
        return os.listdir(folder)
    except PermissionError:
        return "refused"
json.dump([[read(file) for file in files], [send(*request) for request in requests]], sys.stdout)
"""
CONFIG = """
[log]
history_texts = true
[accounts]
path = "accounts.sqlite"
[models.demo]
backend = "fake"
token_delay = 0
script = [{ when = "endless", steps = [{ hang = true }] }, { steps = [{ text = "Hello there." }] }]
[models.drafted]
backend = "vllm"
vllm_model = "/models/large"
enabled = false
"""
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
EVIL: dict[str, Any] = {
    "section": "models",
    "name": "evil",
    "new": True,
    "force": True,
    "set": {"backend": "fake", "placement": "process", "python": "/tmp/evil.sh"},
}
BLOB = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serve(folder, config=CONFIG) as running:
        yield running


def other_user(server: ServerProcess, *requests: tuple[str, str, Any], files: tuple[Path, ...] = ()) -> Any:
    """The folders that it sees, and the status and text of the reply to each request."""
    sent = json.dumps([server.url.removeprefix("http://"), [str(file) for file in files], requests])
    command = [sys.executable, "-c", OTHER_USER]
    done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=180, check=True)
    return json.loads(done.stdout)


def test_another_user_can_chat_and_load_and_unload_configured_models(server: ServerProcess) -> None:
    requests = (
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/messages", {**CHAT, "max_tokens": 5}),
        ("GET", "/v1/admin/models", None),
        ("GET", "/v1/admin/gpu-memory", None),
        ("POST", "/v1/admin/models/demo/unload", None),
        ("POST", "/v1/admin/models/demo/load", None),
        ("POST", "/api/pull", {"model": "demo", "stream": False}),
    )
    _, replies = other_user(server, *requests)
    assert [status for status, _ in replies] == [200] * len(requests), replies


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/admin/config/apply", EVIL),
        ("POST", "/v1/admin/config/preview", EVIL),
        ("GET", "/v1/admin/config", None),
        ("POST", "/v1/admin/reload", None),
        ("POST", "/v1/admin/models/drafted/load", {"vllm_speculative_model": "/tmp/evil"}),
        ("POST", "/v1/admin/models/drafted/estimate", {"vllm_speculative_model": "/tmp/evil"}),
        ("POST", "/v1/admin/downloads", {"source": "evil/model-GGUF"}),
        ("POST", "/api/pull", {"model": "hf.co/evil/model-GGUF"}),
        ("POST", "/api/create", {"model": "evil", "files": {"a.gguf": BLOB}}),
        ("POST", f"/api/blobs/{BLOB}", {}),
        ("DELETE", "/api/delete", {"model": "demo"}),
        ("POST", "/v1/admin/keys", {"name": "evil", "admin": True}),
        ("GET", "/v1/admin/logs", None),
        ("GET", "/v1/admin/models/demo/log", None),
        ("POST", "/v1/admin/history", {"texts": True}),
    ],
)
def test_another_user_changes_no_configuration_loads_no_file_and_creates_no_key(
    server: ServerProcess, folder: Path, method: str, path: str, body: Any
) -> None:
    _, ((status, text),) = other_user(server, (method, path, body))
    assert (status, "only the owner of this server may do this" in text) == (403, True), text
    assert (folder / "modelyard.toml").read_text() == CONFIG
    assert httpx.get(f"{server.url}/v1/admin/keys", headers=server.owner).json()["data"] == []


def test_each_user_has_its_own_chats_and_sees_its_own_usage(server: ServerProcess) -> None:
    chats = f"{server.url}/v1/admin/chats"
    stored = httpx.put(f"{chats}/mine", json={"id": "mine", "title": "the owner's"})
    assert stored.status_code == 200
    requests = (
        ("GET", "/v1/admin/chats/mine", None),
        ("PUT", "/v1/admin/chats/theirs", {"id": "theirs", "title": "another"}),
        ("GET", "/v1/admin/chats", None),
        ("GET", "/v1/admin/usage?key=", None),
        ("GET", "/v1/admin/keys", None),
    )
    _, replies = other_user(server, *requests)
    assert [status for status, _ in replies] == [404, 200, 200, 200, 200], replies
    assert [chat["id"] for chat in json.loads(replies[2][1])["data"]] == ["theirs"]
    assert all(row["key"].startswith("uid:") for row in json.loads(replies[3][1])["data"])
    assert [chat["id"] for chat in httpx.get(chats).json()["data"]] == ["mine"]


def test_a_model_that_is_not_configured_and_a_path_cannot_be_loaded(server: ServerProcess) -> None:
    load = "/v1/admin/models/{}/load"
    _, replies = other_user(
        server, ("POST", load.format("evil"), None), *(
            ("POST", load.format("demo"), {name: "/tmp/evil"}) for name in ("path", "model_path", "python")
        )
    )  # fmt: skip
    assert [status for status, _ in replies] == [404, 400, 400, 400]


def test_another_user_cannot_read_the_texts_of_requests(server: ServerProcess) -> None:
    secret = {"model": "demo", "messages": [{"role": "user", "content": "my secret is walrus"}]}
    id = httpx.post(f"{server.url}/v1/chat/completions", json=secret).headers["x-request-id"]
    stored = httpx.post(f"{server.url}/v1/responses", json={"model": "demo", "input": "my secret is walrus"}).json()[
        "id"
    ]
    shown = httpx.get(f"{server.url}/v1/admin/requests/{id}", headers=server.owner).json()
    assert "walrus" in shown["texts"]["prompt"]
    refused = (f"/v1/admin/requests/{id}", "/v1/admin/requests", "/v1/admin/logs")
    allowed = ("/v1/admin/models", "/v1/admin/caches", "/v1/admin/history", "/slots", "/health", "/metrics")
    _, replies = other_user(server, *(("GET", path, None) for path in (*refused, *allowed)))
    assert [status for status, _ in replies] == [403] * len(refused) + [200] * len(allowed)
    trace = stored.removeprefix("resp_")  # who knows the id of a stored response can read it
    assert not [text for _, text in replies if "walrus" in text or trace in text]


def send(server: ServerProcess, path: str, body: Any) -> Any:
    return httpx.post(server.url + path, json=body, timeout=60).json()


def stored_objects(server: ServerProcess, text: str) -> dict[str, str]:
    """One object of each kind, with this text; by the path at which its owner reads it."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    upload = {"file": ("a.jsonl", json.dumps(line | {"custom_id": text}).encode())}
    file = httpx.post(server.url + "/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
    work = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"text": text}}
    batch = send(server, "/v1/batches", work | {"input_file_id": file})["id"]
    requests = [{"custom_id": text, "params": CHAT | {"max_tokens": 5}}]
    messages = send(server, "/v1/messages/batches", {"requests": requests})["id"]
    response = send(server, "/v1/responses", {"model": "demo", "input": text})["id"]
    background = send(server, "/v1/responses", {"model": "demo", "input": text, "background": True})["id"]
    items = [{"type": "message", "role": "user", "content": text}]
    conversation = send(server, "/v1/conversations", {"items": items})["id"]
    return {
        f"/v1/files/{file}": file,
        f"/v1/files/{file}/content": text,
        f"/v1beta/files/{file}": file,
        f"/v1/batches/{batch}": text,
        f"/v1/messages/batches/{messages}": messages,
        f"/v1/responses/{response}": response,
        f"/v1/responses/{response}/input_items": text,
        f"/v1/responses/{background}": background,
        f"/v1/conversations/{conversation}/items": text,
    }


LISTS = ("/v1/files", "/v1beta/files", "/v1/batches", "/v1/messages/batches")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_another_user_sees_no_files_batches_responses_or_conversations_of_the_owner(server: ServerProcess) -> None:
    objects = stored_objects(server, "walrus-of-mine")
    for path, text in objects.items():
        assert text in httpx.get(server.url + path).text, path
    ids = {path.split("/")[3] if "messages" not in path else path.split("/")[4] for path in objects}
    for path in LISTS:
        assert any(id in httpx.get(server.url + path).text for id in ids), path
    response = next(id for id in ids if id.startswith("resp_"))
    conversation = next(id for id in ids if id.startswith("conv_"))
    file = next(id for id in ids if id.startswith("file-"))
    named = [{"role": "user", "content": [{"type": "input_file", "file_id": file}]}]
    tried = [
        *(("GET", path, None) for path in objects),
        *(("DELETE", path, None) for path in objects if path.count("/") == 3 and "batches" not in path),
        *(("POST", f"{path}/cancel", None) for path in objects if "batches" in path),
        ("POST", "/v1/responses", {"model": "demo", "input": "hi", "previous_response_id": response}),
        ("POST", "/v1/responses", {"model": "demo", "input": "hi", "conversation": conversation}),
        ("POST", "/v1/responses", {"model": "demo", "input": named}),
        ("POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/responses", "completion_window": "24h"}),
    ]
    _, replies = other_user(server, *tried, *(("GET", path, None) for path in LISTS))
    refused, lists = replies[: len(tried)], replies[len(tried) :]
    assert [reply for reply in zip(tried, refused, strict=True) if reply[1][0] not in (400, 404)] == []
    assert [status for status, _ in lists] == [200] * len(LISTS)
    assert not [text for _, text in replies if "walrus-of-mine" in text]
    assert not [text for _, text in lists if any(id in text for id in ids)]
    for path, text in objects.items():
        assert text in httpx.get(server.url + path).text, f"{path} was not deleted"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_another_user_has_objects_of_its_own_which_the_owner_does_not_list(server: ServerProcess) -> None:
    before = httpx.get(server.url + "/v1/messages/batches").text
    requests = [{"custom_id": "a", "params": CHAT | {"max_tokens": 5}}]
    _, ((_, made), (_, response)) = other_user(
        server,
        ("POST", "/v1/messages/batches", {"requests": requests}),
        ("POST", "/v1/responses", {"model": "demo", "input": "seal-of-theirs"}),
    )
    batch, stored = json.loads(made)["id"], json.loads(response)["id"]

    def theirs(path: str) -> Any:
        _, ((status, text),) = other_user(server, ("GET", path, None))
        assert status == 200, text
        return text

    wait_until(lambda: '"processing_status":"ended"' in theirs(f"/v1/messages/batches/{batch}"), "their batch runs")
    assert "Hello there." in theirs(f"/v1/messages/batches/{batch}/results")
    assert stored in theirs(f"/v1/responses/{stored}")
    for path in (f"/v1/messages/batches/{batch}", f"/v1/responses/{stored}"):
        assert httpx.get(server.url + path).status_code == 404
    assert httpx.get(server.url + "/v1/messages/batches").text == before


def test_another_user_cannot_end_a_request(server: ServerProcess) -> None:
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "endless"}]}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=180) as stream:
        cancel = f"/v1/admin/requests/{stream.headers['x-request-id']}/cancel"
        _, ((status, _),) = other_user(server, ("POST", cancel, None))
        assert status == 403
        assert httpx.post(server.url + cancel, headers=server.owner).status_code == 200


def test_the_token_is_in_a_file_that_only_the_user_of_the_server_can_read(tmp_path: Path) -> None:
    cache = {"MODELYARD_CACHE": str(tmp_path / "cache")}
    with serve(tmp_path, config=CONFIG, **cache) as server:
        (file,) = run_dir(cache).glob("server-*.json")
        assert (file.stat().st_mode & 0o777, run_dir(cache).stat().st_mode & 0o777) == (0o600, 0o700)
        assert file.stat().st_uid == os.geteuid()
        if os.geteuid() == 0:
            ((seen,), _) = other_user(server, files=(run_dir(cache),))
            assert seen == "refused"
        server.stop()
        assert not file.exists()


def test_the_commands_prove_that_they_are_the_owners(server: ServerProcess, folder: Path) -> None:
    httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).raise_for_status()
    shown = run("logs", "--url", server.url, cwd=folder)
    assert "path=/v1/chat/completions" in shown.stdout, shown.stderr
    made = run("keys", "create", "me", "--role", "owner", "--url", server.url, cwd=folder)
    assert made.returncode == 0, made.stderr
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 401
    key = {"authorization": f"Bearer {made.stdout.strip()}"}
    assert httpx.get(f"{server.url}/v1/admin/config", headers=key).status_code == 200
    assert run("keys", "create", "ops", "--admin", "--url", server.url, cwd=folder).returncode == 0
    listed = run("keys", "list", "--url", server.url, cwd=folder).stdout
    assert ("owner" in listed, "operator" in listed) == (True, True)
    for name in ("ops", "me"):
        assert run("keys", "revoke", name, "--url", server.url, cwd=folder).returncode == 0
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200


def test_a_command_of_another_user_says_what_to_do(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    """Its folder has no token."""
    refused = run("keys", "create", "me", "--admin", "--url", server.url, cwd=folder, MODELYARD_CACHE=str(tmp_path))
    assert refused.returncode == 1
    assert "only the owner of this server may do this" in " ".join(refused.stderr.split())
