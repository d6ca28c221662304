"""The end of a server process: after SIGTERM running requests finish, and new ones are refused."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.e2e.test_gateway_processes import MultiProcessServer

CHAT = "/v1/chat/completions"
PATIENT = 3600  # a server that waited for this would fail the test
LIMITED_KEY = '[[keys]]\nname = "k"\nkey = "sk-drain"\nmax_concurrent = 8\n'  # gateways with limits share a scheduler


class GatedUpstream:
    """An OpenAI server whose streams stand still after the first word, until they are released."""

    def __init__(self) -> None:
        self.released, self.begun = threading.Event(), threading.Semaphore(0)
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self._send({"index": 0, "delta": {"content": "first"}})
                upstream.begun.release()
                upstream.released.wait(cli_process.DEADLINE)
                self._send({"index": 0, "delta": {"content": " last"}})
                self._send({"index": 0, "delta": {}, "finish_reason": "stop"})
                self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, choice: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n")
                self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None: ...

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:
                    return  # the server was ended

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def upstream() -> Iterator[GatedUpstream]:
    running = GatedUpstream()
    yield running
    running.close()


def config(upstream: GatedUpstream, *, drain_s: float = PATIENT, parallel: int = 4, keys: str = "") -> str:
    return f"""
[http]
drain_s = {drain_s}

[models.demo]
backend = "openai_remote"
remote_base_url = "{upstream.url}"
remote_model = "demo"
parallel = {parallel}

[[routes]]
match = "*"
model = "demo"
allow_remote = true

