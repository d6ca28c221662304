"""A model that LiteLLM reaches, as a ChatEngine: its chunks are read as an OpenAI upstream's would be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, EngineStats, Generation, OnProgress
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import Request, Sampling
from modelyard.engines.litellm import library
from modelyard.engines.litellm.options import Options
from modelyard.engines.litellm.outgoing import PASSED, arguments
from modelyard.engines.upstream.faults import blameless
from modelyard.engines.upstream.jobs import Jobs, Say
from modelyard.engines.upstream.retry import Patience, Refused, patiently
from modelyard.protocols import openai_chat
from modelyard.protocols.common.sse import frame

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    ignored=tuple(name for name in Sampling.__struct_fields__ if name not in PASSED),
)


class LiteLlmEngine:
    """It is never lost: a provider that is away fails requests, one by one."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model, self._options = spec.model, cast(Options, spec.options)
        self._name = f"the provider of {spec.model!r}"
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        can = replace(CAPABILITIES, modalities=spec.modalities)
        self.info = EngineInfo("litellm", dict(spec.caches), can, device="remote")
        self._patience = Patience(self._options.litellm_max_retries, self._options.litellm_timeout_s)
        self._jobs = Jobs()
        self._library: ModuleType | None = None
        self._key: str | None = None

    def __repr__(self) -> str:
        return f"<LiteLlmEngine {self._options.litellm_model} {len(self._jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "importing LiteLLM")
        library.verify()
        self._key = _key(self._model, self._options)
        self._library = await asyncio.to_thread(library.load)
        progress(1.0, "ready")

    def chat(self, request: Request) -> Generation[Event]:
        async def work(say: Say) -> None:
            asked = arguments(request, self._options, self._key)
            await patiently(lambda: self._once(asked, say), self._patience)

        return self._jobs.start(work)

    async def _once(self, asked: Mapping[str, Any], say: Say) -> None:
        if self._library is None:
            raise RuntimeError("the engine was asked to work before it was opened")
        try:
            chunks = await self._library.acompletion(**asked)
        except Exception as error:  # every provider has its own; all carry a status and a message
            raise Refused(self._ours(error), library.retry_after(error) is not None) from error
        try:
            await _follow(chunks, say)
        except ModelyardError:
            raise
        except Exception as error:
            raise self._ours(error) from error
        finally:
            await _close(chunks)

    def _ours(self, error: Exception) -> ModelyardError:
        status = getattr(error, "status_code", None)
        told = str(getattr(error, "message", "") or error)
        pause = library.retry_after(error)
        body = msgspec.json.encode({"error": {"message": told}})  # its `code` is the status once more
        headers = {} if pause is None else {"retry-after": pause}
        read = openai_chat.read_error(status if isinstance(status, int) else 502, headers, body)
        return blameless(read, self._name, f"the environment variable {self._options.litellm_api_key_env!r}")

    async def count(self, request: Request) -> int | None:
        """The library guesses with other models' tokenizers; that is no count."""
        del request
        return None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))

    async def close(self) -> None:
        self._jobs.refuse(Unavailable("the engine was closed"))
        await self._jobs.settled()


async def _follow(chunks: AsyncIterator[Any], say: Say) -> None:
    reader = openai_chat.reader()
    async for chunk in chunks:
        if await say(reader.feed(frame(chunk.model_dump_json(exclude_none=True).encode()))):
            return
    await say(reader.finish())


async def _close(chunks: Any) -> None:
    """What is not read to its end goes on, and costs, until it is closed."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


def _key(model: str, options: Options) -> str | None:
    name = options.litellm_api_key_env
    if name is not None and not os.environ.get(name):
        raise InvalidRequest(
            f"the model {model!r} takes its key from the environment variable {name!r}, which is not set",
            code="remote_key_missing",
        )
    return os.environ[name] if name is not None else None
