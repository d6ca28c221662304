"""The llama-server process: found, started, waited for until it is healthy, and why it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import cast

from modelyard.core.engine import EngineSpec, OnProgress
from modelyard.core.errors import ModelyardError, NotFound, Timeout, Unavailable
from modelyard.engines.llama_server.command import Listening, command, environment
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.reason import reason
from modelyard.engines.upstream.client import Client, Place
from modelyard.library import llama_server as fetched
from modelyard.library.places import locate
from modelyard.processes.child import Child, fate
from modelyard.processes.port import reserve

log = logging.getLogger(__name__)

_LOOK = 0.1  # seconds between two looks at its health


class Server:
    """A started llama-server and the client that speaks to it."""

    def __init__(
        self, model: str, file: Path, child: Child, client: Client, folder: tempfile.TemporaryDirectory[str] | None
    ) -> None:
        self._model, self._file, self.child, self.client, self._folder = model, file, child, client, folder

    @classmethod
    async def start(cls, spec: EngineSpec) -> Server:
        options, caches = cast(Options, spec.options), spec.caches
        if len(caches) > 1:
            log.warning("%s: llama-server has one set of slots for the caches %s", spec.model, ", ".join(caches))
        binary, file = find_binary(options), locate(options.path)
        folder = tempfile.TemporaryDirectory(prefix="modelyard-llama-") if _is_private(options) else None
        at = _listening(options, folder)
        argv, env = command(binary, file, options, caches, at), environment(options, at, os.environ)
        try:
            child = await Child.start(argv, env)
        except BaseException:
            if folder is not None:
                folder.cleanup()
            raise
        return cls(spec.model, file, child, Client(_place(spec, at)), folder)

    async def until_healthy(self, limit: float, progress: OnProgress) -> None:
        try:
            async with asyncio.timeout(limit):
                while not await self._is_healthy(progress):
                    await asyncio.wait({self.child.ended}, timeout=_LOOK)
                    if self.child.ended.done():
                        raise self._stillbirth()
        except TimeoutError:
            last = self.child.log.tail(1) or "it wrote nothing"
            raise Timeout(f"llama-server was not ready after {limit:g} s: {last}", code="load_timeout") from None

    async def _is_healthy(self, progress: OnProgress) -> bool:
        try:
            status, _ = await self.client.ask("GET", "/health")
        except ModelyardError:
            return False  # it does not listen yet
        if status == 503:
            progress(0.2, "loading the weights")
        return status == 200

    def death(self) -> Unavailable:
        """How it ended, and why in its own words."""
        return Unavailable(f"the llama-server of {self._model!r} {self._end()}")

    def _stillbirth(self) -> Unavailable:
        return Unavailable(f"llama-server {self._end()} (it was to load {self._file})", code="load_failed")

    def _end(self) -> str:
        end, why = fate(self.child.ended.result()), reason(self.child.log.lines())
        return f"{end}: {why}" if why else end

    async def stop(self) -> None:
        await self.client.close()
        await self.child.stop()
        if self._folder is not None:
            self._folder.cleanup()


def find_binary(options: Options) -> str:
    if options.llama_server_binary is not None:
        named = Path(options.llama_server_binary).expanduser()
        if found := shutil.which(str(named)):
            return found
        raise NotFound(f"llama_server_binary: there is no program {str(named)!r}", code="program_missing")
    if found := shutil.which("llama-server") or shutil.which(str(fetched.place())):
        return found
    raise NotFound(
        "there is no llama-server on the PATH: name yours in llama_server_binary, or fetch one with "
        "python setup/llama_server.py",
        code="program_missing",
    )


def _is_private(options: Options) -> bool:
    return options.llama_server_host is None and options.llama_server_port is None


def _listening(options: Options, folder: tempfile.TemporaryDirectory[str] | None) -> Listening:
    if folder is not None:
        return Listening(str(Path(folder.name) / "llama.sock"))
    host = options.llama_server_host or "127.0.0.1"
    return Listening(host, options.llama_server_port or _free_port(host), secrets.token_urlsafe(24))


def _free_port(host: str) -> int:
    with reserve(host, 0) as held:
        port: int = held.getsockname()[1]
        return port


def _place(spec: EngineSpec, at: Listening) -> Place:
    return Place(
        name=f"the llama-server of {spec.model!r}",
        base_url=at.base_url,
        headers={"authorization": f"Bearer {at.key}"} if at.key else {},
        socket=at.host if at.port is None else None,
        timeout=spec.options.llama_server_timeout_s,
        loopback=True,
    )
