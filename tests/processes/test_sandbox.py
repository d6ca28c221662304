"""The pool of child processes: limits that the kernel enforces, no files, no network, no secrets, turns for clients."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modelyard.core.errors import InvalidRequest, Overloaded, Unavailable
from modelyard.processes import sandbox
from modelyard.processes.sandbox import Sandbox, Stopped, current_client
from tests.e2e.helpers import wait_until
from tests.processes import sandbox_jobs as jobs


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Its children find the functions of these tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("MODELYARD_API_KEY", "sk-secret")
    pool = Sandbox(2)
    yield pool
    pool.close()


def children() -> list[psutil.Process]:
    """Of the zygote: those that work."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [process for process in found if process.ppid() != os.getpid()]


def test_a_result_of_any_size_comes_back(pool: Sandbox) -> None:
    value = {"text": "Grüße", "data": bytes(5_000_000), "numbers": [1, 2.5, None]}
    assert pool.call(jobs.echo, value) == value


def test_jobs_run_in_a_server_with_more_than_a_thousand_clients(pool: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    clients = [os.dup(0) for _ in range(1024)]
    try:
        assert pool.call(jobs.echo, "Hi") == "Hi"
    finally:
        for client in clients:
            os.close(client)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_refusal_is_the_functions_own(pool: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="no such thing") as caught:
        pool.call(jobs.refuse)
    assert (caught.value.code, caught.value.param) == ("no_thing", "thing")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (jobs.spin, "more than 1 s of CPU time"),
        (jobs.fill_memory, "more than 128 MiB of memory"),
        (jobs.sleep, r"longer than 0\.3 s"),
        (jobs.abort, "died"),
    ],
)
def test_a_child_that_exceeds_a_limit_is_ended_and_the_next_job_runs(pool: Sandbox, function: object, why: str) -> None:
    with pytest.raises(Stopped, match=why):
        pool.call(function)  # type: ignore[arg-type]
    assert pool.call(jobs.echo, 1) == 1
    wait_until(lambda: not children(), "no child is left")


def test_what_a_dead_child_printed_is_known(pool: Sandbox) -> None:
    with pytest.raises(Stopped) as caught:
        pool.call(jobs.abort)
    assert (caught.value.code, caught.value.output) == (-signal.SIGABRT, "stage one\n")


def test_a_child_opens_no_file_and_no_connection_and_knows_no_secret(pool: Sandbox) -> None:
    with pytest.raises(Stopped) as opened:
        pool.call(jobs.read_file, __file__)
    assert "Too many open files" in opened.value.output
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Stopped) as connected:
        pool.call(jobs.connect, server.getsockname()[1])
    assert "OSError" in connected.value.output
    assert "MODELYARD_API_KEY" not in pool.call(jobs.environment)


async def test_no_more_children_run_than_the_pool_has_and_each_works_for_one_job(pool: Sandbox) -> None:
    most = 0

    async def count() -> None:
        nonlocal most
        while True:
            most = max(most, len(children()))
            await asyncio.sleep(0.02)

    counting = asyncio.create_task(count())
    ids = await asyncio.gather(*(pool.run(jobs.process) for _ in range(10)))
    counting.cancel()
    assert len({id for id, _ in ids}) == 10
    assert len({parent for _, parent in ids}) == 1
    assert most <= 2


async def test_clients_take_turns(pool: Sandbox) -> None:
    ended: list[str] = []

    async def ask(client: str) -> None:
        current_client.set(client)
        await pool.run(jobs.process)
        ended.append(client)

    await asyncio.gather(*(ask("many") for _ in range(8)), ask("one"))
    assert ended.index("one") <= 4


async def test_one_client_may_not_fill_the_queue(pool: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_WAITING", 2)
    waiting = [asyncio.create_task(pool.run(jobs.sleep_long)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="send fewer at a time"):
        await pool.run(jobs.echo, 1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_child_that_nobody_waits_for_is_killed(pool: Sandbox) -> None:
    task = asyncio.create_task(pool.run(jobs.sleep_long))
    while not children():  # noqa: ASYNC110 - another process begins
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while children():  # noqa: ASYNC110 - another process ends
        await asyncio.sleep(0.01)


def test_a_zygote_that_was_killed_is_replaced(pool: Sandbox) -> None:
    (_, zygote) = pool.call(jobs.process)
    job = pool.submit(jobs.sleep_long, ())
    wait_until(psutil.Process(zygote).children, "a child")
    (child,) = psutil.Process(zygote).children()
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(Unavailable, match="try again"):
        job.future.result()
    assert pool.call(jobs.process)[1] != zygote
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its child died with it")


def test_a_closed_pool_starts_nothing_again(pool: Sandbox) -> None:
    waiting = [pool.submit(jobs.sleep_long, ()) for _ in range(4)]
    wait_until(children, "a child")
    pool.close()
    for job in waiting:
        with pytest.raises(Unavailable):
            job.future.result(60)
