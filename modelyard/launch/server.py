"""The server that an agent talks to: asked what it has, and started for the agent's time where there is none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.launch.plan import ANY_KEY, Facts
from modelyard.protocols import openai_chat

BACKGROUND = "local-haiku"  # a name that `*haiku*` routes catch and that no agent takes for a model it knows
_LOCAL = ("127.0.0.1", "localhost", "::1")
_PAUSE_S = 0.1
_GOODBYE_S = 30.0


class Server:
    """A server by its address. Every question is answered or raises one of our errors."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def is_there(self) -> bool:
        try:
            reply = self._http.get(f"{self.url}/health/live")
        except httpx.ConnectError:
            return False
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer: {error}") from None
        if reply.status_code != 200 or b"alive" not in reply.content:
            raise InvalidRequest(f"what answers at {self.url} is no modelyard: choose another address with --url")
        return True

    def facts(self, model: str | None, alive: Callable[[], None] = lambda: None) -> Facts:
        """Of `model`, or of the first that can answer. A model that is still being loaded is waited for."""
        name = model or self._first()
        while (card := self._card(name))["state"] == "loading":
            alive()
            time.sleep(_PAUSE_S)
        if card["state"] == "failed":
            raise Unavailable(f"the model {name!r} could not be loaded; {self.url}/health says why")
        key, window = self._key or ANY_KEY, card.get("context_length")
        return Facts(url=self.url, model=name, window=window, background=self._background(name), key=key)

    def _first(self) -> str:
        cards = self._get("/v1/models")["data"]
        if not cards:
            raise NotFound(f"{self.url} lists no models; name one with --model")
        ready = [card for card in cards if card["state"] in ("ready", "loading")]
        return str((ready or cards)[0]["id"])

    def _background(self, model: str) -> str:
        """The name that the routes have for small side requests, where they have one."""
        try:
            self._card(BACKGROUND)
        except NotFound:
            return model
        return BACKGROUND

    def _card(self, name: str) -> dict[str, Any]:
        return self._get(f"/v1/models/{quote(name)}")

    def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = self._http.get(self.url + path)
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self.url} broke: {error}") from None
        if reply.status_code != 200:
            raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
        answer: dict[str, Any] = reply.json()
        return answer


@contextmanager
def started(url: str, config: Path | None, log: Path, env: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Serve at `url` until the block ends. Gives a check that raises where the server has ended by itself."""
    address = urlsplit(url)
    if address.hostname not in _LOCAL:
        raise Unavailable(f"no server answers at {url}, and only one on this machine can be started")
    arguments = ["--port", str(address.port or 8000), *(("--config", str(config)) if config else ())]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        # A session of its own: Ctrl-C in the terminal is for the agent, not for the server.
        process = subprocess.Popen(  # noqa: S603  our own program
            [sys.executable, "-m", "modelyard", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(env),
            start_new_session=True,
        )
    try:
        yield lambda: _check(process, log)
    finally:
        _end(process)


def wait_for(server: Server, alive: Callable[[], None]) -> None:
    """Until it listens; `alive` raises where it never will."""
    while not server.is_there():
        alive()
        time.sleep(_PAUSE_S)


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is None:
        return
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise Unavailable(f"the server ended before it could answer ({log}): {''.join(last) or 'it said nothing'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
