"""One workbench for several gateway processes: every process serves the same page."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from modelyard.core.errors import Unavailable
from modelyard.processes.supervisor import FOLDER_VARIABLE, INDEX_VARIABLE
from modelyard.workbench.peer_proxy import WorkbenchProxy, host_socket_path, is_host_process, process_socket_path
from tests.cli_process import DEMO, serve

POLLING = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=polling"


def test_sockets_are_beside_the_supervisors_and_the_first_process_is_the_host() -> None:
    assert host_socket_path({}) == process_socket_path({}) == ""
    assert is_host_process({})
    env = {FOLDER_VARIABLE: "/run/yard", INDEX_VARIABLE: "1"}
    assert host_socket_path(env) == "/run/yard/workbench"
    assert process_socket_path(env) == "/run/yard/workbench-1"
    assert not is_host_process(env)
    assert is_host_process({**env, INDEX_VARIABLE: "0"})


def test_a_page_works_whichever_process_gets_its_next_request(tmp_path: Path) -> None:
    """Every call is a new connection, and the kernel distributes connections over both processes."""
    with serve(tmp_path, *DEMO, "--workers", "2") as running:
        running.until_count("the model demo is ready", 2)
        for _ in range(6):
            assert httpx.get(running.url + "/workbench").status_code == 200
            opened = httpx.get(running.url + POLLING, headers={"origin": running.url})
            path = f"{running.url}{POLLING}&sid={json.loads(opened.text[1:])['sid']}"
            assert httpx.post(path, content=b"40").text == "OK"
            assert httpx.get(path).text.startswith("40{")
        foreign = httpx.post(running.url + POLLING, headers={"origin": "http://evil.example"}, content=b"40")
        assert foreign.status_code == 403
        assert running.stop() == 0


async def test_a_host_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    proxy = WorkbenchProxy(str(tmp_path / "missing"))
    scope = {"type": "http", "method": "GET", "path": "/workbench", "query_string": b"", "headers": []}
    with pytest.raises(Unavailable, match="hosts the workbench does not answer"):
        await proxy(scope, None, None)  # type: ignore[arg-type]
    await proxy.close()
