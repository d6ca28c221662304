"""A server that runs as our child: waited for, given up, explained."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from modelyard.engines.managed.listening import Folder, Listening, listening, private

from modelyard.core.errors import NotFound, Timeout, Unavailable
from modelyard.engines.managed.server import Program, Server

# Where a server of ours listens.


@pytest.mark.parametrize(
    ("at", "url"),
    [
        (Listening("/run/it.sock"), "http://localhost"),
        (Listening("127.0.0.1", 80), "http://127.0.0.1:80"),
        (Listening("::1", 80), "http://[::1]:80"),
    ],
)
def test_where_it_is_spoken_to(at: Listening, url: str) -> None:
    assert at.place("it", 1.0).base_url == url


def test_a_private_folder_is_nobody_elses_and_needs_no_key() -> None:
    with private("modelyard-test-") as name:
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
    folder = private("modelyard-test-")
    try:
        at = listening(folder, None, None)
        assert at.place("it", 1.0).socket == at.host == f"{folder.name}/server.sock"
        assert at.place("it", 1.0).headers == {}
        assert listening(folder, None, None, "mine").key == "mine"
    finally:
        folder.cleanup()


def test_an_address_has_a_port_and_a_key_of_its_own_each_time() -> None:
    one, two = (listening(None, None, None) for _ in range(2))
    assert one.host == "127.0.0.1"
    assert one.port
    assert one.key != two.key
    assert one.place("it", 1.0).headers == {"authorization": f"Bearer {one.key}"}
    assert listening(None, "::1", 8123, "mine") == Listening("::1", 8123, "mine")


PATIENT = "import signal; print('up', flush=True); signal.pause()"


def said(lines: Sequence[str]) -> str:
    return ", ".join(lines)


def program(code: str, folder: Folder | None = None) -> Program:
    return Program(
        name="it",
        loads="a model",
        argv=[sys.executable, "-c", code],
        env={},
        place=listening(folder, "127.0.0.1", 1).place("the server of 'm'", 1.0),
        reason=said,
        folder=folder,
    )


async def never() -> bool:
    return False


async def test_one_that_ends_before_it_is_ready_is_told_with_its_words() -> None:
    server = await Server.start(program("print('no such file'); exit(3)"))
    with pytest.raises(Unavailable, match=r"^it ended with exit code 3: no such file \(it was to load a model\)$"):
        await server.until(never, 60)
    assert server.death().message == "the server of 'm' ended with exit code 3: no such file"
    await server.stop()


async def test_one_that_takes_too_long_is_given_up() -> None:
    server = await Server.start(program(PATIENT))
    with pytest.raises(Timeout, match=r"not ready after 0\.001 s"):
        await server.until(never, 0.001)
    await server.stop()
    await server.stop()
    assert not psutil.pid_exists(server.child.pid)


async def test_its_folder_goes_with_it() -> None:
    folder = private("modelyard-test-")
    server = await Server.start(program("pass", folder))
    await server.stop()
    assert not psutil.pid_exists(server.child.pid)
    with pytest.raises(FileNotFoundError):
        psutil.disk_usage(folder.name)


async def test_its_folder_goes_where_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private("modelyard-test-")
    monkeypatch.setattr("modelyard.processes.child_process.die_with_parent", lambda *_, **__: ["/no/such/program"])
    with pytest.raises(NotFound, match="cannot start"):
        await Server.start(program("pass", folder))
    with pytest.raises(FileNotFoundError):
        psutil.disk_usage(folder.name)
