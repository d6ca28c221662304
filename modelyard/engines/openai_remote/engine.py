"""A model on another server, as a ChatEngine: nothing is loaded here, and every answer is forwarded as it comes."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, EngineStats, Generation, OnProgress
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import Request, Sampling
from modelyard.engines.openai_remote import outgoing
from modelyard.engines.openai_remote.kinds import KINDS, Kind, base_url
from modelyard.engines.openai_remote.options import Options
from modelyard.engines.upstream.client import Client, Place
from modelyard.engines.upstream.faults import blameless
from modelyard.engines.upstream.jobs import Jobs
from modelyard.engines.upstream.retry import Patience

log = logging.getLogger(__name__)

_NO_COUNTER = frozenset({404, 405, 501})

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    thinking_modes=("default", "enabled", "disabled"),
)


class RemoteEngine:
    """Made on the loop that it will run on. It is never lost: an upstream that is away fails requests, one by one."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model, self._options = spec.model, spec.options
        self._kind = KINDS[self._options.remote_api_kind]
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo("openai_remote", dict(spec.caches), _capabilities(spec, self._kind), device="remote")
        self._jobs = Jobs()
        self._client: Client | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._options.remote_base_url} {len(self._jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "looking at the settings")
        self._client = Client(self._place(), Patience(self._options.remote_max_retries, self._options.remote_timeout_s))
        if self._options.remote_health_check == "models":
            progress(0.5, f"asking {self._options.remote_base_url}")
            await self._look(self._client)
        progress(1.0, "ready")

    def _place(self) -> Place:
        options = self._options
        return Place(
            name=f"the upstream of {self._model!r}",
            base_url=base_url(options.remote_api_kind, options.remote_base_url),
            headers=self._kind.auth(_key(self._model, options)) | options.remote_headers,
            key=f"the environment variable {options.remote_api_key_env!r}",
            timeout=options.remote_timeout_s,
        )

    async def _look(self, client: Client) -> None:
        """A reply that is no list of models is an error; a model that is not in the list may be there all the same."""
        status, told = await client.ask("GET", self._kind.models)
        if status >= 400:
            error = self._kind.wire.read_error(status, {}, f"its list of models answered {status}".encode())
            raise blameless(error, client.place.name, client.place.key)
        names = [entry.get("id") for entry in _list(told) if isinstance(entry, dict)]
        if self._options.remote_model not in names:
            log.warning("%s does not list the model %r", client.place.name, self._options.remote_model)

    def chat(self, request: Request) -> Generation[Event]:
        async def work(say: Any) -> None:
            body = outgoing.body(request, self._options, self._kind)
            await self._opened.stream(self._kind.path, body, self._kind.wire, say)

        return self._jobs.start(work)

    async def count(self, request: Request) -> int | None:
        if self._kind.counts is None:
            return None
        body = outgoing.counting(request, self._options, self._kind)
        status, told = await self._opened.ask("POST", self._kind.counts, body)
        if status in _NO_COUNTER:
            return None
        counted = told.get("input_tokens") if isinstance(told, dict) else None
        if not isinstance(counted, int):
            raise Unavailable(f"{self._opened.place.name} cannot count tokens now: it answered {status}")
        return counted

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise RuntimeError("the engine was asked to work before it was opened")
        return self._client

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))

    async def close(self) -> None:
        self._jobs.refuse(Unavailable("the engine was closed"))
        await self._jobs.settled()
        if self._client is not None:
            await self._client.close()


def _key(model: str, options: Options) -> str:
    name = options.remote_api_key_env
    if name is None:
        return ""
    if not (key := os.environ.get(name, "")):
        raise InvalidRequest(
            f"the model {model!r} takes its key from the environment variable {name!r}, which is not set",
            code="remote_key_missing",
        )
    return key


def _list(told: Any) -> list[Any]:
    held = told.get("data") if isinstance(told, dict) else told
    return held if isinstance(held, list) else []


def _capabilities(spec: EngineSpec, kind: Kind) -> Capabilities:
    options: Options = spec.options
    takes_all = options.remote_extensions
    switches = takes_all or kind.name != "chat_completions" or options.remote_thinking != "default"
    return replace(
        CAPABILITIES,
        modalities=spec.modalities,
        logprobs=kind.logprobs,
        ignored=() if takes_all else tuple(n for n in Sampling.__struct_fields__ if n not in kind.sampling),
        thinking_modes=CAPABILITIES.thinking_modes if switches else ("default",),
    )
