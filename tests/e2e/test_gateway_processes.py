"""Several gateway processes on one port."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.library.convert.tiny_models import write_model
from tests.telemetry.prometheus_text import sample_values

CONFIG = """
[http]
drain_s = 0

[models.demo]
backend = "fake"
script = [
    { when = "^endless", steps = [{ text = "so far" }, { hang = true }] },
    { steps = [{ text = "Hello there." }] },
]

[caches.main]
model = "demo"
n_ctx = 4096
parallel = 8
"""
CHAT = "/v1/chat/completions"
ENDPOINT = (CHAT, "POST", "200")
REQUESTS = 40


class MultiProcessServer:
    def __init__(self, server: cli_process.ServerProcess) -> None:
        self.url, self.owner, self._server = server.url, server.owner, server
        self.parent = psutil.Process(server.process.pid)

    def children(self) -> list[psutil.Process]:
        return self.parent.children(recursive=True)

    def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        """Opens a new connection, because the kernel distributes connections, not requests."""
        chat = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
        return httpx.post(self.url + path, json={"model": "demo", **chat, **body}, timeout=cli_process.DEADLINE)

    def metrics(self) -> bytes:
        return httpx.get(self.url + "/metrics", timeout=cli_process.DEADLINE).content

    def request_count(self) -> float:
        return sample_values(self.metrics(), "http_requests_total").get(ENDPOINT, 0.0)

    def wait_for_processes(self, count: int) -> None:
        wait_until(
            lambda: len(self.processes_with_socket(psutil.CONN_LISTEN)) == count,
            f"{count} processes listen",
            cli_process.DEADLINE,
        )

    def processes_with_socket(self, status: str) -> set[int]:
        """The processes that have a socket on the port in this state."""
        port = int(self.url.rpartition(":")[2])
        return {
            child.pid
            for child in self.children()
            for link in _sockets(child)
            if link.status == status and link.laddr.port == port
        }


def _sockets(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiProcessServer]:
    folder = tmp_path_factory.mktemp("fleet")
    accounts = f'[accounts]\npath = "{folder / "accounts.sqlite"}"\n'
    with cli_process.serve(folder, "--workers", "2", config=CONFIG + accounts) as server:
        cluster = MultiProcessServer(server)
        cluster.wait_for_processes(2)
        yield cluster


def test_metrics_are_the_sum_of_all_processes(cluster: MultiProcessServer):
    before = cluster.request_count()
    assert {cluster.post().status_code for _ in range(REQUESTS)} == {200}
    assert [cluster.request_count() - before for _ in range(6)] == [REQUESTS] * 6, "in every process"


def test_connections_are_distributed_over_the_processes(cluster: MultiProcessServer):
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=cluster.url)) for _ in range(REQUESTS)]
        assert {client.get("/health/live").status_code for client in clients} == {200}
        assert len(cluster.processes_with_socket(psutil.CONN_ESTABLISHED)) == 2


def test_a_stored_response_is_continued_by_any_process(cluster: MultiProcessServer):
    first = cluster.post("/v1/responses", input="hi").json()
    for _ in range(8):
        reply = cluster.post("/v1/responses", input="and then?", previous_response_id=first["id"])
        assert reply.status_code == 200, reply.text
        found = httpx.get(f"{cluster.url}/v1/responses/{reply.json()['id']}")
        assert found.json()["previous_response_id"] == first["id"]


def test_keys_are_created_and_revoked_in_all_processes_at_once(cluster: MultiProcessServer):
    keys = f"{cluster.url}/v1/admin/keys"
    assert {httpx.post(keys, json={"name": "boss", "admin": True}).status_code for _ in range(8)} == {403}
    roles = {httpx.get(f"{cluster.url}/v1/admin/role", headers=cluster.owner).json()["role"] for _ in range(8)}
    assert roles == {"owner"}, "all processes know the token"
    boss = httpx.post(keys, json={"name": "boss", "admin": True}, headers=cluster.owner).json()
    headers = {"x-api-key": boss["secret"]}

    def statuses(secret: str) -> set[int]:
        """Each on a new connection."""
        return {httpx.get(f"{cluster.url}/v1/models", headers={"x-api-key": secret}).status_code for _ in range(16)}

    try:
        assert statuses("") == {401}
        made = httpx.post(keys, json={"name": "team"}, headers=headers).json()
        assert statuses(made["secret"]) == {200}
        assert httpx.delete(f"{keys}/{made['id']}", headers=headers).status_code == 200
        assert statuses(made["secret"]) == {401}
    finally:
        httpx.delete(f"{keys}/{boss['id']}", headers=headers)
    assert statuses("") == {200}


def test_a_budget_holds_for_parallel_requests_to_all_processes(tmp_path: Path):
    settings = f"""[[keys]]
