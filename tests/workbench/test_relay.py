"""One workbench for several gateway processes: whichever a visitor reaches, the page is the same one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from modelyard.core.errors import Unavailable
from modelyard.processes.supervisor import INDEX_VARIABLE, SOCKET_VARIABLE
from modelyard.workbench.relay import Relay, is_keeper, meeting_place
from tests.commands import DEMO, serve

POLLING = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=polling"


def test_a_fleet_meets_beside_its_own_socket_and_the_first_keeps_the_page() -> None:
    assert meeting_place({}) == ""
    assert is_keeper({})
    env = {SOCKET_VARIABLE: "/run/yard/hub", INDEX_VARIABLE: "1"}
    assert meeting_place(env) == "/run/yard/workbench"
    assert not is_keeper(env)
    assert is_keeper({**env, INDEX_VARIABLE: "0"})


def test_a_page_goes_on_whichever_process_gets_its_next_request(tmp_path: Path) -> None:
    """Every call is a connection of its own, and the system hands those out to both processes."""
    with serve(tmp_path, *DEMO, "--workers", "2") as running:
        running.until_said("the model demo is ready", 2)
        for _ in range(6):
            assert httpx.get(running.url + "/workbench").status_code == 200
            told = httpx.get(running.url + POLLING, headers={"origin": running.url})
            path = f"{running.url}{POLLING}&sid={json.loads(told.text[1:])['sid']}"
            assert httpx.post(path, content=b"40").text == "OK"
            assert httpx.get(path).text.startswith("40{")
        foreign = httpx.post(running.url + POLLING, headers={"origin": "http://evil.example"}, content=b"40")
        assert foreign.status_code == 403
        assert running.stop() == 0


async def test_a_keeper_that_is_not_up_is_told_of(tmp_path: Path) -> None:
    relay = Relay(str(tmp_path / "nobody"))
    scope = {"type": "http", "method": "GET", "path": "/workbench", "query_string": b"", "headers": []}
    with pytest.raises(Unavailable, match="keeps the workbench"):
        await relay(scope, None, None)  # type: ignore[arg-type]
    await relay.close()
