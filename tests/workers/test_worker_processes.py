"""`serve --workers 2` with a real model: gateways, scheduler and worker are processes, and any of them may die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import commands
from tests.e2e.servers import until
from tests.engines.llama_cpp.helpers import model_file

CHAT = "/v1/chat/completions"


def config() -> str:
    return f"""
[models.small]
backend = "llama_cpp"
path = {json.dumps(str(model_file()))}
n_threads = 1

[caches.main]
model = "small"
n_ctx = 512
parallel = 2

[workers]
patience = 50
"""


class ServerProcesses:
    def __init__(self, server: commands.Serving) -> None:
        self.url, self.parent = server.url, psutil.Process(server.process.pid)
        self.server = server

    def ask(self, **more: Any) -> httpx.Response:
        """On a connection of its own, so that any gateway may get it."""
        body = {"model": "small", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hi."}]}
        return httpx.post(self.url + CHAT, json=body | more, timeout=commands.DEADLINE)

    def text(self) -> str:
        answer = self.ask()
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def worker(self) -> int:
        """The pid of the process in which the model is."""
        items = httpx.get(f"{self.url}/v1/admin/models/small", timeout=commands.DEADLINE).json()["replicas"]["items"]
        return int(items[0]["pid"])

    def processes(self, word: str) -> list[psutil.Process]:
        return [each for each in self.parent.children(recursive=True) if word in _command(each)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=commands.DEADLINE).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def processes_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with commands.serve(tmp_path_factory.mktemp("processes_"), "--workers", "2", config=config()) as server:
        until(lambda: _is_ready(server.url), "the model is up", commands.DEADLINE)
        yield ServerProcesses(server)


def test_all_gateways_use_one_worker(processes_: ServerProcesses) -> None:
    assert len({processes_.text() for _ in range(6)}) == 1
    assert len(processes_.processes("--hired")) == 1
    assert processes_.worker() == processes_.processes("--hired")[0].pid
    first = httpx.post(
        f"{processes_.url}/v1/responses", json={"model": "small", "input": "Hi.", "max_output_tokens": 4}
    )
    for _ in range(4):
        assert httpx.get(f"{processes_.url}/v1/responses/{first.json()['id']}").status_code == 200


def _kill(find: Callable[[ServerProcesses], int]) -> Callable[[ServerProcesses], None]:
    return lambda processes_: os.kill(find(processes_), signal.SIGKILL)


@pytest.mark.parametrize(
    "kill",
    [
        _kill(lambda processes_: processes_.worker()),
        _kill(lambda processes_: next(p.pid for p in processes_.processes("scheduler") if "--listen" in _command(p))),
    ],
    ids=["worker", "scheduler"],
)
def test_a_part_that_is_killed_comes_back_and_requests_wait_for_it(
    processes_: ServerProcesses, kill: Callable[[ServerProcesses], None]
) -> None:
    text = processes_.text()
    kill(processes_)
    assert processes_.text() == text


def test_the_model_outlives_the_scheduler_that_loaded_it(processes_: ServerProcesses) -> None:
    processes_.text()
    before = processes_.worker()
    (scheduler,) = (each for each in processes_.processes("scheduler") if "--listen" in _command(each))
    scheduler.kill()
    processes_.text()
    assert processes_.worker() == before


def test_a_gateway_that_is_killed_leaves_its_places_to_others(processes_: ServerProcesses) -> None:
    with httpx.Client(base_url=processes_.url, timeout=commands.DEADLINE) as client:
        asked = {
            "model": "small",
            "stream": True,
            "max_tokens": 400,
            "messages": [{"role": "user", "content": "Count."}],
        }
        with client.stream("POST", CHAT, json=asked) as answer:
            lines = answer.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            port = int(processes_.url.rpartition(":")[2])
            (gateway,) = (
                each
                for each in processes_.processes("serve")
                if any(
                    c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port for c in each.net_connections("tcp")
                )
            )
            gateway.kill()
            gateway.wait(
                commands.DEADLINE
            )  # until it is gone the kernel may still give it a connection, which dies with it
    assert [processes_.ask().status_code for _ in range(4)] == [200] * 4


def test_nothing_stays_behind_when_the_parent_is_stopped_or_killed(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with commands.serve(tmp_path, "--workers", "2", config=config()) as server:
            until(lambda url=server.url: _is_ready(url), "the model is up", commands.DEADLINE)
            everybody = psutil.Process(server.process.pid).children(recursive=True)
            assert len(everybody) == 4
            server.process.send_signal(number)
            _, alive = psutil.wait_procs(everybody, timeout=commands.DEADLINE)
            assert alive == []
            assert server.process.wait(commands.DEADLINE) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
