"""The log line of a request: what was asked of which model, how fast it was, how it ended; and what is a failure."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.server.client import ServerClient
from tests.live_server import LiveServer, live_server

CONFIG: dict[str, Any] = {
    "models": {
        "m": {
            "backend": "fake",
            "n_ctx": 4096,
            "script": [
                {"when": "slow", "steps": [{"text": "a"}, {"delay": 30.0}, {"text": "b"}]},
                {"when": "broken", "steps": [{"fail": "it broke"}]},
                {"steps": [{"text": "one two three four"}]},
            ],
        }
    },
    "log": {"level": "info"},
}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "modelyard.http")

    def wait_for(count: int) -> list[Any]:
        """The reply is sent before its line is written."""
        found: list[Any] = []
        while len(found) < count:
            found = [record for record in caplog.records if record.msg == "request"]
            found = [record for record in found if record.fields["path"] == "/v1/chat/completions"]
        return found

    return wait_for


def ask(server: LiveServer, text: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_has_model_tokens_speed_and_finish_reason(lines: Any, stream: bool):
    with live_server(CONFIG) as server:
        assert ask(server, "hello", stream=stream).status_code == 200
        (line,) = lines(1)
    assert line.levelno == logging.INFO
    assert line.fields["model"] == "m"
    assert line.fields["input_tokens"] > 0
    assert line.fields["output_tokens"] > 0
    assert line.fields["first_token_ms"] >= 0
    assert line.fields["finish_reason"] == "end"
    assert "error" not in line.fields


def test_a_server_error_is_a_warning_with_its_code_and_a_bad_request_is_not(lines: Any):
    with live_server(CONFIG) as server:
        assert ask(server, "broken").status_code >= 500
        assert ask(server, "hello", temperature="hot").status_code == 400
        broken, bad = lines(2)
    assert broken.levelno == logging.WARNING
    assert broken.fields["error"]
    assert bad.levelno == logging.INFO
    assert bad.fields["error"]


def test_a_client_that_leaves_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "slow"}]}
    ended: list[Any] = []
    with live_server(CONFIG) as server, server.noted(), ServerClient(server.url) as admin:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as reply:
            next(reply.iter_bytes())
        while not ended:  # pytest's time limit ends a hang
            ended = admin.get("/v1/admin/requests")["ended"]
        metrics = httpx.get(f"{server.url}/metrics").text
    assert (ended[0]["status"], ended[0]["failed"]) == ("cancelled", False)
    assert not re.search(r"^modelyard_usage_failed_total\{.*\} [1-9]", metrics, re.MULTILINE)
