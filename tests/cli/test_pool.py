"""ps, stop, status and logs against a live server, and their sentences without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from modelyard.cli import app, console, pool
from modelyard.http.settings import HttpSettings
from modelyard.server.running_servers import RunningServer, announced, find_server, running_servers
from tests import cli_process
from tests.live_server import LiveServer, demo_config, live_server

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _separate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("MODELYARD_URL", "MODELYARD_API_KEY", "MODELYARD_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    for printer in (console.out, console.err):
        monkeypatch.setattr(printer, "_width", 200)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config()
    config["models"]["demo"] |= {"aliases": ["team/demo"], "idle_ttl_s": 600, "description": "Scripted"}
    config["models"]["spare"] = {"backend": "fake", "enabled": False, "autoload": True}
    with live_server(config) as running:
        yield running


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, arguments)


def send(url: str, text: str = "hi") -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body)


@pytest.mark.parametrize("command", [("ps",), ("status",), ("stop", "demo"), ("stop", "--server"), ("logs",)])
def test_without_a_server_each_command_is_one_sentence(command: tuple[str, ...]):
    shown = invoke(*command, "--url", NOWHERE)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == f"error no server answers at {NOWHERE}; start one with: modelyard serve\n"


def test_the_address_comes_from_the_configuration_even_if_it_has_mistakes(tmp_path: Path):
    (tmp_path / "modelyard.toml").write_text("[http]\nport = 9\n[htpp]\nx = 1\n")
    assert NOWHERE in invoke("status").stderr


def test_another_server_of_this_user_is_named():
    with announced(HttpSettings(), 4321):
        assert "one runs at http://127.0.0.1:4321: --url" in invoke("status", "--url", NOWHERE).stderr


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "file" / "cache"))
    shown = invoke("status", "--url", NOWHERE)
    assert (shown.exit_code, shown.stderr.count("\n")) == (1, 1)
    with announced(HttpSettings(), 4321):
        assert running_servers() == []


def test_something_else_on_the_port_is_one_sentence():
    shown = invoke("ps", "--url", "ftp://x")
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)


# --- ps and stop ------------------------------------------------------------------------------------------------------


def test_ps_lists_loaded_models_and_on_request_all(server: LiveServer):
    rows = [" ".join(line.split()) for line in invoke("ps", "--url", server.url).stdout.splitlines()]
    assert rows[0] == "model engine state memory context slots until"
    assert len(rows) == 2
    assert rows[1].startswith("demo fake ready")
    assert "4 × 4096, 2 × 2048 0/6 10 min idle" in rows[1]
    everything = invoke("ps", "--all", "--url", server.url).stdout
    assert "spare" in everything
    assert "on demand" in everything
    (row,) = json.loads(invoke("ps", "--json", "--url", server.url).stdout)
    assert (row["model"], row["state"]) == ("demo", "ready")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"state": "loading", "progress": 0.5}, ("loading 50 %", "10 min idle")),
        ({"last_used": 1000.0}, ("ready", "in 9 min")),
        ({"load_constraints": {"idle_ttl_s": None}}, ("ready", "you stop it")),
        ({"state": "failed", "reason": "no such file"}, ("failed", "no such file")),
    ],
)
def test_ps_tells_how_long_a_model_stays(state: dict[str, Any], expected: tuple[str, str]):
    base: dict[str, Any] = {
        "id": "m",
        "backend": "fake",
        "state": "ready",
        "reason": "",
        "progress": 1.0,
        "loads_on_request": False,
        "last_used": None,
        "queue": {"running": 0, "slots": 2},
        "caches": {"m": {"parallel": 2, "window": 64}},
        "memory": {"estimate": {"total": 5, "device": "cpu"}, "measured": None},
        "load_constraints": {"idle_ttl_s": 600.0},
    }
    row = pool.model_summary(base | state, now=1060.0)
    assert (row["state"], row["until"]) == expected
    is_loaded = row["state"] != "failed"
    assert (row["memory"], row["processor"]) == ((5, "CPU") if is_loaded else (None, None))
    assert row["context"] == "2 × 64"


def test_stop_unloads_by_name_or_alias_and_says_what_is_loaded(server: LiveServer):
    unknown = invoke("stop", "nobody", "--url", server.url)
    assert (unknown.exit_code, unknown.stderr) == (1, "error the server has no model 'nobody'; loaded: demo\n")
    assert invoke("stop", "team/demo", "--url", server.url).stdout == "demo is unloaded\n"
    assert server.status("demo").state == "stopped"
    assert "demo is not loaded" in invoke("stop", "demo", "--url", server.url).stderr
    assert "no model is loaded; the server has demo, spare" in invoke("ps", "--url", server.url).stdout
    httpx.post(f"{server.url}/v1/admin/models/demo/load")
    assert invoke("stop", "--all", "--force", "--url", server.url).stdout == "demo is unloaded\n"
    httpx.post(f"{server.url}/v1/admin/models/demo/load")


@pytest.mark.parametrize("arguments", [(), ("demo", "--server"), ("--all", "--server")])
def test_stop_needs_to_know_what(arguments: tuple[str, ...]):
    shown = invoke("stop", *arguments)
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_tells_what_the_server_does(server: LiveServer):
    send(server.url)
    with server.noted():
        shown = invoke("status", "--url", server.url).stdout
        found = json.loads(invoke("status", "--json", "--url", server.url).stdout)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert list(rows) == ["server", "models", "memory", "queue", "requests"]
    assert rows["server"].startswith(f"{server.url}, version ")
    assert "1 loaded (demo); 1 on demand (spare)" in rows["models"]
    assert "RAM free" in rows["memory"]
    assert rows["queue"] == "0 running, 0 waiting"
    assert "in the last hour, 0 failed" in rows["requests"]
    assert found["requests"]["last_hour"] >= 1


def test_status_of_another_users_server_tells_the_health_only(server: LiveServer):
    shown = invoke("status", "--url", server.url)
    assert (shown.exit_code, "only the owner" in shown.stdout) == (0, True)


def test_status_with_an_ordinary_key_tells_the_health_only(monkeypatch: pytest.MonkeyPatch):
    keys = [{"name": "boss", "key": "s3cret-boss", "admin": True}, {"name": "guest", "key": "s3cret-guest"}]
    with live_server({**demo_config(), "keys": keys}) as locked:
        shown = invoke("status", "--url", locked.url, "--key", "s3cret-guest")
        assert (shown.exit_code, "admin key" in shown.stdout) == (0, True)
        refused = invoke("ps", "--url", locked.url)
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
        monkeypatch.setenv("MODELYARD_ADMIN_KEY", "s3cret-boss")
        assert "demo" in invoke("ps", "--url", locked.url).stdout


# --- a server as a process --------------------------------------------------------------------------------------------


def test_a_server_is_seen_logged_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = str(tmp_path / "cache")
    with cli_process.serve(tmp_path, *cli_process.DEMO, MODELYARD_CACHE=cache) as process:
        (note,) = running_servers()
        assert (note.pid, note.url) == (process.process.pid, process.url)
        trace = send(process.url).headers["x-request-id"]
        lines = invoke("logs", "--url", process.url).stdout
        assert "listening on" in lines
        assert f"[{trace.removeprefix('req_')}] request method=POST path=/v1/chat/completions status=200" in lines
        only = invoke("logs", "--url", process.url, "--request", trace, "--json").stdout.splitlines()
        assert [json.loads(line)["path"] for line in only] == ["/v1/chat/completions"]
        assert invoke("logs", "--url", process.url, "--level", "error").stdout == ""
        assert len(invoke("logs", "--url", process.url, "-n", "2").stdout.splitlines()) == 2
        assert invoke("logs", "--url", process.url, "--model", "demo").exit_code == 0
        follower = subprocess.Popen(
            [*cli_process.MODELYARD, "logs", "-f", "-n", "0", "--url", process.url],
            env=cli_process.environment(MODELYARD_CACHE=cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with follower:
            assert follower.stdout is not None
            assert follower.stderr is not None
            stop = _keep_sending(process.url)
            assert "path=/v1/chat/completions" in follower.stdout.readline()
            stop()
            assert invoke("stop", "--server", "--url", process.url).exit_code == 0
            assert process.process.wait(cli_process.DEADLINE) == 0
            assert follower.wait(cli_process.DEADLINE) == 1
            assert follower.stderr.read() == f"error the server at {process.url} has ended\n"
    assert running_servers() == []


def _keep_sending(url: str) -> Any:
    """The follower starts at an unknown time: send until it has seen one."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.2):
            send(url)

    thread = threading.Thread(target=work)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join()

    return stop


