"""Several gateway processes on one port: together they are one server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.telemetry.prometheus_text import sample_values

CONFIG = """
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
MANY = 40


class Fleet:
    def __init__(self, server: cli_process.ServerProcess) -> None:
        self.url, self._server = server.url, server
        self.parent = psutil.Process(server.process.pid)

    def children(self) -> list[psutil.Process]:
        return self.parent.children(recursive=True)

    def ask(self, path: str = CHAT, **body: Any) -> httpx.Response:
        """On a connection of its own: the kernel deals connections out, not requests."""
        chat = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
        return httpx.post(self.url + path, json={"model": "demo", **chat, **body}, timeout=cli_process.DEADLINE)

    def metrics(self) -> bytes:
        return httpx.get(self.url + "/metrics", timeout=cli_process.DEADLINE).content

    def answered(self) -> float:
        return sample_values(self.metrics(), "http_requests_total").get(ENDPOINT, 0.0)

    def are_up(self, count: int) -> None:
        wait_until(
            lambda: len(self.holding(psutil.CONN_LISTEN)) == count, f"{count} processes listen", cli_process.DEADLINE
        )

    def holding(self, status: str) -> set[int]:
        """The processes with a socket on the port in this state."""
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
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with cli_process.serve(tmp_path_factory.mktemp("fleet"), "--workers", "2", config=CONFIG) as server:
        fleet = Fleet(server)
        fleet.are_up(2)
        yield fleet


def test_every_scrape_shows_the_sum_of_all_processes(fleet: Fleet):
    before = fleet.answered()
    assert {fleet.ask().status_code for _ in range(MANY)} == {200}
    assert [fleet.answered() - before for _ in range(6)] == [MANY] * 6, "whichever process is asked"


def test_connections_are_dealt_out_among_the_processes(fleet: Fleet):
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=fleet.url)) for _ in range(MANY)]
        assert {client.get("/health/live").status_code for client in clients} == {200}
        assert len(fleet.holding(psutil.CONN_ESTABLISHED)) == 2


def test_a_conversation_goes_on_in_any_process(fleet: Fleet):
    first = fleet.ask("/v1/responses", input="hi").json()
    for _ in range(8):
        reply = fleet.ask("/v1/responses", input="and then?", previous_response_id=first["id"])
        assert reply.status_code == 200, reply.text
        found = httpx.get(f"{fleet.url}/v1/responses/{reply.json()['id']}")
        assert found.json()["previous_response_id"] == first["id"]


def test_a_killed_process_is_replaced_and_takes_no_count_with_it(fleet: Fleet):
    for _ in range(MANY):
        fleet.ask()
    before = fleet.answered()
    victim = fleet.children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: victim.pid not in {child.pid for child in fleet.children()}, "it is gone", cli_process.DEADLINE)
    assert fleet.ask().status_code == 200, "the other process answers meanwhile"
    fleet.are_up(2)
    assert fleet.answered() == before + 1
    for _ in range(MANY):
        fleet.ask()
    assert fleet.answered() == before + 1 + MANY


def test_a_signal_stops_all_of_them_and_their_streams_in_peace(tmp_path: Path):
    asked = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "endless"}]}
    with cli_process.serve(tmp_path, "--workers", "2", config=CONFIG) as server:
        fleet = Fleet(server)
        fleet.are_up(2)
        children = fleet.children()
        with httpx.stream("POST", fleet.url + CHAT, json=asked, timeout=cli_process.DEADLINE) as reply:
            lines = reply.iter_lines()
            while "so far" not in next(lines):
                pass
            assert server.stop() == 0, "nobody had to be killed"
            rest = "\n".join(lines)
    assert "the server is shutting down" in rest
    assert not [child for child in children if child.is_running()], "no orphans"


def test_a_fleet_whose_parent_is_killed_leaves_no_orphans(tmp_path: Path):
    with cli_process.serve(tmp_path, "--workers", "2", config=CONFIG) as server:
        fleet = Fleet(server)
        fleet.are_up(2)
        children = fleet.children()
        server.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=cli_process.DEADLINE)
    assert (len(gone), alive) == (2, [])
