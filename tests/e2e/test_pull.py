"""From `modelyard pull` to an answer: a local hub, a model of two layers, a server that is already running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

from modelyard.library import models
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.short_model import short_model_file
from tests.library.convert.tiny_models import write_model
from tests.library.web import Hub, serve_hub

_ASKS = 12  # as many as reach every gateway
REPO, FILE = "maker/Small-GGUF", "Small-Q4_1.gguf"
TOOL = {"name": "read_file", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}}


class PullableServer:
    """Two gateways and their scheduler, with a library of their own; `run` is another command of the same user."""

    def __init__(self, server: cli_process.ServerProcess, folder: Path, env: dict[str, str]) -> None:
        self.url, self._folder, self._env, self.cache = server.url, folder, env, env["MODELYARD_CACHE"]

    def run(self, *arguments: str) -> str:
        done = cli_process.run(*arguments, cwd=self._folder, **self._env)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def names(self) -> list[str]:
        """With a new connection, which any gateway may take."""
        found = httpx.get(f"{self.url}/v1/models", timeout=cli_process.DEADLINE).json()["data"]
        return [model["id"] for model in found]

    def ask(self, model: str) -> httpx.Response:
        body: dict[str, Any] = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=cli_process.DEADLINE)

    def is_unknown(self, model: str) -> bool:
        error: dict[str, Any] = self.ask(model).json().get("error", {})
        return error.get("code") == "model_not_found"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as running:
        data = short_model_file().read_bytes()
        running.repos[REPO] = {FILE: data, "Small-F16.gguf": data + bytes(100), "README.md": b"words"}
        yield running


@pytest.fixture(scope="module")
def server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullableServer]:
    folder = tmp_path_factory.mktemp("pull")
    env = {"MODELYARD_CACHE": str(folder / "cache"), "HF_ENDPOINT": hub.url, "MODELYARD_LIBRARY": "true"}
    config = f'[models.demo]\npath = "{write_model(folder / "tiny.gguf")}"\nenabled = false\nautoload = true\n'
    with cli_process.serve(folder, "--workers", "2", config=config, **env) as running:
        yield PullableServer(running, folder, env)


def test_a_pulled_model_is_served_by_its_name_by_all_gateways_and_gone_when_it_is_removed(
    server: PullableServer, monkeypatch: pytest.MonkeyPatch
):
    assert server.names() == ["demo"]
    assert server.ask("Small").json()["error"]["code"] == "model_not_found"
    shown = server.run("pull", REPO)
    assert "Q4_1 is the best that fits" in shown
    assert "Small is in the library" in shown
    wait_until(lambda: all("Small" in server.names() for _ in range(_ASKS)), "all gateways list the model")
    assert server.ask("small").status_code == 200
    assert "demo, Small" in server.ask("nobody").json()["error"]["message"].replace("Small, demo", "demo, Small")

    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=cli_process.DEADLINE) as sdk:
        messages: Any = [{"role": "user", "content": "Read a file."}]
        with sdk.messages.stream(model="Small", max_tokens=16, messages=messages, tools=[TOOL]) as stream:  # type: ignore[list-item]
            kinds = {event.type for event in stream}
        assert {"message_start", "content_block_delta", "message_stop"} <= kinds
        assert stream.get_final_message().usage.output_tokens > 1

    monkeypatch.setenv("MODELYARD_CACHE", server.cache)
    models.remove_model("Small")
    wait_until(lambda: all(server.names() == ["demo"] for _ in range(_ASKS)), "no gateway lists the model")
    # The scheduler may know it before a gateway does, which then answers still, or says that the model failed.
    wait_until(lambda: all(server.is_unknown("Small") for _ in range(_ASKS)), "no gateway knows the model")
