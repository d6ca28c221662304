"""A llama-server of our own, as a ChatEngine: watched, and forwarded to."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, OnProgress
from modelyard.core.request import Request
from modelyard.engines.llama_server import outgoing
from modelyard.engines.llama_server.options import Options
from modelyard.engines.llama_server.server import is_healthy, program
from modelyard.engines.managed.engine import ManagedEngine
from modelyard.engines.managed.server import Server
from modelyard.protocols import openai_chat

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    ignored=outgoing.IGNORED,
    thinking_modes=("default", "enabled", "disabled"),
)


class LlamaServer(ManagedEngine):
    """Made on the loop that it will run on."""

    def __init__(self, spec: EngineSpec) -> None:
        self._options = cast(Options, spec.options)
        can = msgspec.structs.replace(CAPABILITIES, modalities=spec.modalities)
        info = EngineInfo("llama_server", dict(spec.caches), can)
        super().__init__(spec, info, self._options.llama_server_start_timeout_s)

    async def _started(self, progress: OnProgress) -> Server:
        progress(0.0, "starting llama-server")
        return await Server.start(program(self._spec))

    async def _is_ready(self, server: Server, progress: OnProgress) -> bool:
        return await is_healthy(server, progress)

    def _body(self, request: Request) -> bytes:
        return outgoing.body(request, self._options)

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
