"""`serve --workers 2` with a real model: gateways, scheduler and worker are processes, and any of them may die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.short_model import short_model_file

CHAT = "/v1/chat/completions"


def config() -> str:
    return f"""
[models.small]
backend = "llama_cpp"
path = {json.dumps(str(short_model_file()))}
n_threads = 1

[caches.main]
model = "small"
n_ctx = 512
parallel = 2

[workers]
patience = 50
"""


class ServerProcesses:
    """The supervisor and its children: two gateways, the scheduler and one worker."""

    def __init__(self, server: cli_process.ServerProcess) -> None:
        self.url, self.supervisor = server.url, psutil.Process(server.process.pid)
        self.server = server

    def post(self, **fields: Any) -> httpx.Response:
        """On a new connection, so that any gateway may get it."""
        body = {"model": "small", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hi."}]}
        return httpx.post(self.url + CHAT, json=body | fields, timeout=cli_process.DEADLINE)

    def reply(self) -> str:
        response = self.post()
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def worker_pid(self) -> int:
        items = httpx.get(f"{self.url}/v1/admin/models/small", timeout=cli_process.DEADLINE).json()["replicas"]["items"]
        return int(items[0]["pid"])

    def all(self) -> set[psutil.Process]:
        """The worker is not a descendant of the supervisor if the scheduler that started it was killed."""
        return {*self.supervisor.children(recursive=True), psutil.Process(self.worker_pid())}

    def scheduler(self) -> psutil.Process:
        return next(each for each in self.with_argument("scheduler") if "--listen" in _command(each))

    def with_argument(self, argument: str) -> list[psutil.Process]:
        return [each for each in self.supervisor.children(recursive=True) if argument in _command(each)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=cli_process.DEADLINE).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with cli_process.serve(tmp_path_factory.mktemp("server"), "--workers", "2", config=config()) as server:
        wait_until(lambda: _is_ready(server.url), "the model is ready", cli_process.DEADLINE)
        yield ServerProcesses(server)


def test_all_gateways_use_one_worker(processes: ServerProcesses) -> None:
    assert len({processes.reply() for _ in range(6)}) == 1
    (worker,) = processes.with_argument("--exit-when-orphaned")
    assert processes.worker_pid() == worker.pid
    body = {"model": "small", "input": "Hi.", "max_output_tokens": 4}
    first = httpx.post(f"{processes.url}/v1/responses", json=body, timeout=cli_process.DEADLINE)
    for _ in range(4):
        assert httpx.get(f"{processes.url}/v1/responses/{first.json()['id']}").status_code == 200


def test_a_killed_worker_is_replaced_and_requests_wait_for_it(processes: ServerProcesses) -> None:
    """The request is sent when the worker may not have ended yet: it never reads it."""
    before = processes.reply()
    os.kill(processes.worker_pid(), signal.SIGKILL)
    assert processes.reply() == before


def test_a_killed_scheduler_is_replaced_requests_wait_for_it_and_the_model_stays_loaded(
    processes: ServerProcesses,
) -> None:
    before, worker = processes.reply(), processes.worker_pid()
    processes.scheduler().kill()
    assert processes.reply() == before
    assert processes.worker_pid() == worker


def test_the_slots_of_a_killed_gateway_become_free(processes: ServerProcesses) -> None:
    body = {"model": "small", "stream": True, "max_tokens": 400, "messages": [{"role": "user", "content": "Count."}]}
    with (
        httpx.Client(base_url=processes.url, timeout=cli_process.DEADLINE) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        port = int(processes.url.rpartition(":")[2])
        (gateway,) = (
            each
            for each in processes.with_argument("serve")
            if any(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port for c in each.net_connections("tcp"))
        )
        gateway.kill()
        gateway.wait(cli_process.DEADLINE)  # until then the kernel may still give it a connection, which dies with it
    assert [processes.post().status_code for _ in range(4)] == [200] * 4


def test_no_process_survives_a_killed_supervisor(tmp_path: Path) -> None:
    """Not even a worker that is still loading its model."""
    with cli_process.serve(tmp_path, "--workers", "2", config=config()) as server:
        supervisor = psutil.Process(server.process.pid)
        wait_until(
            lambda: len(supervisor.children(recursive=True)) == 4, "the worker has started", cli_process.DEADLINE
        )
        _check_all_exit(server, supervisor.children(recursive=True), signal.SIGKILL, -signal.SIGKILL)


def test_no_process_survives_a_stopped_supervisor(processes: ServerProcesses) -> None:
    """The last test of this module: it stops the shared server."""
    wait_until(lambda: len(processes.all()) == 4, "the killed gateway is back")
    _check_all_exit(processes.server, processes.all(), signal.SIGTERM, 0)


def _check_all_exit(
    server: cli_process.ServerProcess, children: Iterable[psutil.Process], number: int, exit_code: int
) -> None:
    server.process.send_signal(number)
    _, alive = psutil.wait_procs(children, timeout=cli_process.DEADLINE)
    assert alive == []
    assert server.process.wait(cli_process.DEADLINE) == exit_code
