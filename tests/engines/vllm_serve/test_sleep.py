"""Sleeping servers: the next load wakes them up, and none is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from modelyard.core.events import collect_reply
from modelyard_vllm.serve.engine import sleeping_servers
from tests.engines.vllm_serve.helpers import behaviour, chat_request, read_events, recorded, running_engine


async def test_unloaded_server_sleeps_and_the_next_load_wakes_it_up(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    chosen = {"vllm_serve_sleep_s": 600, "vllm_serve_env": behaviour("", notes)}
    async with running_engine(**chosen) as first:
        pid = first.pid
    assert len(sleeping_servers()) == 1
    async with running_engine(**chosen) as second:
        assert second.pid == pid
        assert len(sleeping_servers()) == 0
        assert collect_reply(await read_events(second, chat_request())).text
    assert recorded(notes, "control") == ["/sleep?level=1", "/wake_up", "/sleep?level=1"]
    assert len(recorded(notes, "argv")) == 1
    async with running_engine(
        vllm_serve_sleep_s=600, vllm_serve_env=behaviour("", notes), vllm_dtype="float32"
    ) as other:
        assert other.pid != pid, "its settings differ"
    await sleeping_servers().clear()
    assert len(sleeping_servers()) == 0


async def test_server_that_exits_in_its_sleep_is_started_again() -> None:
    async with running_engine(vllm_serve_sleep_s=600) as first:
        pid = first.pid or 0
    os.kill(pid, signal.SIGKILL)
    async with running_engine(vllm_serve_sleep_s=600) as second:
        assert second.pid != pid
        assert collect_reply(await read_events(second, chat_request())).text
    await sleeping_servers().clear()
    assert len(sleeping_servers()) == 0


@pytest.mark.parametrize("chosen", [{"vllm_serve_sleep_s": 600, "vllm_serve_env": behaviour("cannot_sleep")}, {}])
async def test_server_that_cannot_or_must_not_sleep_is_stopped(chosen: dict[str, object]) -> None:
    async with running_engine(**chosen) as made:  # type: ignore[arg-type]
        pid = made.pid or 0
    assert not psutil.pid_exists(pid)
    assert len(sleeping_servers()) == 0


async def test_sleeping_server_is_stopped_after_its_time() -> None:
    async with running_engine(vllm_serve_sleep_s=0.001) as made:
        pid = made.pid or 0
    for servers in list(sleeping_servers()._servers.values()):
        for _, task in list(servers):
            await task
    assert not psutil.pid_exists(pid)
    assert len(sleeping_servers()) == 0


async def test_exited_server_is_not_put_to_sleep() -> None:
    async with running_engine(vllm_serve_sleep_s=600) as made:
        os.kill(made.pid or 0, signal.SIGKILL)
        await made.lost
    assert len(sleeping_servers()) == 0
