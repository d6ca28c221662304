"""The server that an agent uses: a client that asks it for its models, and a server that runs only for this launch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.launch.plan import PLACEHOLDER_KEY, LaunchTarget
from modelyard.protocols import openai_chat

BACKGROUND_MODEL = "local-haiku"  # routes for `*haiku*` match it, and no agent takes it for a model it knows
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_POLL_S = 0.1
_STOP_TIMEOUT_S = 30.0


class TargetServer:
    """A synchronous client of the server at `url`. Every method raises a ModelyardError if it fails."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def is_running(self) -> bool:
        try:
            reply = self._http.get(f"{self.url}/health/live")
        except httpx.ConnectError:
            return False
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer: {error}") from None
        if reply.status_code != 200 or b"alive" not in reply.content:
            raise InvalidRequest(f"the server at {self.url} is not Modelyard: choose another address with --url")
        return True

    def wait_until_running(self, check_alive: Callable[[], None]) -> None:
        """`check_alive` raises if the server process has exited."""
        while not self.is_running():
            check_alive()
            time.sleep(_POLL_S)

    def launch_target(self, model: str | None, check_alive: Callable[[], None] = lambda: None) -> LaunchTarget:
        """The target for `model`, or for the first usable model. Waits while the model is loading."""
        name = model or self._first_model()
        while (card := self._model(name))["state"] == "loading":
            check_alive()
            time.sleep(_POLL_S)
        if card["state"] == "failed":
            raise Unavailable(f"the model {name!r} failed to load; see {self.url}/health for the reason")
        try:
            self._model(BACKGROUND_MODEL)
            background = BACKGROUND_MODEL
        except NotFound:  # no route matches it
            background = name
        key = self._key or PLACEHOLDER_KEY
        return LaunchTarget(url=self.url, model=name, window=card.get("context_length"), background=background, key=key)

    def _first_model(self) -> str:
        cards = self._get("/v1/models")["data"]
        if not cards:
            raise NotFound(f"{self.url} lists no models; name one with --model")
        usable = [card for card in cards if card["state"] in ("ready", "loading")]
        return str((usable or cards)[0]["id"])

    def _model(self, name: str) -> dict[str, Any]:
        return self._get(f"/v1/models/{quote(name)}")

    def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = self._http.get(self.url + path)
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self.url} broke: {error}") from None
        if reply.status_code != 200:
            raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
        body: dict[str, Any] = reply.json()
        return body


class TemporaryServer:
    """A context manager that runs `modelyard serve` at `url` until the block ends."""

    def __init__(self, url: str, config: Path | None, log: Path, env: Mapping[str, str]) -> None:
        address = urlsplit(url)
        if address.hostname not in _LOCAL_HOSTS:
            raise Unavailable(f"no server answers at {url}, and a server can be started only on this machine")
        self._port, self._config, self._log, self._env = address.port or 8000, config, log, env
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        config = ("--config", str(self._config)) if self._config else ()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            # In its own session, so that Ctrl-C in the terminal reaches only the agent.
            self._process = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-m", "modelyard", "serve", "--port", str(self._port), *config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._env),
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check_alive(self) -> None:
        """Raise with the last line of the log if the process has exited."""
        if self._process.poll() is not None:
            last = "".join(self._log.read_text(errors="replace").strip().splitlines()[-1:])
            raise Unavailable(f"the server exited before it was ready ({self._log}): {last or 'its log is empty'}")
