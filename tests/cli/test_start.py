"""`modelyard start` on a machine with nothing, against a hub of this machine: a model, a server, an answer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from modelyard.config.library_models import machine_budget
from modelyard.library import catalogue
from modelyard.server.running_servers import running_servers
from tests.cli_process import DEADLINE, run
from tests.engines.llama_cpp import tiny_models
from tests.library.web import Hub, serve_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def env(tmp_path: Path, hub: Hub) -> Iterator[dict[str, str]]:
    """An empty home, except for the engine's library; what was started there ends."""
    from modelyard.library.cache_dir import cache_dir

    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "llama_cpp").symlink_to(cache_dir(os.environ) / "llama_cpp")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = {"MODELYARD_CACHE": str(cache), "MODELYARD_LIBRARY": "true", "HF_ENDPOINT": hub.url}
    yield {**own, "MODELYARD_HTTP__PORT": str(port), "HOME": str(tmp_path)}
    for server in running_servers({"MODELYARD_CACHE": str(cache)}):
        if server.process is not None:
            server.process.kill()


def url(env: dict[str, str]) -> str:
    return f"http://127.0.0.1:{env['MODELYARD_HTTP__PORT']}"


def offer(hub: Hub, name: str) -> None:
    model = catalogue.find(name)
    assert model is not None
    hub.repos[model.repo] = {f"{model.repo.partition('/')[2]}-Q4_K_M.gguf": tiny_models.greeter().read_bytes()}


def test_start_fetches_what_suits_serves_it_and_says_how_to_use_it(tmp_path: Path, hub: Hub, env: dict[str, str]):
    suited = catalogue.suggest("chat", machine_budget())
    assert suited is not None
    offer(hub, suited.name)
    started = run("start", "--yes", cwd=tmp_path, **env)
    assert started.returncode == 0, started.stderr
    assert suited.name in started.stdout
    assert f"base_url={url(env)}/v1  model={suited.name}" in started.stdout
    body = {"model": suited.name, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    reply = httpx.post(f"{url(env)}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert reply.status_code == 200
    fetched = list(hub.requested)
    again = run("start", "--yes", cwd=tmp_path, **env)
    assert "is here already" in again.stdout
    assert "A server runs already" in again.stdout
    assert hub.requested == fetched
    assert run("stop", "--server", cwd=tmp_path, **env).returncode == 0


def test_a_name_of_the_catalogue_that_the_hub_lacks_is_one_sentence(tmp_path: Path, env: dict[str, str]):
    failed = run("start", "qwen3:0.6b", cwd=tmp_path, **env)
    assert failed.returncode == 1
    assert "unsloth/Qwen3-0.6B-GGUF" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_run_keeps_its_server_for_the_next_command(tmp_path: Path, hub: Hub, env: dict[str, str]):
    offer(hub, "qwen3:0.6b")
    limit = ("--keep-alive", "1h")
    first = run("run", "qwen3:0.6b", "Hi", "--set", "max_tokens=4", *limit, cwd=tmp_path, **env)
    assert first.returncode == 0, first.stderr
    assert "the server stays 60 min" in first.stderr
    second = run("run", "qwen3:0.6b", "Hi", "--set", "max_tokens=4", "--json", *limit, cwd=tmp_path, **env)
    assert json.loads(second.stdout)["content"]
    assert "the server stays" not in second.stderr
    assert run("stop", "--server", cwd=tmp_path, **env).returncode == 0


def test_the_server_of_run_ends_when_nobody_asks(tmp_path: Path, hub: Hub, env: dict[str, str]):
    offer(hub, "qwen3:0.6b")
    ended = run("run", "qwen3:0.6b", "Hi", "--set", "max_tokens=4", "--keep-alive", "1s", cwd=tmp_path, **env)
    assert ended.returncode == 0, ended.stderr
    assert "the server stays 1.0 s after its last request" in ended.stderr
    for server in running_servers(env):  # none is left on a busy machine
        assert server.process is None or server.process.wait(DEADLINE) is None


def test_with_keep_alive_0_nothing_is_left(tmp_path: Path, hub: Hub, env: dict[str, str]):
    offer(hub, "qwen3:0.6b")
    ended = run("run", "qwen3:0.6b", "Hi", "--set", "max_tokens=4", "--keep-alive", "0", cwd=tmp_path, **env)
    assert ended.returncode == 0, ended.stderr
    assert "the server stays" not in ended.stderr
    deadline = time.monotonic() + DEADLINE
    while running_servers(env):
        assert time.monotonic() < deadline
        psutil.wait_procs([], 0.05)
