"""An engine in a child process: start, death, silence, close, and no leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, EmbeddingEngine, EngineSpec, Tokens
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.engines import llama_cpp
from modelyard.processes.child_process import ChildProcess
from modelyard.workers.definitions import define, engine_spec, message_spec, read_definition, write_definition
from modelyard.workers.messages import OpenEngine
from modelyard.workers.process_engine import ProcessTextEngine, create_process_engine
from modelyard.workers.transport import DealerSocket, HeartbeatConfig
from tests.e2e.helpers import wait_for_running
from tests.engines.reading import end, read, until
from tests.live_server import demo_config, live_server
from tests.workers.harness import DEADLINE_S, HANGING, LENIENT, STRICT, expect_silence, fake_spec, prompt
from tests.workers.harness import until as wait_until


@asynccontextmanager
async def open_engine(heartbeat: HeartbeatConfig = LENIENT, **options: Any) -> AsyncIterator[ProcessTextEngine]:
    engine = create_process_engine(fake_spec(**options), heartbeat)
    assert isinstance(engine, ProcessTextEngine)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


async def test_the_engine_runs_in_a_child_that_exits_with_it() -> None:
    async with open_engine(echo=True) as engine:
        pid = engine.pid
        assert pid is not None
        assert pid != os.getpid()
        assert psutil.Process(pid).ppid() == os.getpid()
        assert isinstance(engine, EmbeddingEngine)
        assert end(await read(engine.generate(prompt()))).reason == "stop"
        folder = Path(engine._folder.name)
    assert not psutil.pid_exists(pid)
    assert not await asyncio.to_thread(folder.exists)


async def test_what_its_process_logs_is_logged_here_with_its_process_id(caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine() as engine:
        stranger = DealerSocket(engine._session.endpoint, lambda _: None, lambda _: None)
        stranger.send(b"garbage")  # the worker logs why it refuses this
        await wait_until(lambda: any("refusing a peer" in record.message for record in caplog.records))
        await stranger.close()
        (line,) = (record for record in caplog.records if "refusing a peer" in record.message)
        assert line.name == "modelyard.workers.peer_server"
        assert line.fields["pid"] == engine.pid


async def test_a_killed_process_is_reported_with_its_cause_and_its_requests_end() -> None:
    async with open_engine(**HANGING) as engine:
        jobs = [engine.generate(prompt(f"{i}")) for i in range(4)]
        for job in jobs:
            await until(job, Tokens)
        os.kill(engine.pid, signal.SIGKILL)
        ends = [end(await read(job)) for job in jobs]
        assert {type(last.error) for last in ends} == {Unavailable}
        assert "SIGKILL" in engine.lost.result().message
        assert isinstance(end(await read(engine.generate(prompt()))).error, Unavailable)


async def test_a_stopped_process_is_detected_by_its_silence_and_killed() -> None:
    async with open_engine(**HANGING) as engine:
        job = engine.generate(prompt())
        await until(job, Tokens)
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)
        expect_silence(engine._session)
        last = end(await asyncio.wait_for(read(job), DEADLINE_S))
        assert isinstance(last.error, Unavailable)
        assert "silent" in last.error.message
        assert engine.lost.done()
    assert not psutil.pid_exists(pid)


async def test_a_silent_process_that_wants_a_core_is_not_lost_yet() -> None:
    """Other programs have the cores. The process of this test is stopped, and its times are made up."""
    async with open_engine(**HANGING) as engine:
        session, pid = engine._session, engine.pid
        job = engine.generate(prompt())
        await until(job, Tokens)
        session._core_seconds = partial(next, count())
        os.kill(pid, signal.SIGSTOP)
        expect_silence(session)
        await wait_until(lambda: session._monitor.missed > 2 * STRICT.worker_misses)
        assert not session.is_lost
        os.kill(pid, signal.SIGCONT)
        await wait_until(lambda: session._monitor.missed < STRICT.worker_misses)
        os.kill(pid, signal.SIGSTOP)
        last = end(await asyncio.wait_for(read(job), DEADLINE_S))  # but not for ever
        assert "silent" in last.error.message


async def test_a_process_that_is_stopped_wants_no_core_and_one_that_computes_does() -> None:
    child = await ChildProcess.start([sys.executable, "-c", "while True: pass"])
    try:
        before = child.core_seconds()
        await wait_until(lambda: child.core_seconds() > before + 0.05)
        child.signal(signal.SIGSTOP)
        await wait_until(lambda: child.core_seconds() == child.core_seconds())
        assert child.core_seconds() > before
    finally:
        child.signal(signal.SIGKILL)
        await asyncio.shield(child.ended)
    assert child.core_seconds() == 0.0


async def test_a_failing_open_raises_the_reason_and_leaves_no_process() -> None:
    for backend, spec_ in (
        ("fake", fake_spec(tokenizer_path="/nowhere")),
        ("llama_cpp", EngineSpec("m", llama_cpp.Options(path="/nowhere.gguf"), {"main": CacheInfo(64)})),
    ):
        engine = create_process_engine(replace(spec_, backend=backend), LENIENT)
        with pytest.raises(ModelyardError, match="nowhere"):
            await engine.open(lambda *_: None)
        pid = engine.pid
        await engine.close()
        assert not psutil.pid_exists(pid)


async def test_an_early_exit_is_explained_by_the_last_output(monkeypatch) -> None:
    from modelyard.workers import process_engine

    monkeypatch.setattr(process_engine, "worker_command", lambda *_: ["sh", "-c", "echo no such luck; exit 3"])
    engine = create_process_engine(fake_spec(), LENIENT)
    with pytest.raises(Unavailable, match="exit code 3: no such luck"):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_a_cancelled_open_leaves_no_process() -> None:
    engine = create_process_engine(fake_spec(), LENIENT)
    opening = asyncio.create_task(engine.open(lambda *_: None))
    await wait_until(lambda: engine.pid is not None)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await engine.close()
    assert not psutil.pid_exists(engine.pid)


async def test_opening_and_closing_leaks_no_file_descriptors() -> None:
    me = psutil.Process()

    async def cycle() -> None:
        async with open_engine(echo=True) as engine:
            await read(engine.generate(prompt()))

    await cycle()
    before = me.num_fds()
    for _ in range(2):
        await cycle()
    assert me.num_fds() <= before


@pytest.mark.parametrize(
    "options", [fake.Options(kind="chat"), fake.Options(script=[{"when": "a|b", "steps": [{"text": "x"}]}])]
)
def test_options_reach_the_process_through_its_file(options: fake.Options, tmp_path: Path) -> None:
    made = EngineSpec("m", options, {"main": CacheInfo(9, 2, "q8_0")}, ("text", "image"), backend="fake")
    write_definition(tmp_path / "engine", define(made))
    message = OpenEngine("e", message_spec(made))
    definition = read_definition(tmp_path / "engine")
    assert engine_spec(definition, message.spec) == made


def test_a_request_that_may_have_killed_its_process_is_not_sent_to_the_next_one() -> None:
    script = [{"when": "slow", "steps": [{"delay": 3600}]}, {"steps": [{"text": "Hello."}]}]
    config = demo_config(script, placement="process") | {"workers": {"patience": 1000}}
    with (
        live_server(config) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
        ThreadPoolExecutor(1) as executor,
    ):
        pid = _pid(client)
        pending = executor.submit(httpx.post, f"{served.url}/v1/chat/completions", json=_asked("slow"), timeout=60)
        wait_for_running(served, 1)
        assert client.post("/v1/chat/completions", json=_asked("hello")).status_code == 200  # so it has read both
        os.kill(pid, signal.SIGKILL)
        reply = pending.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_died")
        assert client.post("/v1/chat/completions", json=_asked("hello")).status_code == 200
        assert _pid(client) != pid


def test_a_request_that_its_process_never_read_is_sent_to_the_next_one() -> None:
    config = demo_config([{"steps": [{"text": "Hello."}]}], placement="process") | {"workers": {"patience": 1000}}
    with (
        live_server(config) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
        ThreadPoolExecutor(1) as executor,
    ):
        pid = _pid(client)
        os.kill(pid, signal.SIGSTOP)
        pending = executor.submit(httpx.post, f"{served.url}/v1/chat/completions", json=_asked("hello"), timeout=60)
        wait_for_running(served, 1)
        os.kill(pid, signal.SIGKILL)
        assert pending.result().status_code == 200
        assert _pid(client) != pid


def test_a_request_with_output_ends_with_an_error_when_its_process_is_killed() -> None:
    script = [
        {"when": "talk", "steps": [{"text": "so"}, {"hang": True}]},
        {"steps": [{"text": "Hello."}]},
    ]
    config = demo_config(script, placement="process") | {"workers": {"patience": 1000}}  # the machine may be busy
    with live_server(config) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        pid = _pid(client)
        with client.stream("POST", "/v1/chat/completions", json=_asked("talk", stream=True)) as answer:
            lines = answer.iter_lines()
            while "so" not in next(lines):
                pass
            os.kill(pid, signal.SIGKILL)
            rest = "".join(lines)
        assert '"error"' in rest
        assert "SIGKILL" in rest
        assert (
            client.post("/v1/chat/completions", json=_asked("hello")).json()["choices"][0]["message"]["content"]
            == "Hello."
        )
        assert _pid(client) != pid


def _pid(client: httpx.Client) -> int:
    model = client.get("/v1/admin/models/demo").json()
    return int(model["replicas"]["items"][0]["pid"])


def _asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "x", "messages": [{"role": "user", "content": text}], **fields}
