"""A server as a child process: where it listens, when it is ready, why it ended."""

from __future__ import annotations

import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from modelyard.core.errors import NotFound, Timeout, Unavailable
from modelyard.engines.managed import ListenAddress, ManagedServer, PrivateFolder, ServerCommand

WAITS = "import signal; print('up', flush=True); signal.pause()"


def private_folder() -> PrivateFolder:
    return tempfile.TemporaryDirectory(prefix="modelyard-test-")


def exists(folder: PrivateFolder) -> bool:
    return Path(folder.name).exists()


# --- addresses --------------------------------------------------------------------------------------------------------


def test_base_url_of_sockets_and_addresses() -> None:
    for address, url in [
        (ListenAddress("/run/it.sock"), "http://localhost"),
        (ListenAddress("127.0.0.1", 80), "http://127.0.0.1:80"),
        (ListenAddress("::1", 80), "http://[::1]:80"),
    ]:
        assert address.upstream("it", 1.0).base_url == url


def test_socket_is_in_a_private_folder_and_needs_no_key() -> None:
    folder = private_folder()
    with folder as name:
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        address = ListenAddress.choose(folder, None, None)
        assert address.upstream("it", 1.0).socket == address.host == f"{name}/server.sock"
        assert address.upstream("it", 1.0).headers == {}
        assert ListenAddress.choose(folder, None, None, "mine").key == "mine"


def test_tcp_address_has_a_free_port_and_a_new_key() -> None:
    one, two = (ListenAddress.choose(None, None, None) for _ in range(2))
    assert one.host == "127.0.0.1"
    assert one.port
    assert one.key != two.key
    assert one.upstream("it", 1.0).headers == {"authorization": f"Bearer {one.key}"}
    assert ListenAddress.choose(None, "::1", 8123, "mine") == ListenAddress("::1", 8123, "mine")


# --- life cycle -------------------------------------------------------------------------------------------------------


def join_lines(lines: Sequence[str]) -> str:
    return ", ".join(lines)


def command(code: str, folder: PrivateFolder | None = None) -> ServerCommand:
    return ServerCommand(
        name="it",
        model="a model",
        argv=[sys.executable, "-c", code],
        env={},
        address=ListenAddress.choose(folder, "127.0.0.1", 1).upstream("the server of 'm'", 1.0),
        failure_reason=join_lines,
        folder=folder,
    )


async def never() -> bool:
    return False


async def test_exit_before_readiness_is_reported_with_its_reason() -> None:
    server = await ManagedServer.start(command("print('no such file'); exit(3)"))
    with pytest.raises(Unavailable, match=r"^it ended with exit code 3: no such file \(while loading a model\)$"):
        await server.wait_ready(never, 60)
    assert server.exit_error().message == "the server of 'm' ended with exit code 3: no such file"
    await server.stop()


async def test_server_that_is_not_ready_in_time_is_given_up() -> None:
    server = await ManagedServer.start(command(WAITS))
    with pytest.raises(Timeout, match=r"not ready after 0\.001 s"):
        await server.wait_ready(never, 0.001)
    await server.stop()
    await server.stop()
    assert not psutil.pid_exists(server.child.pid)


async def test_stop_removes_the_folder() -> None:
    server = await ManagedServer.start(command("pass", folder := private_folder()))
    await server.stop()
    assert not psutil.pid_exists(server.child.pid)
    assert not exists(folder)


async def test_folder_is_removed_if_the_program_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.processes.child_process.die_with_parent", lambda *_, **__: ["/no/such/program"])
    with pytest.raises(NotFound, match="cannot start"):
        await ManagedServer.start(command("pass", folder := private_folder()))
    assert not exists(folder)
