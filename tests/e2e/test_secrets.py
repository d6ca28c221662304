"""Secrets and server paths stay on the server: in errors, streams, debug files, logs and the admin API."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from websockets.sync.client import connect

from modelyard.telemetry.log import JsonFormatter, TextFormatter
from tests.e2e.protocols import PROTOCOLS
from tests.e2e.test_remote import remote_config
from tests.engines.fake_upstream import Answer, chat_stream, error_answer, fake_upstream
from tests.live_server import demo_config, live_server

KEY, ORG, PASSWORD = "sk-upstream-0123456789", "org-token-0123456789", "pass-0123456789"
QUOTED = f"the key {KEY} of {ORG} at http://ann:{PASSWORD}@10.0.0.1/v1 is not valid here"
ADMIN = {"authorization": "Bearer admin-key-0123456789"}
KEYS = [
    {"name": "ann", "key": "client-key-0123456789", "allow_remote": True},
    {"name": "boss", "key": "admin-key-0123456789", "admin": True},
]


def secretive_config(url: str, folder: Path) -> dict[str, Any]:
    config = remote_config(url, remote_api_key_env="UPSTREAM_KEY", remote_headers={"x-org-token": ORG})
    config["models"]["proxied"] = {
        "backend": "openai_remote",
        "remote_base_url": f"http://ann:{PASSWORD}@127.0.0.1:1/v1",
        "remote_model": "m",
    }
    return {**config, "keys": KEYS, "log": {"debug_dir": str(folder), "history_texts": True}}


def texts_in(folder: Path) -> list[str]:
    return [file.read_text() for file in folder.iterdir()]


def stream_that_fails() -> Answer:
    failure = b"data: " + json.dumps({"error": {"message": QUOTED}}).encode() + b"\n\n"
    return Answer(body=[*chat_stream("Half")[:1], failure])


ECHOES = [error_answer(400, message=QUOTED), error_answer(403, message=QUOTED), stream_that_fails()]


@pytest.mark.parametrize("answer", ECHOES)
async def test_what_an_upstream_quotes_reaches_nobody(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", KEY)
    seen: list[str] = []
    async with fake_upstream(answer) as fake:
        context = live_server(secretive_config(fake.url, tmp_path))
        server = await asyncio.to_thread(context.__enter__)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for protocol in PROTOCOLS.values():
                for stream in (False, True):
                    headers = {"authorization": "Bearer client-key-0123456789"}
                    reply = await client.post(protocol.path, json=protocol.body("text", stream=stream), headers=headers)
                    assert "*** of *** at" in reply.text
                    seen.append(reply.text)
            seen += [(await client.get(f"/v1/admin/{path}", headers=ADMIN)).text for path in ("models", "requests")]
            ids = [one["id"] for one in json.loads(seen[-1])["ended"]]
            seen += [(await client.get(f"/v1/admin/requests/{id}", headers=ADMIN)).text for id in ids]
        await asyncio.to_thread(context.__exit__, None, None, None)
    files = texts_in(tmp_path)
    assert (len(ids), len(files)) == (6, 24)
    assert any("*** of *** at" in text for text in files)
    formatters = (JsonFormatter(), TextFormatter(colour=False))
    lines = [formatter.format(record) for record in caplog.records for formatter in formatters]
    for text in (*seen, *files, *lines):
        assert not any(secret in text for secret in (KEY, ORG, PASSWORD))
    assert fake.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert fake.requests[0].headers["x-org-token"] == ORG


def test_a_log_line_shows_no_key_of_a_client() -> None:
    with live_server({**demo_config(), "keys": KEYS}):
        error = ValueError("client-key-0123456789")
        record = logging.makeLogRecord({"msg": "got %s", "args": ("client-key-0123456789",), "fields": {"why": error}})
        for formatter in (JsonFormatter(), TextFormatter(colour=False)):
            assert "client-key" not in formatter.format(record)


MESSAGES = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": {"model": "demo", "input": "hi"},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
    "/v1/embeddings": {"model": "demo", "input": "hi"},
    "/v1/rerank": {"model": "demo", "query": "hi", "documents": ["ho"]},
    "/infill": {"model": "demo", "input_prefix": "hi", "input_suffix": "ho"},
    "/tokenize": {"model": "demo", "content": "hi"},
    "/apply-template": MESSAGES,
}


def test_errors_name_files_without_their_folders_except_for_administrators(tmp_path: Path) -> None:
    config = {**demo_config(tokenizer_path=str(tmp_path / "hidden folder" / "tokenizer.json")), "keys": KEYS}
    client_key = {"authorization": "Bearer client-key-0123456789"}
    with live_server(config, ready=False) as server:
        for path, body in BODIES.items():
            reply = httpx.post(server.url + path, json=body, headers=client_key)
            assert reply.status_code in (503, 529), path
            assert "tokenizer.json" in reply.text
            assert "hidden" not in reply.text
            assert str(tmp_path) not in reply.text
        assert str(tmp_path) not in httpx.get(f"{server.url}/health", headers=client_key).text
        load = httpx.post(f"{server.url}/v1/admin/models/demo/load", headers=ADMIN)
        assert str(tmp_path / "hidden folder") in load.json()["error"]["message"]


@pytest.mark.parametrize(
    "secret",
    [
        "client-key-0123456789",  # of the configuration
        "my-" + "aB3_-" * 8 + "xyz",  # as created keys are, of which only a hash is kept
        "sk-ant-api03-0123456789abcdef",
        "AIzaSyA0123456789abcdefghijklmnopqrstu",
        "hf_0123456789abcdefABCDEF",
    ],
)
def test_a_key_in_a_path_is_not_logged(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live_server({**demo_config(), "keys": KEYS}) as server:
        httpx.get(f"{server.url}/v1/{secret}/models", headers=ADMIN)
        httpx.get(f"{server.url}/v1/models/my-model-with-a-name-that-is-long-enough-to-be-a-key-2", headers=ADMIN)
        with pytest.raises(websockets.InvalidStatus):
            connect(f"{server.url.replace('http', 'ws')}/v1/{secret}", additional_headers=ADMIN)
    ours = (record for record in caplog.records if record.name.startswith("modelyard"))
    logged = "\n".join(JsonFormatter().format(record) for record in ours)
    assert secret not in logged
    assert "/v1/***/models" in logged
    assert "websocket refused" in logged
    assert "/v1/models/my-model-with-a-name-that-is-long-enough-to-be-a-key-2" in logged
