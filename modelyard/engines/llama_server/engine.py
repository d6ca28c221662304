"""A llama-server of our own, as a ChatEngine: watched, and forwarded to."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, EngineStats, Generation, OnProgress
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import Request
from modelyard.core.wire import Wire
from modelyard.engines.llama_server import outgoing
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.server import Server
from modelyard.engines.upstream.faults import LOST, UNREACHABLE
from modelyard.engines.upstream.jobs import Jobs, Say
from modelyard.protocols import openai_chat

_WIRE = cast(Wire, openai_chat)
_VERDICT = 5.0  # seconds for a broken connection to turn out to be a dead process


class LlamaServer:
    """Made on the loop that it will run on."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._options = spec, cast(Options, spec.options)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo("llama_server", dict(spec.caches), _capabilities(spec))
        self._jobs = Jobs()
        self._server: Server | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LlamaServer {self._spec.model} pid {self.pid} {len(self._jobs)} running>"

    @property
    def pid(self) -> int | None:
        return self._server.child.pid if self._server is not None else None

    def log_tail(self, count: int = 100) -> list[str]:
        """The last lines that it wrote."""
        return self._server.child.log.lines()[-count:] if self._server is not None else []

    # --- its life -----------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "starting llama-server")
        try:
            self._server = await Server.start(self._spec)
            await self._server.until_healthy(self._options.llama_server_start_timeout_s, progress)
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._server))
        progress(1.0, "ready")

    async def _watch(self, server: Server) -> None:
        await asyncio.shield(server.child.ended)
        self._die(server)

    def _die(self, server: Server) -> None:
        """Idempotent. `lost` first: who hears of it from a job asks at once for another engine."""
        if not self.lost.done():
            self.lost.set_result(death := server.death())
            self._jobs.refuse(death)

    async def close(self) -> None:
        """Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._jobs.refuse(Unavailable("the engine was closed"))
        await self._jobs.settled()
        if self._server is not None:
            await self._server.stop()

    # --- its work -----------------------------------------------------------------------------------------------------

    def chat(self, request: Request) -> Generation[Event]:
        async def work(say: Say) -> None:
            body, server = outgoing.body(request, self._options), self._running
            try:
                await server.client.stream("/v1/chat/completions", body, _WIRE, say)
            except Unavailable as error:
                raise await self._explained(error, server) from error

        return self._jobs.start(work)

    async def _explained(self, error: Unavailable, server: Server) -> ModelyardError:
        """A connection breaks a moment before its process is known to be dead; the process's own words say why."""
        if error.code not in (LOST, UNREACHABLE):
            return error
        await asyncio.wait({server.child.ended}, timeout=_VERDICT)
        if not server.child.ended.done():
            return error
        self._die(server)
        return server.death()

    async def count(self, request: Request) -> int | None:
        """As the server itself would render it; None where it does not say."""
        client = self._running.client
        body = openai_chat.write_request(outgoing.written(request, self._options))
        status, told = await client.ask("POST", "/apply-template", body)
        if status != 200 or not isinstance(told, dict):
            return None
        asked = {"content": told.get("prompt", ""), "add_special": True, "parse_special": True}
        status, told = await client.ask("POST", "/tokenize", msgspec.json.encode(asked))
        tokens: Any = told.get("tokens") if isinstance(told, dict) else None
        return len(tokens) if status == 200 and isinstance(tokens, list) else None

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the engine was asked to work before it was opened")
        return self._server

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))


def _capabilities(spec: EngineSpec) -> Capabilities:
    return Capabilities(
        modalities=spec.modalities,
        structured=True,
        logprobs=True,
        ignored=outgoing.IGNORED,
        thinking_modes=("default", "enabled", "disabled"),
    )
