"""`modelyard run`: on a running server, on a server of its own, with prompts, pipes and terminals."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from modelyard.cli import app, console
from modelyard.cli import run as run_module
from modelyard.core.errors import NotFound
from modelyard.library.model_files import LibraryEntry
from tests.cli.terminal import Terminal
from tests.cli.test_chat import SCRIPT
from tests.live_server import LiveServer, demo_config, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(SCRIPT)
    config["models"]["demo"]["aliases"] = ["small"]
    with live_server(config) as running:
        yield running


@pytest.fixture(autouse=True)
def _separate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(console.err, "_width", 200)


def run(server: LiveServer, *arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(app.app, ["run", "--url", server.url, *arguments], input=text)


# --- on a running server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "small"])
def test_one_prompt_is_answered_on_standard_output_alone(server: LiveServer, name: str):
    shown = run(server, name, "hi", "there")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "Hello there.\n", "")


def test_a_stopped_model_is_loaded_again(server: LiveServer):
    httpx.post(f"{server.url}/v1/admin/models/demo/unload")
    assert run(server, "small", "hi").stdout == "Hello there.\n"


def test_a_pipe_is_the_prompt_or_follows_it(server: LiveServer):
    assert run(server, "demo", text="think about it").stdout == "Forty-two.\n"
    assert run(server, "demo", "think", text="about it").stdout == "Forty-two.\n"
    assert "Let me see.\nForty-two.\n" in run(server, "demo", "think", "--thinking", "show").stdout


def test_json_has_the_parts_of_the_reply(server: LiveServer):
    found = json.loads(run(server, "demo", "think", "--json").stdout)
    assert (found["content"], found["reasoning"], found["finish_reason"]) == ("Forty-two.", "Let me see.", "end")
    assert found["usage"]["output"] > 0


def test_a_failed_reply_is_exit_code_1_and_one_sentence(server: LiveServer):
    shown = run(server, "demo", "fail")
    assert shown.exit_code == 1
    assert "out of [memory]" in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_no_prompt_without_a_terminal_is_a_usage_error(server: LiveServer):
    shown = run(server, "demo")
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "there is no prompt" in shown.stderr


def test_verbose_tells_the_speed_on_standard_error(server: LiveServer):
    shown = run(server, "demo", "hi", "-v")
    assert shown.stdout == "Hello there.\n"
    assert "tokens in" in shown.stderr


def test_a_model_that_the_server_lacks_is_looked_for_on_this_machine(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
):
    shown = run(server, "nobody-knows-it", "hi")
    assert shown.exit_code == 1
    assert "there is no model 'nobody-knows-it'" in shown.stderr
    assert "The server at" in shown.stderr
    monkeypatch.setattr(run_module, "pull_model", lambda source: LibraryEntry("tiny", "/tiny.gguf"))
    refused = run(server, "owner/tiny", "hi")
    assert refused.exit_code == 1
    assert "does not offer it: it has demo, small" in refused.stderr


def test_a_server_elsewhere_gets_the_name_and_nothing_is_fetched(server: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_module, "is_local", lambda url: False)
    monkeypatch.setattr(run_module, "pull_model", lambda source: pytest.fail("it was fetched"))
    shown = run(server, "owner/repo", "hi")
    assert (shown.exit_code, "has no model 'owner/repo'" in shown.stderr) == (1, True)


def test_ctrl_c_ends_a_single_reply_with_130(server: LiveServer, tmp_path: Path):
    argv = ("run", "demo", "endless", "--url", server.url)
    with Terminal(*argv, cwd=tmp_path) as terminal:
        terminal.wait_for("so far")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text


# --- on a server of its own -------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_without_a_server_one_is_started_which_ends_with_the_conversation_if_asked_to(tmp_path: Path):
    """A foreign config/settings.json is no obstacle, only the wanted model is loaded, and nothing is left behind."""
    port = free_port()
    (tmp_path / "config").mkdir()
    (tmp_path / "config/settings.json").write_text('{"theme": "dark"}')
    (tmp_path / "modelyard.toml").write_text(
        f"[http]\nport = {port}\n[models.other]\nbackend = 'fake'\n[models.demo]\nbackend = 'fake'\ntoken_delay = 0\n"
        "script = [{ steps = [{ text = 'Hello there.' }] }]\n"
    )
    cache = {"MODELYARD_CACHE": str(tmp_path / "cache")}
    with Terminal("run", "demo", "--keep-alive", "0", cwd=tmp_path, **cache) as terminal:
        terminal.wait_for("is ignored: it has no settings of Modelyard")
        terminal.wait_for("› ")
        listed = CliRunner().invoke(app.app, ["ps", "--all", "--json"])  # the address is in the configuration here
        states = {row["model"]: row["state"] for row in json.loads(listed.stdout)}
        assert states == {"other": "on demand", "demo": "ready"} or states["demo"].startswith("loading")
        terminal.type("hi\r")
        terminal.wait_for("Hello there.")
        terminal.wait_for("› ")
        terminal.type("/bye\r")
        assert terminal.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path):
    """Here because its certificate is not one."""
    (tmp_path / "c.pem").write_text("no certificate")
    http = f"port = {free_port()}\nssl_certfile = 'c.pem'\nssl_keyfile = 'c.pem'"
    (tmp_path / "modelyard.toml").write_text(f"[http]\n{http}\n[models.demo]\nbackend = 'fake'\n")
    shown = CliRunner().invoke(app.app, ["run", "demo", "hi"])
    assert shown.exit_code == 1
    assert "the server exited before it was ready" in shown.stderr.splitlines()[-1]
    assert "Traceback" not in shown.stderr


def test_another_program_on_the_usual_port_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It gets a port of its own, unless the address was named."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    def prepare(model: str, config: object) -> tuple[str, dict[str, str]]:
        raise NotFound("this far")

    monkeypatch.setattr(run_module, "_prepare", prepare)
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_address[1]
        (tmp_path / "modelyard.toml").write_text(f"[http]\nport = {port}\n")
        found = CliRunner().invoke(app.app, ["run", "demo", "hi"])
        named = CliRunner().invoke(app.app, ["run", "demo", "hi", "--url", f"http://127.0.0.1:{port}"])
        other.shutdown()
    assert isinstance(found.exception, NotFound)
    assert (named.exit_code, "is not Modelyard" in named.stderr) == (2, True)
