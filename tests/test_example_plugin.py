"""The package in `examples/plugin`, installed as a user would install it, and driven through a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import cli_process
from tests.cli_process import ROOT, ServerProcess

EXAMPLE = ROOT / "examples" / "plugin"
WORDS = "the cat sat on the mat"
CONFIG = (EXAMPLE / "config.toml").read_text().replace("README.md", "words.txt")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built and installed package, and what its configuration names."""
    folder = tmp_path_factory.mktemp("example")
    target, source = folder / "site", shutil.copytree(EXAMPLE, folder / "source")
    # pip runs by its path: an environment of uv has none.
    installer = ["uv", "pip", "install", "--python", sys.executable] if shutil.which("uv") else None
    command = installer or [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run([*command, *offline], check=True, capture_output=True, text=True)
    (folder / "words.txt").write_text(WORDS)
    return folder


def path_of(folder: Path) -> str:
    return os.pathsep.join((str(ROOT), str(folder / "site")))


@pytest.fixture(scope="module")
def server(installed: Path) -> Iterator[ServerProcess]:
    with cli_process.serve(installed, config=CONFIG, PYTHONPATH=path_of(installed)) as running:
        running.until_count("is ready", 2)
        yield running


def chat(server: ServerProcess, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "the cat"}], **fields}
    reply: dict[str, Any] = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return reply


def test_the_engine_answers_clients_of_every_protocol(server: ServerProcess) -> None:
    reply = chat(server, "markov", max_tokens=3)
    assert reply["choices"][0]["message"]["content"] == "sat on the", reply
    assert reply["usage"]["completion_tokens"] == 3
    messages = {"model": "markov", "max_tokens": 2, "messages": [{"role": "user", "content": "cat"}]}
    found = httpx.post(f"{server.url}/v1/messages", json=messages, timeout=60).json()
    assert found["content"][0]["text"] == "sat on"


def test_the_protocol_reads_requests_and_writes_replies_and_errors(server: ServerProcess) -> None:
    reply = httpx.post(f"{server.url}/plain", content="sat", headers={"x-model": "markov"}, timeout=60)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert reply.text.startswith("on the ")
    missing = httpx.post(f"{server.url}/plain", content="sat", headers={"x-model": "nobody"}, timeout=60)
    assert missing.status_code == 404
    assert missing.text.startswith("The model 'nobody' does not exist here.")


def test_the_format_reads_reasoning_and_the_protocol_leaves_it_out(server: ServerProcess) -> None:
    message = chat(server, "demo")["choices"][0]["message"]
    assert (message["content"].strip(), message["reasoning_content"]) == ("Hello!", "The user greets me.")
    reply = httpx.post(f"{server.url}/plain", content="Hi", headers={"x-model": "demo"}, timeout=60)
    assert reply.text.strip() == "Hello!"


def test_check_knows_the_engine_its_options_and_its_faults(installed: Path) -> None:
    (installed / "modelyard.toml").write_text(CONFIG.replace("words.txt", "gone.txt"))
    try:
        found = cli_process.run("check", cwd=installed, PYTHONPATH=path_of(installed))
    finally:
        (installed / "modelyard.toml").write_text(CONFIG)
    assert found.returncode == 1
    assert "there is no file gone.txt" in found.stdout + found.stderr


def test_without_the_package_the_engine_is_unknown(installed: Path) -> None:
    found = cli_process.run("check", cwd=installed)
    assert found.returncode == 1
    assert "'markov' is not" in found.stdout + found.stderr
