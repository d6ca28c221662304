"""`modelyard launch` with a shell script as the agent: what it gets, how it ends, and when a server is started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.cli.app import app
from modelyard.config import library_models
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unauthenticated, Unavailable
from modelyard.launch.agents import AGENTS
from modelyard.launch.launch import (
    BACKGROUND_MODEL,
    LaunchOptions,
    TargetServer,
    choose_model,
    launch_agent,
    launch_script,
    pull_command,
)
from modelyard.launch.plan import PLACEHOLDER_KEY, LaunchTarget
from modelyard.library.variants import MemoryBudget
from modelyard.server.running_servers import BackgroundServer
from tests.cli_process import DEADLINE, DEMO, MODELYARD, environment
from tests.engines.llama_cpp import tiny_models
from tests.live_server import demo_config, live_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(demo_config()) as served:
        yield served.url


def install(folder: Path, script: str, name: str = "claude") -> dict[str, str]:
    """An environment in which the agent's program is this shell script."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return environment(PATH=f"{program.parent}:{os.environ['PATH']}", MODELYARD_CACHE=str(folder / "cache"))


def test_agent_gets_variables_and_arguments_from_a_running_server(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    env = install(tmp_path, 'echo "$ANTHROPIC_BASE_URL" "${ANTHROPIC_API_KEY-unset}" "$@"; exit 7')
    notes: list[str] = []
    options = LaunchOptions(agent="claude", url=url, arguments=("-p", "a b"))
    assert launch_agent(options, {**env, "ANTHROPIC_API_KEY": "x"}, notes.append) == 7
    assert capfd.readouterr().out == f"{url} unset --model demo --bare -p a b\n"
    assert "bare mode" in notes[0]
    assert (tmp_path / "cache" / "launch" / "claude" / ".claude.json").is_file()
    assert httpx.get(url + "/health/live").status_code == 200


def test_without_keep_alive_a_server_runs_as_long_as_the_agent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a project folder with another program's settings, on the user's own configuration."""
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "project" / "config").mkdir(parents=True)
    (tmp_path / "project" / "config" / "settings.json").write_text('{"theme": "dark"}')
    (tmp_path / "home" / "modelyard").mkdir(parents=True)
    (tmp_path / "home" / "modelyard" / "modelyard.toml").write_text(Path(DEMO[1]).read_text())
    monkeypatch.chdir(tmp_path / "project")
    env = install(tmp_path, 'echo "$OPENAI_API_BASE"', "aider") | {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    notes: list[str] = []
    options = LaunchOptions(agent="aider", url=url, keep_alive_s=0)
    assert launch_agent(options, env, notes.append) == 0
    assert capfd.readouterr().out == f"{url}/v1\n"
    log = (tmp_path / "cache" / "launch" / "server.log").read_text()
    assert log.count("settings.json is ignored") == 1
    assert "starting a server" in notes[0]
    assert not any("the server stays" in note for note in notes)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_server_that_stays_for_the_next_agent_says_so(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    env = install(tmp_path, 'echo "$OPENAI_API_BASE"', "aider")
    command = [*MODELYARD, "launch", "aider", "--url", url, "--config", DEMO[1], "--keep-alive", "1s"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == f"{url}/v1\n"
    assert "the server stays 1.0 s after its last request" in " ".join(done.stderr.split())


def test_server_that_fails_to_start_is_reported_with_its_last_log_line(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("models = 3\n")
    env = install(tmp_path, "echo never")
    options = LaunchOptions(agent="claude", url=f"http://127.0.0.1:{free_port()}", config=config)
    with pytest.raises(Unavailable, match=r"the server exited before it was ready \(.+server\.log\): .*models"):
        launch_agent(options, env, lambda _: None)


def test_command_forwards_signals_and_exits_as_a_shell_does(url: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    env = install(tmp_path, f'echo "$$ $@" > "{started}.new"; mv "{started}.new" "{started}"; exec sleep 600')
    command = [*MODELYARD, "launch", "claude", "--url", url, "--", "-p", "hi"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True)
    deadline = time.monotonic() + DEADLINE
    while not started.exists():
        assert time.monotonic() < deadline, "the agent did not start"
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)  # only to the launcher: a terminal sends it to the agent as well
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 128 + signal.SIGTERM
    pid, *arguments = started.read_text().split()
    assert arguments == ["--model", "demo", "--bare", "-p", "hi"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_print_shows_shell_commands_and_starts_and_writes_nothing(url: str, tmp_path: Path) -> None:
    env = {"MODELYARD_CACHE": str(tmp_path)}
    printed = CliRunner().invoke(app, ["launch", "claude", "--print", "--url", url, "--", "--resume"], env=env)
    assert printed.exit_code == 0, printed.output
    assert f"export ANTHROPIC_BASE_URL={url}\n" in printed.stdout
    assert printed.stdout.endswith("\nclaude --model demo --bare --resume\n")
    assert list(tmp_path.iterdir()) == []


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    nothing = f"http://127.0.0.1:{free_port()}"
    env = {"MODELYARD_CACHE": str(tmp_path)}
    stopped = CliRunner().invoke(app, ["launch", "claude", "--print", "--url", nothing], env=env)
    assert stopped.exit_code == 1
    assert "start one with: modelyard serve" in " ".join(stopped.stderr.split())
    with pytest.raises(InvalidRequest, match="unknown agent 'emacs'; choose one of aider, claude"):
        launch_agent(LaunchOptions(agent="emacs", url=nothing), {}, lambda _: None)
    env = {"PATH": str(tmp_path), "MODELYARD_CACHE": str(tmp_path)}
    with pytest.raises(NotFound, match="Codex is not installed; install it with: npm install -g @openai/codex"):
        launch_agent(LaunchOptions(agent="codex", url=nothing), env, lambda _: None)


# What the launcher learns from a running server, and the errors for a server that is unusable.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def url_server() -> Iterator[str]:
    config = demo_config()
    config["models"]["demo"]["aliases"] = ["team/demo"]
    with live_server(config) as served:
        yield served.url


def target(url_server: str, model: str | None = None, key: str | None = None) -> LaunchTarget:
    with closing(TargetServer(url_server, key)) as server:
        return server.launch_target(model)


def test_target_is_the_first_model_with_its_window_and_a_background_model(url_server: str) -> None:
    assert target(url_server + "/") == LaunchTarget(
        url=url_server,
        model="demo",
        window=4096,
        background=BACKGROUND_MODEL,
        key=PLACEHOLDER_KEY,
        capabilities=("completion", "chat", "tools", "insert", "thinking"),
    )


def test_target_may_be_any_name_that_the_server_resolves(url_server: str) -> None:
    for name in ("team/demo", "claude-anything"):
        found = target(url_server, name)
        assert (found.model, found.window) == (name, 4096)


def test_window_is_the_window_of_the_cache_that_the_name_is_routed_to() -> None:
    config = demo_config()
    config["routes"] = [{"match": "*", "cache": "fast"}]
    with live_server(config) as served:
        assert target(served.url, "demo").window == 2048


def test_background_model_is_the_model_itself_if_a_default_answers_to_every_name() -> None:
    config = demo_config()
    config["routes"], config["default_model"] = [], "demo"
    with live_server(config) as served:
        assert target(served.url).background == "demo"


def test_background_model_is_the_model_itself_without_a_route() -> None:
    config = demo_config()
    config["routes"] = [{"match": "demo", "cache": "main"}]
    with live_server(config) as served:
        assert target(served.url).background == "demo"
        with pytest.raises(NotFound, match="demo"):
            target(served.url, "unknown")


def test_key_is_sent_and_a_wrong_key_is_refused() -> None:
    with live_server({**demo_config(), "keys": [{"name": "ada", "key": "sk-right"}]}) as served:
        assert target(served.url, key="sk-right").key == "sk-right"
        with pytest.raises(Unauthenticated):
            target(served.url, key="sk-wrong")


def test_model_that_fails_to_load_is_an_error() -> None:
    config = demo_config()
    config["models"]["demo"]["tokenizer_path"] = "/nowhere/tokenizer.json"
    with live_server(config) as served, pytest.raises(ModelyardError):
        target(served.url)


# The model that suits an agent.


def card(name: str, window: int | None, *capabilities: str, state: str = "ready") -> dict[str, Any]:
    return {"id": name, "context_length": window, "capabilities": list(capabilities), "state": state}


CHAT = ("completion", "chat", "tools")


@pytest.mark.parametrize(
    ("cards", "agent", "chosen"),
    [
        ([card("embed", 512, "embedding"), card("chat", 65_536, *CHAT)], "codex", "chat"),
        ([card("small", 8192, *CHAT), card("large", 65_536, *CHAT)], "codex", "large"),
        ([card("small", 8192, *CHAT), card("large", 65_536, *CHAT)], "aider", "small"),
        ([card("cold", 65_536, *CHAT, state="stopped"), card("warm", 65_536, *CHAT)], "codex", "warm"),
        ([card("cold", 65_536, *CHAT, state="stopped"), card("warm", 4096, *CHAT)], "codex", "cold"),
        ([card("remote", None, *CHAT)], "codex", "remote"),
        ([card("small", 4096, *CHAT), card("larger", 8192, *CHAT)], "qwen", "larger"),
        (
            [card("base", 8192, "completion", "insert"), card("translator", 8192, "completion", "chat")],
            "aider",
            "translator",
        ),
        ([card("translator", 65_536, "completion", "chat")], "codex", None),
        ([card("base", 65_536, "completion")], "aider", None),
        ([card("of an earlier version", 8192, "completion", "tools")], "aider", "of an earlier version"),
        ([card("embed", 512, "embedding")], "aider", None),
        (
            [{"id": "of an earlier version", "context_length": 65_536, "state": "ready"}],
            "codex",
            "of an earlier version",
        ),
    ],
)
def test_the_first_model_that_does_what_the_agent_needs_is_chosen(
    cards: list[dict[str, Any]], agent: str, chosen: str | None
) -> None:
    assert choose_model(cards, AGENTS[agent]) == chosen


def card(name: str, window: int | None, state: str = "ready", *capabilities: str) -> dict[str, Any]:
    return {"id": name, "context_length": window, "state": state, "capabilities": capabilities or ("chat", "tools")}


def test_claude_code_gets_the_model_in_which_it_works_well_not_the_one_in_which_it_only_starts() -> None:
    small, coder, middle = card("chat-8k", 8192), card("coder", 131_072, "unloaded"), card("mid", 40_000)
    assert choose_model([small, coder, middle], AGENTS["claude"]) == "coder"
    assert choose_model([small, middle], AGENTS["claude"]) == "mid"
    assert choose_model([small], AGENTS["claude"]) == "chat-8k"
    assert choose_model([card("a", 70_000, "unloaded"), card("b", 70_000)], AGENTS["claude"]) == "b"
    assert choose_model([card("smollm2", 131_072), card("real", 131_072, "unloaded")], AGENTS["claude"]) == "real"
    assert choose_model([card("blind", 131_072, "ready", "chat"), small], AGENTS["claude"]) == "chat-8k"


def test_the_users_own_settings_stay_in_use_where_variables_name_the_server(url: str, tmp_path: Path) -> None:
    env = {"MODELYARD_CACHE": str(tmp_path)}
    for agent, private in (("claude", "CLAUDE_CONFIG_DIR"), ("codex", "CODEX_HOME"), ("goose", "GOOSE_PATH_ROOT")):
        printed = CliRunner().invoke(app, ["launch", agent, "--print", "--keep-my-config", "--url", url], env=env)
        assert printed.exit_code == 0, printed.stderr
        assert url in printed.stdout
        assert private not in printed.stdout
    refused = CliRunner().invoke(app, ["launch", "gemini", "--print", "--keep-my-config", "--url", url], env=env)
    assert refused.exit_code == 2
    assert "takes its server from a settings file" in " ".join(refused.stderr.split())
    assert "claude" in refused.stderr


def test_a_server_without_a_suitable_model_is_an_error_with_the_command_that_fetches_one() -> None:
    config = demo_config()
    config["models"]["demo"]["prompt_format"] = "translategemma"
    with live_server(config) as served, pytest.raises(NotFound) as caught, closing(TargetServer(served.url)) as server:
        server.launch_target(None, agent=AGENTS["codex"])
    assert caught.value.message.startswith(
        f"no model of {served.url} calls tools, which Codex needs; fetch one: modelyard pull "
    )


def test_a_model_that_does_not_suit_is_noted_with_the_command_that_fetches_one(url: str, tmp_path: Path) -> None:
    script = launch_script(LaunchOptions(agent="qwen", url=url, model="demo"), {"MODELYARD_CACHE": str(tmp_path)})
    assert "# demo has a window of 4096 tokens, and Qwen Code itself needs about 28000" in script
    assert "# A model that suits Qwen Code: modelyard pull " in script


def test_a_model_without_a_chat_template_is_not_chosen_and_is_noted_if_it_is_named(tmp_path: Path) -> None:
    base = {"path": str(tiny_models.base_coder()), "n_threads": 1, "n_ctx": 512}
    env = {"MODELYARD_CACHE": str(tmp_path)}
    with live_server({"models": {"base": base}}) as served:
        with pytest.raises(NotFound, match="chats, which aider needs"):
            launch_script(LaunchOptions(agent="aider", url=served.url), env)
        script = launch_script(LaunchOptions(agent="aider", url=served.url, model="base"), env)
    assert "# base has no chat template, so it refuses what aider sends." in script


def test_the_suggested_model_is_the_one_of_the_catalogue_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for ram, gpu, name in ((10 << 30, 0, "qwen3:4b"), (64 << 30, 0, "qwen3.6:35b"), (8 << 30, 20 << 30, "gpt-oss:20b")):
        monkeypatch.setattr(library_models, "machine_budget", lambda found=MemoryBudget(ram, gpu): found)
        assert pull_command("http://127.0.0.1:8000") == f"modelyard pull {name}"
    assert "on the machine of the server" in pull_command("http://10.0.0.1:8000")


def test_an_editor_needs_a_running_server_because_its_command_ends_at_once(tmp_path: Path) -> None:
    env = install(tmp_path, "exit 0", "zed")
    options = LaunchOptions(agent="zed", url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match=r"Zed stays open .+ start the server first, with modelyard start"):
        launch_agent(options, env, lambda _: None)


def test_an_editor_is_opened_with_the_server_in_its_settings(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    env = install(tmp_path, 'echo "$MODELYARD_API_KEY" "$@"', "zed")
    notes: list[str] = []
    assert launch_agent(LaunchOptions(agent="zed", url=url, arguments=(".",)), env, notes.append) == 0
    settings = json.loads((tmp_path / "config" / "zed" / "settings.json").read_text())
    assert settings["language_models"]["openai_compatible"]["Modelyard"]["api_url"] == f"{url}/v1"
    assert capfd.readouterr().out == f"{PLACEHOLDER_KEY} .\n"
    assert any("added the server to" in note for note in notes)


def test_closed_port_is_not_running_and_an_invalid_url_is_an_error() -> None:
    with closing(TargetServer(f"http://127.0.0.1:{free_port()}")) as server:
        assert not server.is_running()
    with closing(TargetServer("ftp://x")) as server, pytest.raises(InvalidRequest, match="is not a URL"):
        server.is_running()


def test_no_server_is_started_on_another_machine(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no server answers at http://10\.0\.0\.1:8000"):
        BackgroundServer("http://10.0.0.1:8000", None, {"MODELYARD_CACHE": str(tmp_path)})