name = "poor"
key = "sk-poor"
token_budget = 500
[accounts]
path = "{tmp_path / "accounts.sqlite"}"
"""
    script = CONFIG.replace('{ text = "Hello there." }', "{ tokens = 120 }")
    with cli_process.serve(tmp_path, "--workers", "4", config=script + settings) as server:
        many = MultiProcessServer(server)
        many.wait_for_processes(4)

        def ask(number: int) -> httpx.Response:
            body = {"model": "demo", "messages": [{"role": "user", "content": f"number {number}"}]}
            headers = {"authorization": "Bearer sk-poor"}
            return httpx.post(many.url + CHAT, json=body, headers=headers, timeout=cli_process.DEADLINE)

        with ThreadPoolExecutor(60) as threads:
            replies = list(threads.map(ask, range(60)))
        assert {reply.status_code for reply in replies} == {200, 429}
        used = sum(reply.json()["usage"]["total_tokens"] for reply in replies if reply.status_code == 200)
        assert 0 < used <= 500
        while (reply := ask(60)).status_code == 200:  # what the others did not use is free again
            used += reply.json()["usage"]["total_tokens"]
        assert 490 <= used <= 500
        assert reply.json()["error"]["code"] == "insufficient_quota"


def test_a_killed_process_is_replaced_and_loses_no_metrics(cluster: MultiProcessServer):
    for _ in range(REQUESTS):
        cluster.post()
    before = cluster.request_count()
    killed = cluster.children()[0]
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(
        lambda: killed.pid not in {child.pid for child in cluster.children()},
        "the process is gone",
        cli_process.DEADLINE,
    )
    assert cluster.post().status_code == 200, "the other process serves meanwhile"
    cluster.wait_for_processes(2)
    assert cluster.request_count() == before + 1
    for _ in range(REQUESTS):
        cluster.post()
    assert cluster.request_count() == before + 1 + REQUESTS


def test_sigterm_ends_all_processes_and_their_streams(tmp_path: Path):
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "endless"}]}
    with cli_process.serve(tmp_path, "--workers", "2", config=CONFIG) as server:
        cluster = MultiProcessServer(server)
        cluster.wait_for_processes(2)
        children = cluster.children()
        with httpx.stream("POST", cluster.url + CHAT, json=body, timeout=cli_process.DEADLINE) as reply:
            lines = reply.iter_lines()
            while "so far" not in next(lines):
                pass
            assert server.stop() == 0, "all processes stopped by themselves"
            rest = "\n".join(lines)
    assert "the server is shutting down" in rest
    assert not [child for child in children if child.is_running()], "no orphans"


def test_worker_processes_die_with_their_parent(tmp_path: Path):
    with cli_process.serve(tmp_path, "--workers", "2", config=CONFIG) as server:
        cluster = MultiProcessServer(server)
        cluster.wait_for_processes(2)
        children = cluster.children()
        server.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=cli_process.DEADLINE)
    assert (len(gone), alive) == (2, [])


def test_engines_without_weights_stay_in_the_gateways_beside_a_model_with_weights(tmp_path: Path):
    """Each gateway answers by itself; only the model with weights has a worker, which all of them share."""
    tiny = f'[models.tiny]\nbackend = "llama_cpp"\npath = "{write_model(tmp_path / "tiny.gguf")}"\nn_ctx = 256\n'
    with cli_process.serve(tmp_path, "--workers", "2", config=CONFIG + tiny) as server:
        both = MultiProcessServer(server)
        both.wait_for_processes(2)
        wait_until(
            lambda: httpx.get(both.url + "/health/ready").status_code == 200, "both are loaded", cli_process.DEADLINE
        )
        assert {both.post().json()["choices"][0]["message"]["content"] for _ in range(8)} == {"Hello there."}
        completion = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
        assert {both.post("/v1/completions", **completion).status_code for _ in range(8)} == {200}
        workers = [child for child in both.children() if "modelyard.workers.worker_process" in child.cmdline()]
        assert len(workers) == 1
        models = httpx.get(both.url + "/v1/admin/models", headers=both.owner).json()["data"]
        assert {model["id"]: model["state"] for model in models} == {"demo": "ready", "tiny": "ready"}
        for name in ("demo", "tiny"):
            done = httpx.post(f"{both.url}/v1/admin/models/{name}/load", headers=both.owner)
            assert done.status_code == 200, done.text
        body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "endless"}]}
        with httpx.stream("POST", both.url + CHAT, json=body, timeout=cli_process.DEADLINE) as reply:
            lines = reply.iter_lines()
            while "so far" not in next(lines):
                pass
            live = [httpx.get(both.url + "/v1/admin/requests", headers=both.owner).json()["live"] for _ in range(4)]
            assert [[request["model"] for request in each] for each in live] == [["demo"]] * 4, "any process knows it"