def test_the_note_of_a_dead_process_or_of_another_with_its_id_is_dropped(tmp_path: Path):
    folder = tmp_path / "cache" / "run"
    with announced(HttpSettings(host="0.0.0.0"), 5):
        (own,) = running_servers()
        assert own.url == "http://127.0.0.1:5"
    reused = RunningServer(pid=os.getpid(), created=1.0, host="127.0.0.1", port=6)
    (folder / "server-1.json").write_bytes(msgspec.json.encode(reused))
    (folder / "server-2.json").write_text("{")
    assert running_servers() == []
    assert not (folder / "server-1.json").exists()


def test_a_token_is_for_the_server_at_exactly_this_address():
    with announced(HttpSettings(), 5, "the-token"):
        for url in ("http://127.0.0.1:5", "http://localhost:5/"):
            found = find_server(url)
            assert found is not None
            assert found.token == "the-token"
        for url in (
            "http://127.0.0.1:6",
            "https://127.0.0.1:5",
            "http://10.0.0.9:5",
            "http://[::1]:5",
            "http://x:y",
            "",
        ):
            assert find_server(url) is None, url


def test_ctrl_c_during_the_start_prints_no_traceback(tmp_path: Path):
    """At the first line of output, a warning about the configuration: modules are imported, nothing listens."""
    env = cli_process.environment(MODELYARD_CACHE=str(tmp_path))
    argv = [*cli_process.MODELYARD, "serve", "--port", "0", *cli_process.DEMO]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        told += process.stderr.read()
        code = process.wait(cli_process.DEADLINE)
    assert "Traceback" not in told
    assert code in (0, 130)


def test_ctrl_c_while_modules_are_imported_ends_at_once():
    """An exception in the middle of an import may come out as another one: pydantic's, for example."""
    code = """
import signal, sys
import modelyard.cli

class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
modelyard.cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")
