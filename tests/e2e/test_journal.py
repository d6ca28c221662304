"""Captured requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import cli_process
from tests.e2e.helpers import config, wait_until
from tests.e2e.protocols import CHAT, MESSAGES, Protocol
from tests.live_server import LiveServer, demo_config, live_server

FILE_NAMES = ("1-client-request.json", "2-prompt.txt", "3-model-output.txt")


class CaptureFolder:
    """The folder of captured requests and its server."""

    def __init__(self, capture: Path, server: LiveServer) -> None:
        self._folder, self.url = capture, server.url

    def post(self, path: str, content: bytes, **headers: str) -> tuple[httpx.Response, dict[str, bytes]]:
        """A reply and its four files, which are written after the reply."""
        reply = httpx.post(self.url + path, content=content, headers=headers, timeout=cli_process.DEADLINE)
        trace = reply.headers["request-id"].removeprefix("req_")
        wait_until(
            lambda: any(path.stat().st_size for path in self._folder.glob(f"*-{trace}.4-*")), "the fourth file is written"
        )
        return reply, self._files(trace)

    def _files(self, trace: str) -> dict[str, bytes]:
        return {path.name.partition(trace + ".")[2]: path.read_bytes() for path in self._folder.glob(f"*-{trace}.*")}


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaptureFolder]:
    debug_dir = tmp_path_factory.mktemp("journal") / "debug"
    with live_server(config(log={"debug_dir": str(debug_dir)}, http={"max_body_bytes": 4096, "port": 0})) as server:
        yield CaptureFolder(debug_dir, server)


def test_every_protocol_writes_four_files(capture: CaptureFolder, protocol: Protocol, stream: bool):
    body = json.dumps(protocol.body("thinking, please", stream=stream)).encode()
    reply, files = capture.post(protocol.path, body)
    response = "4-client-response.sse" if stream else "4-client-response.json"
    assert set(files) == {*FILE_NAMES, response}
    assert files["1-client-request.json"] == body
    assert b"thinking, please" in files["2-prompt.txt"]
    assert files["3-model-output.txt"].decode() == "<think>\nLet me see.\n</think>\n\nForty-two."
    assert files[response] == reply.content


def test_the_captured_prompt_is_the_rendered_template(capture: CaptureFolder):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "text"}]
    body = json.dumps({"model": "demo", "messages": messages}).encode()
    _, files = capture.post("/v1/chat/completions", body)
    rendered = httpx.post(capture.url + "/apply-template", content=body).json()["prompt"]
    assert files["2-prompt.txt"].decode() == rendered


REFUSED_BODIES: dict[str, tuple[bytes, int]] = {
    "not JSON": (b"{", 400),
    "no messages": (b'{"model": "demo"}', 400),
    "too large": (b" " * 5000, 413),
}


@pytest.mark.parametrize("case", REFUSED_BODIES)
def test_a_refused_request_writes_four_files(capture: CaptureFolder, protocol: Protocol, case: str):
    body, status = REFUSED_BODIES[case]
    reply, files = capture.post(protocol.path, body)
    assert reply.status_code == status
    assert set(files) == {*FILE_NAMES, "4-client-response.json"}
    assert files["1-client-request.json"] == (b"" if status == 413 else body)
    assert (files["2-prompt.txt"], files["3-model-output.txt"]) == (b"", b"")
    assert files["4-client-response.json"] == reply.content


@pytest.mark.parametrize("text", ["error before", "error during"])
def test_a_failed_request_writes_the_output_so_far(
    capture: CaptureFolder, protocol: Protocol, stream: bool, text: str
):
    reply, files = capture.post(protocol.path, json.dumps(protocol.body(text, stream=stream)).encode())
    (response,) = set(files) - set(FILE_NAMES)
    assert len(files) == 4
    assert text.encode() in files["2-prompt.txt"]
    assert files["3-model-output.txt"] == (b"Half an" if text == "error during" else b"")
    assert files[response] == reply.content
    assert b"out of memory" in reply.content


def test_keys_are_never_written(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path)}}
    env = {"MODELYARD_API_KEY": "sk-very-secret"}
    with live_server(demo_config() | settings, env) as server:
        body = json.dumps(MESSAGES.body("hi")).encode()
        _, files = CaptureFolder(tmp_path, server).post("/v1/messages", body, **{"x-api-key": "sk-very-secret"})
    assert len(files) == 4
    assert not [name for name, data in files.items() if b"sk-very-secret" in data]


def test_only_the_last_requests_are_kept(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path), "debug_max_requests": 2}}
    with live_server(demo_config() | settings) as server:
        capture = CaptureFolder(tmp_path, server)
        bodies = [json.dumps(CHAT.body(f"number {n}")).encode() for n in range(5)]
        for body in bodies:
            capture.post("/v1/chat/completions", body)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 8, "older files are deleted")
        kept = {path.read_bytes() for path in tmp_path.glob("*.1-client-request.json")}
    assert kept == set(bodies[-2:])


def test_the_debug_option_writes_into_the_current_folder(tmp_path: Path):
    with cli_process.serve(tmp_path, "--debug", *cli_process.DEMO) as server:
        reply = httpx.post(server.url + "/v1/messages", json=MESSAGES.body("hi"), timeout=cli_process.DEADLINE)
        assert server.stop() == 0
    files = list((tmp_path / "debug").iterdir())
    assert reply.status_code == 200
    assert len(files) == 4, "all are on disk when the server has ended"
    assert {path.stat().st_mode & 0o077 for path in files} == {0}, "prompts are private"
