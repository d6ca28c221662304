"""Servers that sleep instead of having ended: woken by the next load, and never forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from modelyard.engines.vllm_serve.dormitory import dormitory

from modelyard.core.events import collect_reply
from tests.engines.vllm_serve.helpers import behaviour, chat_request, read_events, recorded, running_engine


async def test_an_unloaded_server_sleeps_and_the_next_load_wakes_it(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    chosen = {"vllm_serve_sleep_s": 600, "vllm_serve_env": behaviour("", notes)}
    async with running_engine(**chosen) as first:
        pid = first.pid
    assert len(dormitory()) == 1
    async with running_engine(**chosen) as second:
        assert second.pid == pid
        assert len(dormitory()) == 0
        assert collect_reply(await read_events(second, chat_request())).text
    assert recorded(notes, "told") == ["/sleep?level=1", "/wake_up", "/sleep?level=1"]
    assert len(recorded(notes, "argv")) == 1
    async with running_engine(
        vllm_serve_sleep_s=600, vllm_serve_env=behaviour("", notes), vllm_dtype="float32"
    ) as other:
        assert other.pid != pid, "it is another model's"
    await dormitory().clear()
    assert len(dormitory()) == 0


async def test_a_sleeper_that_is_ended_in_its_sleep_is_started_anew() -> None:
    async with running_engine(vllm_serve_sleep_s=600) as first:
        pid = first.pid or 0
    os.kill(pid, signal.SIGKILL)
    async with running_engine(vllm_serve_sleep_s=600) as second:
        assert second.pid != pid
        assert collect_reply(await read_events(second, chat_request())).text
    await dormitory().clear()
    assert len(dormitory()) == 0


@pytest.mark.parametrize("chosen", [{"vllm_serve_sleep_s": 600, "vllm_serve_env": behaviour("cannot_sleep")}, {}])
async def test_one_that_cannot_sleep_or_is_not_to_is_ended_by_unloading(chosen: dict[str, object]) -> None:
    async with running_engine(**chosen) as it:  # type: ignore[arg-type]
        pid = it.pid or 0
    assert not psutil.pid_exists(pid)
    assert len(dormitory()) == 0


async def test_a_sleeper_ends_when_its_time_is_over() -> None:
    async with running_engine(vllm_serve_sleep_s=0.001) as it:
        pid = it.pid or 0
    for beds in list(dormitory()._beds.values()):
        for _, watch in list(beds):
            await watch
    assert not psutil.pid_exists(pid)
    assert len(dormitory()) == 0


async def test_one_that_has_died_is_not_put_to_sleep() -> None:
    async with running_engine(vllm_serve_sleep_s=600) as it:
        os.kill(it.pid or 0, signal.SIGKILL)
        await it.lost
    assert len(dormitory()) == 0
