"""A real server in a thread, for tests that talk to it over a socket as a client would."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from modelyard.config.load import load_config
from modelyard.http import server as front
from modelyard.server.app import ServerApp, compose


class LiveServer:
    """`url` to talk to; `yard` to look inside. Its loop runs in another thread: look, but change nothing there."""

    def __init__(self, url: str, yard: ServerApp, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.app, self.loop = url, yard, loop

    def status(self, model: str) -> Any:
        return self.app.scheduler.status()[model]


def demo_config(script: list[dict[str, Any]] | None = None, **model: Any) -> dict[str, Any]:
    """A configuration with one scripted model behind every name: caches main (4 places) and fast (2)."""
    model = {"backend": "fake", "token_delay": 0, "script": script or [{"steps": [{"text": "Hello there."}]}], **model}
    return {
        "models": {"demo": model},
        "caches": {
            "main": {"model": "demo", "n_ctx": 4096, "parallel": 4},
            "fast": {"model": "demo", "n_ctx": 2048, "parallel": 2},
        },
        "routes": [{"match": "*haiku*", "cache": "fast"}, {"match": "*", "cache": "main"}],
    }


@contextmanager
def live_server(
    config: dict[str, Any], env: dict[str, str] | None = None, *, ready: bool = True
) -> Iterator[LiveServer]:
    """Serve `config` (in our own names) on a free port until the block ends."""
    loaded = load_config(env=env or {}, overrides={**config, "http": {**config.get("http", {}), "port": 0}})
    began, ended = threading.Event(), threading.Event()
    held: list[Any] = []
    thread = threading.Thread(
        target=lambda: asyncio.run(_run(loaded.config, env or {}, held, began, ended)), daemon=True
    )
    thread.start()
    if not began.wait(180) or isinstance(held[0], BaseException):
        raise held[0] if held else TimeoutError("the server did not start")
    served, server = held
    try:
        if ready:
            _until_ready(served)
        yield served
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(180)
        assert not thread.is_alive(), "the server did not stop"


async def _run(
    config: Any, env: dict[str, str], held: list[Any], began: threading.Event, ended: threading.Event
) -> None:
    try:
        yard = compose(config, env)
        server = front.make_server(yard.app, config.http)
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server._serve())
        while not server.started and not task.done():  # noqa: ASYNC110  uvicorn only sets a flag
            await asyncio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if config.http.ssl_certfile else "http"
        held += [LiveServer(f"{scheme}://127.0.0.1:{port}", yard, asyncio.get_running_loop()), server]
    except BaseException as error:
        held.append(error)
        began.set()
        return
    began.set()
    await task
    ended.set()


def _until_ready(served: LiveServer) -> None:
    with httpx.Client(verify=False) as client:  # a test's own certificate
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if all(s.state in ("ready", "failed", "stopped") for s in served.app.scheduler.status().values()):
                return
            client.get(served.url + "/health/live")
    raise TimeoutError("the models did not load")