{keys}"""


class Stream:
    """A streamed request, in a thread of its own."""

    def __init__(self, server: cli_process.ServerProcess, **fields: Any) -> None:
        self.text, self.status, self.error = "", 0, ""
        self._body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
        self._url = server.url + CHAT
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        headers = {"authorization": "Bearer sk-drain"}
        try:
            reply = httpx.post(self._url, json=self._body, headers=headers, timeout=cli_process.DEADLINE)
        except httpx.HTTPError as error:
            self.error = repr(error)
        else:
            self.text, self.status = reply.text, reply.status_code

    def end(self) -> str:
        self._thread.join(cli_process.DEADLINE)
        assert not self._thread.is_alive()
        assert not self.error
        return self.text


@contextmanager
def streaming(
    folder: Path, upstream: GatedUpstream, *arguments: str, **settings: Any
) -> Iterator[tuple[cli_process.ServerProcess, Stream]]:
    """A server with one stream that has begun."""
    with cli_process.serve(folder, *arguments, config=config(upstream, **settings)) as server:
        if "--workers" in arguments:
            MultiProcessServer(server).wait_for_processes(2)
        stream = Stream(server)
        assert upstream.begun.acquire(timeout=cli_process.DEADLINE)
        yield server, stream


def get(server: cli_process.ServerProcess, path: str) -> int:
    return httpx.get(server.url + path, timeout=cli_process.DEADLINE).status_code


def readiness(server: cli_process.ServerProcess) -> int:
    """0 from a gateway process without requests that ends at this moment: its connections close without a reply."""
    try:
        return get(server, "/health/ready")
    except httpx.RemoteProtocolError:
        return 0


def post(server: cli_process.ServerProcess) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": "Bearer sk-drain"}
    return httpx.post(server.url + CHAT, json=body, headers=headers, timeout=cli_process.DEADLINE)


def is_complete(text: str) -> bool:
    return '"first"' in text and '" last"' in text and text.endswith("data: [DONE]\n\n")


def terminate(server: cli_process.ServerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: readiness(server) == 503, "the server drains")


def test_a_running_stream_finishes_while_new_requests_are_refused(tmp_path: Path, upstream: GatedUpstream) -> None:
    with streaming(tmp_path, upstream) as (server, stream), httpx.Client(base_url=server.url) as kept:
        assert kept.get("/health/ready").status_code == 200
        terminate(server)
        assert kept.get("/health/ready").json() == {"status": "draining"}
        assert (get(server, "/health/live"), get(server, "/v1/models")) == (200, 200)
        refused = post(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert float(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert server.process.poll() is None
        upstream.released.set()
        assert is_complete(stream.end())
        assert server.wait() == 0
    assert "requests still run" in "".join(server.raw)
    assert "Traceback" not in "".join(server.raw)


def test_a_second_signal_ends_requests_at_once_with_an_error(tmp_path: Path, upstream: GatedUpstream) -> None:
    with streaming(tmp_path, upstream) as (server, stream):
        terminate(server)
        assert server.stop() == 0
        assert "the server is shutting down" in stream.end()


def test_requests_that_take_too_long_end_with_an_error(tmp_path: Path, upstream: GatedUpstream) -> None:
    with streaming(tmp_path, upstream, drain_s=0.2) as (server, stream):
        assert server.stop() == 0
        assert "the server is shutting down" in stream.end()


def test_an_idle_server_ends_at_once(tmp_path: Path, upstream: GatedUpstream) -> None:
    with cli_process.serve(tmp_path, config=config(upstream)) as server, httpx.Client(base_url=server.url) as idle:
        assert idle.get("/health").status_code == 200
        assert server.stop() == 0
    assert "requests still run" not in "".join(server.raw)


def test_a_request_that_waits_for_a_slot_is_answered_too(tmp_path: Path, upstream: GatedUpstream) -> None:
    with streaming(tmp_path, upstream, parallel=1) as (server, stream):
        waiting = Stream(server, stream=False)
        wait_until(
            lambda: httpx.get(server.url + "/health").json()["models"]["demo"]["waiting"] == 1, "a request waits"
        )
        terminate(server)
        upstream.released.set()
        assert is_complete(stream.end())
        assert json.loads(waiting.end())["choices"][0]["message"]["content"] == "first last"
        assert server.wait() == 0


@pytest.mark.parametrize("keys", ["", LIMITED_KEY], ids=["each its engines", "one scheduler"])
def test_gateway_processes_let_their_streams_finish_too(tmp_path: Path, upstream: GatedUpstream, keys: str) -> None:
    with streaming(tmp_path, upstream, "--workers", "2", keys=keys) as (server, stream):
        server.process.send_signal(signal.SIGTERM)
        # Until both know: the kernel gives a connection to any of them.
        wait_until(lambda: {readiness(server) for _ in range(8)} == {503}, "both processes drain")
        assert post(server).status_code == 503
        upstream.released.set()
        assert is_complete(stream.end())
        assert server.wait() == 0


def test_a_second_signal_ends_gateway_processes_at_once(tmp_path: Path, upstream: GatedUpstream) -> None:
    with streaming(tmp_path, upstream, "--workers", "2") as (server, stream):
        terminate(server)
        assert server.stop() == 0
        assert "the server is shutting down" in stream.end()


@pytest.mark.parametrize("force", [False, True])
def test_the_stop_command_waits_for_requests_unless_it_is_forced(
    tmp_path: Path, upstream: GatedUpstream, force: bool
) -> None:
    with streaming(tmp_path, upstream) as (server, stream), ExitStack() as stack:
        arguments = ("stop", "--server", "--url", server.url, *(["--force"] if force else []))
        done: list[Any] = []
        stopping = threading.Thread(target=lambda: done.append(cli_process.run(*arguments, cwd=tmp_path)))
        stopping.start()
        stack.callback(stopping.join)
        if not force:
            wait_until(lambda: get(server, "/health/ready") == 503, "the server drains")
            assert not done
            upstream.released.set()
        assert server.wait() == 0  # here, because only its parent can end the zombie that the command waits for
        stopping.join()
        assert (done[0].returncode, "has ended" in done[0].stdout) == (0, True), done
        assert is_complete(stream.end()) is not force


def test_a_gateway_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with cli_process.serve(tmp_path, "--workers", "2", *cli_process.DEMO) as server:
        cluster = MultiProcessServer(server)
        cluster.wait_for_processes(2)
        stopped = min(cluster.processes_with_socket("LISTEN"))
        os.kill(stopped, signal.SIGSTOP)
        wait_until(
            lambda: len(found := cluster.processes_with_socket("LISTEN")) == 2 and stopped not in found,
            "it is replaced",
        )
        assert {get(server, "/health/live") for _ in range(10)} == {200}
        assert server.stop() == 0
    assert "is silent: replacing it" in "".join(server.raw)
