"""Configurations of the end-to-end tests, clients on raw sockets, and functions that wait for the state of a server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.e2e.protocols import ServerSentEvent, iter_events
from tests.live_server import LiveServer, demo_config

SCRIPT: list[dict[str, Any]] = [
    {"result": "sunny", "steps": [{"text": "Take a hat: it is sunny."}]},
    {"when": "^text", "steps": [{"text": "Hello there, friend."}]},
    {"when": "^thinking", "steps": [{"think": "Let me see."}, {"text": "Forty-two."}]},
    {
        "when": "^one tool",
        "steps": [{"text": "I look."}, {"call": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
    },
    {
        "when": "^parallel tools",
        "steps": [
            {
                "call": [
                    {"name": "get_weather", "arguments": {"city": "Rome"}},
                    {"name": "get_time", "arguments": {"zone": "CET"}},
                ]
            }
        ],
    },
    {"when": "^length", "steps": [{"tokens": 50}]},
    {"when": "^stop string", "steps": [{"text": "one two STOP three"}]},
    {"when": "^nothing", "steps": [{"text": ""}]},
    {"when": "^error before", "steps": [{"fail": "out of memory"}]},
    {"when": "^busy before", "steps": [{"fail": "the worker is gone", "kind": "unavailable"}]},
    {"when": "^error during", "steps": [{"text": "Half an"}, {"delay": 0.2}, {"fail": "out of memory"}]},
    {"when": "^death during", "steps": [{"text": "Half an"}, {"delay": 0.2}, {"die": "segmentation fault"}]},
    {"when": "^slow prefill", "steps": [{"prefill": 0.4}, {"text": "done"}]},
    {"when": "^endless prefill", "steps": [{"prefill": 600}, {"text": "never"}]},
    {"when": "^endless stream", "steps": [{"text": "so far"}, {"hang": True}]},
]


def config(**more: Any) -> dict[str, Any]:
    return demo_config(SCRIPT) | more


def single_slot_config(**more: Any) -> dict[str, Any]:
    """One slot: a second request queues."""
    return config(
        caches={"main": {"model": "demo", "n_ctx": 4096, "parallel": 1}},
        routes=[{"match": "*", "cache": "main"}],
        **more,
    )


def wait_until(condition: Callable[[], object], description: str, timeout_s: float = 180.0) -> None:
    """Wait for an event in the thread of the server, or in another process. It rests longer than it looks: a look at
    all processes would otherwise take the processor from what it waits for."""
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {description}"
        time.sleep(min(max(0.001, 4 * (time.monotonic() - began)), 0.1))
        began = time.monotonic()


def wait_for_running(server: LiveServer, count: int) -> None:
    wait_until(lambda: server.status("demo").running == count, f"{count} running")


def wait_for_queued(server: LiveServer, count: int) -> None:
    wait_until(lambda: server.status("demo").waiting == count, f"{count} waiting")


def wait_until_idle(server: LiveServer) -> None:
    """No lease, no queued request, no generation in the engine, no active HTTP request."""
    status = lambda: server.status("demo")  # noqa: E731
    wait_until(lambda: (status().running, status().waiting) == (0, 0), "all slots free")
    wait_until(lambda: engine_stats(server).running == 0, "no generation in the engine")
    wait_until(lambda: httpx.get(server.url + "/health").json()["active_requests"] == 0, "no request in the gateway")


def engine_stats(server: LiveServer) -> Any:
    engine: Any = server.app.scheduler.engine("demo")
    return engine.stats()


class RawClient:
    """A client on a raw socket that can disconnect at any moment."""

    def __init__(self, server: LiveServer, path: str, body: dict[str, Any], key: str = "") -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=180)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        head += f"\r\nX-Api-Key: {key}" if key else ""
        self._socket.sendall(head.encode() + b"\r\n\r\n" + data)

    def read_until(self, expected: bytes) -> None:
        received, deadline = b"", time.monotonic() + 180
        while expected not in received:
            assert time.monotonic() < deadline, f"{expected!r} did not come, only {received[-1000:]!r}"
            piece = self._socket.recv(65536)
            assert piece, f"the server closed the connection after {received!r}"
            received += piece

    def close(self) -> None:
        self._socket.close()


@contextmanager
def raw_request(server: LiveServer, path: str, body: dict[str, Any], key: str = "") -> Iterator[RawClient]:
    caller = RawClient(server, path, body, key)
    try:
        yield caller
    finally:
        caller.close()


@contextmanager
def stream_events(server: LiveServer, path: str, body: dict[str, Any]) -> Iterator[Iterator[ServerSentEvent]]:
    """The events of a stream as they arrive."""
    with httpx.Client(timeout=180) as client, client.stream("POST", server.url + path, json=body) as response:
        yield iter_events(response.iter_text())
