"""`modelyard explain`: the last requests of a session as a table, and errors as one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.cli import app
from modelyard.cli.diagnostics import COLUMNS, session_requests
from modelyard.core.errors import Forbidden, NotFound, Unauthenticated, Unavailable
from tests.engines.llama_cpp import tiny_models
from tests.live_server import demo_config, live_server

SYSTEM_PROMPT = "You are a careful helper. " * 20


def send(url: str, session: str, text: str, system: str = SYSTEM_PROMPT, key: str = "x") -> httpx.Response:
    talk = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    headers = {"x-session-id": session, "authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": talk}, headers=headers)


@pytest.fixture(scope="module")
def tiny_model() -> str:
    """Found before the tests have a folder of their own."""
    return str(tiny_models.coder())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))


def test_the_last_requests_of_a_session_are_listed_in_order() -> None:
    with live_server(demo_config()) as server, server.noted():
        send(server.url, "talk-1", "hello")
        send(server.url, "talk-1", "hello", system="It is Monday. " + SYSTEM_PROMPT)
        send(server.url, "talk-2", "something else")
        one = session_requests(server.url, None, "talk-1", 20)
        [newest] = session_requests(server.url, None, None, 1)
        shown = CliRunner().invoke(app.app, ["explain", "talk-1", "--url", server.url], env={"COLUMNS": "200"})
        as_json = CliRunner().invoke(app.app, ["explain", "talk-1", "--url", server.url, "--json"])
    assert [record["reuse"]["cause"] for record in one] == ["new_session", "system_changed"]
    assert json.loads(as_json.stdout) == one
    assert "session talk-1, cache main" in shown.stdout
    assert newest["session"] == "talk-2"
    row = shown.stdout.splitlines()[-1].split()
    last = dict(zip(COLUMNS, (*row[:6], " ".join(row[6:])), strict=True))
    assert int(last["reused"]) + int(last["evaluated"]) == int(last["prompt"])
    assert last["from token"] == f"{last['reused']}, message 0 (system)"
    assert shown.exit_code == 0
    assert "system_changed" in shown.stdout


def test_the_tree_of_the_sessions_cache_is_below_them(tiny_model: str) -> None:
    real = {"backend": "llama_cpp", "path": tiny_model, "n_threads": 1, "parked_mb": 0}
    caches = {"main": {"model": "real", "n_ctx": 512, "parallel": 2}, "other": {"model": "real", "n_ctx": 512}}
    config = {"models": {"real": real}, "caches": caches, "routes": [{"match": "*", "cache": "main"}]}
    with live_server(config) as server, server.noted():
        for tail in (range(500, 800), range(900, 1210)):
            ids = [*range(300, 340), *tail]
            body = {"model": "real", "prompt": ids, "max_tokens": 1, "prompt_cache_key": str(tail[0])}
            httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
        shown = CliRunner().invoke(app.app, ["explain", "--url", server.url], env={"COLUMNS": "200"})
    assert [line.strip() for line in shown.stdout.splitlines()[-3:]] == [
        "Prefixes",
        "sequence 1: 350 tokens",
        "sequence 0: 40 shared + 300 tokens",
    ]


def test_errors_are_one_sentence() -> None:
    with live_server(demo_config()) as server, server.noted():
        with pytest.raises(NotFound, match="not answered any request yet"):
            session_requests(server.url, None, None, 5)
        send(server.url, "talk-1", "hello")
        with pytest.raises(NotFound, match="ends in 'nobody'"):
            session_requests(server.url, None, "nobody", 5)
    with pytest.raises(Unavailable, match="no server answers"):
        session_requests(server.url, None, None, 5)


def test_a_server_with_keys_needs_an_admin_key() -> None:
    keys = [{"name": "boss", "key": "s3cret-boss", "admin": True}, {"name": "guest", "key": "s3cret-guest"}]
    with live_server({**demo_config(), "keys": keys}) as server:
        send(server.url, "talk-1", "hello", key="s3cret-guest")
        assert len(session_requests(server.url, "s3cret-boss", None, 5)) == 1
        with pytest.raises(Unauthenticated, match="--key"):
            session_requests(server.url, None, None, 5)
        with pytest.raises(Forbidden, match="admin key"):
            session_requests(server.url, "s3cret-guest", None, 5)
