"""What an answer takes of a real server's CPU time."""

from __future__ import annotations

import json
import os
import socket

import pytest

from bench.pressed import cpu_s, pressed
from tests.serving import demo, serving

BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Number 00000000?"}]})


def test_the_clock_of_a_process_goes_on_with_its_work() -> None:
    before = cpu_s(os.getpid())
    sum(range(100_000))
    assert cpu_s(os.getpid()) > before


async def test_answers_are_counted_and_each_takes_some_time() -> None:
    with serving(demo()) as served:
        assert await pressed(int(served.url.rpartition(":")[2]), os.getpid(), BODY, 0.0, 0.0) > 0


async def test_a_server_that_refuses_is_told_of() -> None:
    wrong = BODY.replace('"demo"', "7")
    with serving(demo()) as served, pytest.raises(SystemExit, match=r"the server did not answer: HTTP/1\.1 400"):
        await pressed(int(served.url.rpartition(":")[2]), os.getpid(), wrong, 0.0, 0.0)


async def test_a_port_without_a_server_is_an_error_of_its_own() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await pressed(held.getsockname()[1], os.getpid(), BODY, 0.0)
