"""The remote engine: forwards requests to another server. It loads nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, EngineStats, Generation, OnProgress
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import Request, Sampling
from modelyard.engines.openai_remote.options import OpenAiRemoteOptions
from modelyard.engines.openai_remote.request import APIS, RemoteApi, base_url, chat_body, count_body
from modelyard.engines.upstream.client import UpstreamAddress
from modelyard.engines.upstream.forwarding import RetryPolicy, Upstream, map_auth_error, read_api_key
from modelyard.engines.upstream.jobs import Emit, UpstreamJobs

log = logging.getLogger(__name__)

_NO_COUNT_ENDPOINT = frozenset({404, 405, 501})

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    thinking_modes=("default", "enabled", "disabled"),
)


class OpenAiRemoteEngine:
    """Create it on its event loop. It is never lost: an unreachable upstream fails single requests."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model = spec.model
        self._options: OpenAiRemoteOptions = spec.options
        self._api = APIS[self._options.remote_api_kind]
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo("openai_remote", dict(spec.caches), _capabilities(spec, self._api), device="remote")
        self._jobs = UpstreamJobs()
        self._upstream: Upstream | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._options.remote_base_url} {len(self._jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "checking the settings")
        options = self._options
        key = read_api_key(self._model, options.remote_api_key_env) or ""
        address = UpstreamAddress(
            name=f"the upstream of {self._model!r}",
            base_url=base_url(options.remote_api_kind, options.remote_base_url),
            headers=self._api.auth_headers(key) | options.remote_headers,
            key_source=f"the environment variable {options.remote_api_key_env!r}",
            timeout=options.remote_timeout_s,
        )
        self._upstream = Upstream(address, RetryPolicy(options.remote_max_retries, options.remote_timeout_s))
        if options.remote_health_check == "models":
            progress(0.5, f"requesting the models of {options.remote_base_url}")
            await self._check_models()
        progress(1.0, "ready")

    async def _check_models(self) -> None:
        """Raises if the list of models cannot be read. An upstream may serve models that it does not list."""
        address = self._open_upstream.address
        status, reply = await self._open_upstream.request_json("GET", "/models")
        if status >= 400:
            error = self._api.protocol.read_error(status, {}, f"its list of models answered {status}".encode())
            raise map_auth_error(error, address)
        models = reply.get("data") if isinstance(reply, dict) else reply
        names = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
        if self._options.remote_model not in names:
            log.warning("%s does not list the model %r", address.name, self._options.remote_model)

    def chat(self, request: Request) -> Generation[Event]:
        async def run(emit: Emit) -> None:
            body = chat_body(request, self._options, self._api)
            await self._open_upstream.stream_chat(self._api.path, body, self._api.protocol, emit)

        return self._jobs.start(run)

    async def count(self, request: Request) -> int | None:
        if self._api.count_path is None:
            return None
        body = count_body(request, self._options, self._api)
        status, reply = await self._open_upstream.request_json("POST", self._api.count_path, body)
        if status in _NO_COUNT_ENDPOINT:
            return None
        count: Any = reply.get("input_tokens") if isinstance(reply, dict) else None
        if not isinstance(count, int):
            raise Unavailable(f"{self._open_upstream.address.name} cannot count tokens now: it answered {status}")
        return count

    @property
    def _open_upstream(self) -> Upstream:
        if self._upstream is None:
            raise RuntimeError("the engine is not open")
        return self._upstream

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))

    async def close(self) -> None:
        self._jobs.close(Unavailable("the engine was closed"))
        await self._jobs.join()
        if self._upstream is not None:
            await self._upstream.close()


def _capabilities(spec: EngineSpec, api: RemoteApi) -> Capabilities:
    options: OpenAiRemoteOptions = spec.options
    takes_all = options.remote_extensions
    can_switch_thinking = takes_all or api.kind != "chat_completions" or options.remote_thinking != "default"
    return replace(
        CAPABILITIES,
        modalities=spec.modalities,
        logprobs=api.has_logprobs,
        ignored=() if takes_all else tuple(name for name in Sampling.__struct_fields__ if name not in api.sampling),
        thinking_modes=CAPABILITIES.thinking_modes if can_switch_thinking else ("default",),
    )
