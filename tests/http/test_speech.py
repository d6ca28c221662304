"""Speech with OpenAI's own client: a model here that hears, an upstream that hears and speaks, and clear refusals."""

from __future__ import annotations

import io
import json
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from tests.live_server import LiveServer, live_server

ALLOW = {"x-modelyard-allow-remote": "true"}


def recording() -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(3200))
    return data.getvalue()


class Upstream:
    """Answers as OpenAI does, and remembers what it was sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None, bytes]] = []
        self.status = 200

    def reply(self, path: str) -> tuple[str, bytes]:
        if self.status != 200:
            return "application/json", b'{"error": {"message": "no such voice", "type": "invalid_request_error"}}'
        if path.endswith("speech"):
            return "audio/mpeg", b"ID3sound"
        return "application/json", b'{"text": "heard upstream"}'


@pytest.fixture
def upstream() -> Iterator[tuple[str, Upstream]]:
    state = Upstream()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.seen.append((self.path, self.headers.get("authorization"), body))
            kind, data = state.reply(self.path)
            self.send_response(state.status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def server(upstream: tuple[str, Upstream], monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("FAR_KEY", "far-secret")
    remote = {"remote_base_url": upstream[0], "remote_model": "whisper-1", "remote_api_key_env": "FAR_KEY"}
    script = [{"steps": [{"text": "Hello there."}]}]
    models = {
        "ears": {"backend": "fake", "n_ctx": 4096, "modalities": ["text", "audio"], "script": script},
        "deaf": {"backend": "fake", "n_ctx": 4096, "script": script},
        "far": {"backend": "openai_remote", **remote},
    }
    with live_server({"models": models}) as served:
        yield served


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", default_headers=ALLOW, max_retries=0)


def test_a_model_here_that_hears_transcribes_and_translates(client: openai.OpenAI):
    made = client.audio.transcriptions.create(model="ears", file=("a.wav", recording()), language="en")
    assert made.text == "Hello there."
    assert made.usage is not None
    with pytest.warns(DeprecationWarning, match="deprecated"):  # of the SDK, for the endpoint
        translated = client.audio.translations.create(model="ears", file=("a.wav", recording()))
    assert translated.text == "Hello there."
    as_text = client.audio.transcriptions.create(model="ears", file=("a.wav", recording()), response_format="text")
    assert as_text.strip() == "Hello there."


def test_an_upstream_gets_the_recording_under_its_own_name_of_the_model_with_its_own_key(
    client: openai.OpenAI, upstream: tuple[str, Upstream]
):
    assert client.audio.transcriptions.create(model="far", file=("a.wav", recording())).text == "heard upstream"
    ((path, key, body),) = upstream[1].seen
    assert (path, key) == ("/v1/audio/transcriptions", "Bearer far-secret")
    assert b"whisper-1" in body
    assert recording() in body


def test_speech_is_forwarded_and_refused_for_models_here(client: openai.OpenAI, upstream: tuple[str, Upstream]):
    assert client.audio.speech.create(model="far", voice="alloy", input="Hi").content == b"ID3sound"
    assert json.loads(upstream[1].seen[0][2]) == {"model": "whisper-1", "voice": "alloy", "input": "Hi"}
    with pytest.raises(openai.BadRequestError, match="does not speak"):
        client.audio.speech.create(model="ears", voice="alloy", input="Hi")


def test_an_error_of_the_upstream_is_the_clients_and_a_rejected_key_is_the_gateways(
    client: openai.OpenAI, upstream: tuple[str, Upstream]
):
    upstream[1].status = 400
    with pytest.raises(openai.BadRequestError, match="no such voice"):
        client.audio.speech.create(model="far", voice="nobody", input="Hi")
    upstream[1].status = 401
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.speech.create(model="far", voice="alloy", input="Hi")
    assert caught.value.status_code not in (401, 403)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "deaf", "file": ("a.wav", recording())}, "audio"),
        ({"model": "ears", "file": ("a.exe", b"x")}, "none of"),
        ({"model": "ears", "file": ("a.wav", recording()), "response_format": "srt"}, "no times"),
        ({"model": "ears", "file": ("a.wav", recording()), "temperature": "hot"}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_a_clear_400(client: openai.OpenAI, fields: dict[str, Any], message: str):
    with pytest.raises(openai.BadRequestError, match=message):
        client.audio.transcriptions.create(**fields)


def test_an_unknown_model_is_a_404_and_a_remote_one_needs_consent(server: LiveServer, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nobody", file=("a.wav", recording()))
    strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.PermissionDeniedError):
        strict.audio.transcriptions.create(model="far", file=("a.wav", recording()))


def test_what_is_forwarded_counts_against_the_limits_of_its_key(upstream: tuple[str, Upstream]):
    keys = [{"name": "ann", "key": "sk-ann", "requests_per_minute": 2, "allow_remote": True}]
    far = {"backend": "openai_remote", "remote_base_url": upstream[0], "remote_model": "whisper-1"}
    with live_server({"models": {"far": far}, "keys": keys}) as served:
        ann = openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-ann", max_retries=0)
        assert ann.audio.speech.create(model="far", voice="alloy", input="Hi").content == b"ID3sound"
        assert ann.audio.transcriptions.create(model="far", file=("a.wav", recording())).text == "heard upstream"
        with pytest.raises(openai.RateLimitError):
            ann.audio.speech.create(model="far", voice="alloy", input="Hi")
    assert len(upstream[1].seen) == 2
