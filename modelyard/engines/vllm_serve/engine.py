"""A `vllm serve` of our own, as a ChatEngine: watched, forwarded to, and put to sleep where that is wanted."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, OnProgress
from modelyard.core.errors import ContextOverflow, ModelyardError
from modelyard.core.request import Request
from modelyard.engines.managed.engine import ManagedEngine
from modelyard.engines.managed.server import Server
from modelyard.engines.vllm.arguments import window
from modelyard.engines.vllm_serve import outgoing
from modelyard.engines.vllm_serve.command import tools
from modelyard.engines.vllm_serve.dormitory import dormitory
from modelyard.engines.vllm_serve.options import Options
from modelyard.engines.vllm_serve.reason import stage
from modelyard.engines.vllm_serve.server import answers, lists_models, program, served

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    lora=True,
    ignored=outgoing.IGNORED,
    thinking_modes=("default", "enabled", "disabled"),
)


class VllmServe(ManagedEngine):
    """Made on the loop that it will run on."""

    verdict_s = 15.0  # its HTTP side looks every five seconds whether the engine behind it is dead

    def __init__(self, spec: EngineSpec) -> None:
        self._options = cast(Options, spec.options)
        can = replace(
            CAPABILITIES,
            modalities=spec.modalities,
            lora=bool(self._options.lora),
            tools=tools(self._options, served(spec).template) is not None,
        )
        info = EngineInfo("vllm_serve", dict(spec.caches), can)
        super().__init__(spec, info, self._options.vllm_serve_start_timeout_s)
        self._far = 0.0

    @property
    def _kind(self) -> str:
        """Servers of one kind are started in the same way: a sleeper of it does for this model."""
        return f"{self._spec.model}\n{self._options.model_dump_json()}\n{dict(self._spec.caches)!r}"

    async def _started(self, progress: OnProgress) -> Server:
        if self._options.vllm_serve_sleep_s and (woken := await dormitory().wake(self._kind)) is not None:
            progress(0.9, "woken up")
            self._far = 0.9
            return woken
        progress(0.0, "starting vllm serve")
        return await Server.start(program(self._spec))

    async def _is_ready(self, server: Server, progress: OnProgress) -> bool:
        if not await lists_models(server):
            self._tell(*stage(server.child.log.lines()), progress)
            return False
        if not self._options.vllm_serve_trial:
            return True
        self._tell(0.95, "asking for a first token", progress)
        return await answers(server, outgoing.trial(self._spec.model))

    def _tell(self, far: float, what: str, progress: OnProgress) -> None:
        if far > self._far:  # a log is read from its end: what has left it is not taken back
            self._far = far
            progress(far, what)

    def _is_ominous(self, error: ModelyardError) -> bool:
        """Its HTTP side outlives the engine behind it by some seconds, and speaks of it."""
        return super()._is_ominous(error) or "EngineCore" in error.message or "EngineDead" in error.message

    async def _let_go(self, server: Server) -> None:
        if self._options.vllm_serve_sleep_s and self._server is not None:
            self._server = None  # another engine may have it from now on
            await dormitory().lay_down(self._kind, server, self._options.vllm_serve_sleep_s)
        else:
            await server.stop()

    def _body(self, request: Request) -> bytes:
        return outgoing.body(request, self._options, self._spec.model, window(self._spec.caches))

    async def _explained(self, error: ModelyardError, server: Server, request: Request) -> ModelyardError:
        """It stops to count where the window ends; asked for nothing else, it tells how long the prompt really is."""
        if isinstance(error, ContextOverflow) and (counted := await self.count(request)) is not None:
            return ContextOverflow(max(counted, error.prompt_tokens), error.window)
        return await super()._explained(error, server, request)

    async def count(self, request: Request) -> int | None:
        """As the server itself would render it; None where it does not say."""
        body = outgoing.counting(request, self._options, self._spec.model)
        status, told = await self._running.client.ask("POST", "/tokenize", body)
        count: Any = told.get("count") if status == 200 and isinstance(told, dict) else None
        return count if isinstance(count, int) else None
