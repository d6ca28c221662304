"""A server in a thread, for tests that talk to it over a socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from modelyard.accounts.owner import OWNER_HEADER
from modelyard.config.library_models import read_library_models
from modelyard.config.load import load_config
from modelyard.http.server import make_server
from modelyard.http.settings import HttpSettings
from modelyard.server.admin_service import ConfigLoader
from modelyard.server.app import ServerApp, compose
from modelyard.server.running_servers import announced


def owner_headers(app: ServerApp) -> dict[str, str]:
    """They prove that a request comes from the user who runs the server."""
    return {OWNER_HEADER: app.owner.token}


class LiveServer:
    """`app` is for inspection only: its loop runs in another thread. `listener` is its listening socket."""

    def __init__(self, url: str, app: ServerApp, loop: asyncio.AbstractEventLoop, listener: Any) -> None:
        self.url, self.app, self.loop, self.listener = url, app, loop, listener

    @property
    def owner(self) -> dict[str, str]:
        return owner_headers(self.app)

    def noted(self) -> AbstractContextManager[Any]:
        """With the file of a running server, from which commands have the token."""
        return announced(HttpSettings(), int(self.url.rpartition(":")[2]), self.app.owner.token)

    def status(self, model: str) -> Any:
        return self.app.scheduler.status()[model]


def demo_config(script: list[dict[str, Any]] | None = None, **model: Any) -> dict[str, Any]:
    """A configuration with one scripted model for every name and two caches: main (4 slots) and fast (2 slots)."""
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
    config: dict[str, Any], env: dict[str, str] | None = None, *, ready: bool = True, library: bool = False
) -> Iterator[LiveServer]:
    """Serve `config` on a free port until the block ends. `ready` waits until all models are loaded. `library`: also
    serve the models of the library, and read it again when it changes through the API."""
    overrides = {**config, "http": {**config.get("http", {}), "port": 0}}
    reload = partial(load_config, env=env or {}, overrides=overrides, library=read_library_models if library else None)
    loaded = reload()
    started = threading.Event()
    result: list[Any] = []
    thread = threading.Thread(
        target=lambda: asyncio.run(_run(loaded.config, env or {}, result, started, reload if library else None)),
        daemon=True,
    )
    thread.start()
    if not started.wait(180) or isinstance(result[0], BaseException):
        raise result[0] if result else TimeoutError("the server did not start")
    server, uvicorn_server = result
    try:
        if ready:
            _wait_until_loaded(server)
        yield server
    finally:
        uvicorn_server.should_exit = True
        uvicorn_server.force_exit = True
        thread.join(180)
        assert not thread.is_alive(), "the server did not stop"


async def _run(
    config: Any, env: dict[str, str], result: list[Any], started: threading.Event, reload: ConfigLoader | None = None
) -> None:
    try:
        app = compose(config, env, reload)
        server = make_server(app.app, config.http)
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server._serve())
        while not server.started and not task.done():  # noqa: ASYNC110  uvicorn only sets a flag
            await asyncio.sleep(0.001)
        listener = server.servers[0].sockets[0]
        port = listener.getsockname()[1]
        scheme = "https" if config.http.ssl_certfile else "http"
        result += [LiveServer(f"{scheme}://127.0.0.1:{port}", app, asyncio.get_running_loop(), listener), server]
    except BaseException as error:
        result.append(error)
        started.set()
        return
    started.set()
    await task


def _wait_until_loaded(server: LiveServer) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if all(s.state in ("ready", "failed", "stopped") for s in server.app.scheduler.status().values()):
            return
        time.sleep(0.002)  # not without a rest: that would take the processor from the engines
    raise TimeoutError("the models did not load")
