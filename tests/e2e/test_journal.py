"""With a debug folder every request leaves four files: what came, what the model read, what it said, what went out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import cli_process
from tests.e2e.helpers import config, wait_until
from tests.e2e.protocols import PROTOCOLS, Protocol
from tests.live_server import LiveServer, demo_config, live_server

NAMES = ("1-client-request.json", "2-prompt.txt", "3-model-output.txt")


class Folder:
    """The journal's folder, and a server that fills it."""

    def __init__(self, folder: Path, served: LiveServer) -> None:
        self._folder, self.url = folder, served.url

    def post(self, path: str, content: bytes, **headers: str) -> tuple[httpx.Response, dict[str, bytes]]:
        """An answer and the four files it left; they are written soon after, not before."""
        reply = httpx.post(self.url + path, content=content, headers=headers, timeout=cli_process.DEADLINE)
        trace = reply.headers["request-id"].removeprefix("req_")
        wait_until(
            lambda: any(path.stat().st_size for path in self._folder.glob(f"*-{trace}.4-*")), "the fourth is written"
        )
        return reply, self._files(trace)

    def _files(self, trace: str) -> dict[str, bytes]:
        return {path.name.partition(trace + ".")[2]: path.read_bytes() for path in self._folder.glob(f"*-{trace}.*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    home = tmp_path_factory.mktemp("journal") / "debug"
    with live_server(config(log={"debug_dir": str(home)}, http={"max_body_bytes": 4096, "port": 0})) as served:
        yield Folder(home, served)


def test_every_protocol_leaves_its_four_files(folder: Folder, wire: Protocol, stream: bool):
    body = json.dumps(wire.body("thinking, please", stream=stream)).encode()
    reply, files = folder.post(wire.path, body)
    response = "4-client-response.sse" if stream else "4-client-response.json"
    assert set(files) == {*NAMES, response}
    assert files["1-client-request.json"] == body
    assert b"thinking, please" in files["2-prompt.txt"]
    assert files["3-model-output.txt"].decode() == "<think>\nLet me see.\n</think>\n\nForty-two."
    assert files[response] == reply.content


def test_the_prompt_is_what_the_template_made(folder: Folder):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "text"}]
    body = json.dumps({"model": "demo", "messages": messages}).encode()
    _, files = folder.post("/v1/chat/completions", body)
    rendered = httpx.post(folder.url + "/apply-template", content=body).json()["prompt"]
    assert files["2-prompt.txt"].decode() == rendered


REFUSED: dict[str, tuple[bytes, int]] = {
    "not JSON": (b"{", 400),
    "no messages": (b'{"model": "demo"}', 400),
    "too large": (b" " * 5000, 413),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_leaves_its_four_files_too(folder: Folder, wire: Protocol, case: str):
    body, status = REFUSED[case]
    reply, files = folder.post(wire.path, body)
    assert reply.status_code == status
    assert set(files) == {*NAMES, "4-client-response.json"}
    assert files["1-client-request.json"] == (b"" if status == 413 else body)
    assert (files["2-prompt.txt"], files["3-model-output.txt"]) == (b"", b"")
    assert files["4-client-response.json"] == reply.content


@pytest.mark.parametrize("said", ["error before", "error during"])
def test_a_failure_leaves_what_there_was_until_then(folder: Folder, wire: Protocol, stream: bool, said: str):
    reply, files = folder.post(wire.path, json.dumps(wire.body(said, stream=stream)).encode())
    (response,) = set(files) - set(NAMES)
    assert len(files) == 4
    assert said.encode() in files["2-prompt.txt"]
    assert files["3-model-output.txt"] == (b"Half an" if said == "error during" else b"")
    assert files[response] == reply.content
    assert b"out of memory" in reply.content


def test_no_key_is_ever_written(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path)}}
    env = {"MODELYARD_API_KEY": "sk-very-secret"}
    with live_server(demo_config() | settings, env) as served:
        body = json.dumps(PROTOCOLS["messages"].body("hi")).encode()
        _, files = Folder(tmp_path, served).post("/v1/messages", body, **{"x-api-key": "sk-very-secret"})
    assert len(files) == 4
    assert not [name for name, data in files.items() if b"sk-very-secret" in data]


def test_only_the_last_requests_are_kept(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path), "debug_max_requests": 2}}
    with live_server(demo_config() | settings) as served:
        folder = Folder(tmp_path, served)
        bodies = [json.dumps(PROTOCOLS["chat"].body(f"number {n}")).encode() for n in range(5)]
        for body in bodies:
            folder.post("/v1/chat/completions", body)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 8, "the older ones are gone")
        kept = {path.read_bytes() for path in tmp_path.glob("*.1-client-request.json")}
    assert kept == set(bodies[-2:])


def test_the_option_of_the_command_line_keeps_them_in_the_current_folder(tmp_path: Path):
    with cli_process.serve(tmp_path, "--debug", *cli_process.DEMO) as server:
        reply = httpx.post(
            server.url + "/v1/messages", json=PROTOCOLS["messages"].body("hi"), timeout=cli_process.DEADLINE
        )
        assert server.stop() == 0
    files = list((tmp_path / "debug").iterdir())
    assert reply.status_code == 200
    assert len(files) == 4, "all are on disk when the server has ended"
    assert {path.stat().st_mode & 0o077 for path in files} == {0}, "prompts are private"
