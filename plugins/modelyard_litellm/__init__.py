"""Any provider that the LiteLLM library supports. Requests leave this machine, with consent.

The engine calls `litellm.acompletion` and reads its chunks as those of an OpenAI upstream.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from modelyard.core.engine import (
    Capabilities,
    EngineInfo,
    EnginePlugin,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
)
from modelyard.core.errors import ModelyardError, Unavailable, Unsupported
from modelyard.core.events import Event
from modelyard.core.request import Reasoning, Request, Sampling
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.engines.upstream import (
    UPSTREAM_UNREACHABLE,
    Emit,
    RetryableError,
    RetryPolicy,
    UpstreamAddress,
    UpstreamJobs,
    map_auth_error,
    read_api_key,
    reject_bare_prompts,
    with_retries,
)
from modelyard.plugins import MissingLibrary
from modelyard.protocols import openai_chat
from modelyard.protocols.common.sse import frame
from modelyard.telemetry.request_capture import current_capture


class LiteLlmOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    litellm_model: str = Field(
        min_length=1, description="LiteLLM's name of the model: provider/model, such as bedrock/…."
    )
    litellm_api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the key; unset: LiteLLM's own lookup."
    )
    litellm_api_base: str | None = Field(default=None, description="Address of the provider, if not the default.")
    litellm_timeout_s: float = Field(default=120.0, gt=0, description="Maximum time that LiteLLM waits, in seconds.")
    litellm_max_retries: int = Field(
        default=0, ge=0, le=10, description="Retries of a request that failed before the first byte of its answer."
    )
    litellm_params: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of litellm.acompletion, such as aws_region_name; os.environ/NAME is the value "
        "of that environment variable.",
    )


_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
_GRAMMARS = frozenset({"gbnf", "regex", "lark"})

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    ignored=tuple(name for name in Sampling.__struct_fields__ if name not in _SAMPLING),
)


_FROM_ENVIRONMENT = "os.environ/"
_LIBRARY_FAILED = "litellm_failed"
_TRACEBACK = "Traceback (most recent call last)"
_MAX_CAUSES = 16
# Classes of httpx, aiohttp and botocore. LiteLLM's own APIConnectionError is no sign: it has many causes.
_NETWORK_ERRORS = frozenset(
    {"ConnectError", "ConnectTimeout", "ClientConnectorError", "ClientConnectorDNSError", "EndpointConnectionError"}
)
_NETWORK_REASON = "the connection failed"

log = logging.getLogger(__name__)


def verify() -> None:
    if find_spec("litellm") is None:
        raise MissingLibrary(
            "litellm needs the Python package 'litellm': install it with pip install 'modelyard[litellm]'"
        )


def _import_litellm() -> ModuleType:
    """Takes seconds."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import downloads a price list
    library = importlib.import_module("litellm")
    vars(library).update(telemetry=False, suppress_debug_info=True)
    return library


class LiteLlmEngine:
    """Create it on its event loop. It is never lost: an unreachable provider fails single requests."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model, self._options = spec.model, cast(LiteLlmOptions, spec.options)
        self._address = UpstreamAddress(
            name=f"the provider of {spec.model!r}",
            base_url=self._options.litellm_api_base or "",
            key_source=f"the environment variable {self._options.litellm_api_key_env!r}",
        )
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        capabilities = replace(CAPABILITIES, modalities=spec.modalities)
        self.info = EngineInfo("litellm", dict(spec.caches), capabilities, device="remote")
        self._retries = RetryPolicy(self._options.litellm_max_retries, self._options.litellm_timeout_s)
        self._jobs = UpstreamJobs()
        self._library: ModuleType | None = None
        self._key: str | None = None

    def __repr__(self) -> str:
        return f"<LiteLlmEngine {self._options.litellm_model} {len(self._jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "importing LiteLLM")
        verify()
        self._key = read_api_key(self._model, self._options.litellm_api_key_env)
        self._library = await asyncio.to_thread(_import_litellm)
        progress(1.0, "ready")

    def chat(self, request: Request) -> Generation[Event]:
        async def run(emit: Emit) -> None:
            arguments = completion_arguments(request, self._options, self._key)
            if (capture := current_capture.get()) is not None:
                shown = {name: value for name, value in arguments.items() if name != "api_key"}
                capture.prompt(msgspec.json.encode(shown, enc_hook=str).decode())
            await with_retries(lambda: self._attempt(arguments, emit), self._retries)

        return self._jobs.start(run)

    async def _attempt(self, arguments: Mapping[str, Any], emit: Emit) -> None:
        if self._library is None:
            raise RuntimeError("the engine is not open")
        try:
            chunks = await self._library.acompletion(**arguments)
        except Exception as error:  # providers raise various types; all have a status and a message
            if (capture := current_capture.get()) is not None:
                capture.output(str(getattr(error, "message", "") or error).partition(_TRACEBACK)[0])
            raise RetryableError(self._map_error(error), _retry_after(error) is not None) from error
        reader, capture = openai_chat.reader(), current_capture.get()
        try:
            async for chunk in chunks:
                received = chunk.model_dump_json(exclude_none=True)
                if capture is not None:
                    capture.output(received + "\n")
                if await emit(reader.feed(frame(received.encode()))):
                    return
            await emit(reader.finish())
        except ModelyardError:
            raise
        except Exception as error:
            raise self._map_error(error) from error
        finally:
            # A stream that is not read to its end continues, and costs, until it is closed.
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()

    def _map_error(self, error: Exception) -> ModelyardError:
        """LiteLLM reports an unreachable provider and a fault of its own as 500; what it raised them from tells them
        apart. Its messages may hold a traceback, which no client sees."""
        causes = _causes(error)
        if missing := next((cause for cause in causes if isinstance(cause, ImportError)), None):
            log.error("LiteLLM lacks a package", exc_info=error)
            needed = f"LiteLLM needs the Python package {missing.name!r} for this request"
            return Unavailable(f"{needed}: install it with pip install 'modelyard[litellm]'", code=_LIBRARY_FAILED)
        if reason := next((_network_reason(cause) for cause in causes if _is_network_error(cause)), None):
            return Unavailable(f"{self._address.name} cannot be reached: {reason}", code=UPSTREAM_UNREACHABLE)
        status, retry_after = getattr(error, "status_code", None), _retry_after(error)
        if not isinstance(status, int):
            log.error("LiteLLM failed", exc_info=error)
            message = f"LiteLLM failed with {type(error).__name__}; the server's log has the details"
            return Unavailable(message, code=_LIBRARY_FAILED)
        message = str(getattr(error, "message", "") or error).partition(_TRACEBACK)[0].strip()
        body = msgspec.json.encode({"error": {"message": message}})  # LiteLLM's `code` only repeats the status
        headers = {} if retry_after is None else {"retry-after": retry_after}
        return map_auth_error(openai_chat.read_error(status, headers, body), self._address)

    async def count(self, request: Request) -> int | None:
        """None: LiteLLM estimates with tokenizers of other models."""
        del request
        return None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))

    async def close(self) -> None:
        self._jobs.close(Unavailable("the engine was closed"))
        await self._jobs.join()


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the first cause last."""
    found: list[BaseException] = []
    while (following := error.__cause__ or error.__context__) is not None and len(found) < _MAX_CAUSES:
        found.append(error)
        error = following
    return [*found, error]


def _is_network_error(error: BaseException) -> bool:
    """Of the operating system, or of a library that hides it: a provider's SDK may use any HTTP client."""
    is_os_error = isinstance(error, ConnectionError | socket.gaierror)
    return is_os_error or type(error).__name__ in _NETWORK_ERRORS


def _network_reason(error: BaseException) -> str:
    """Without the objects that aiohttp prints into its messages."""
    first = _causes(error)[-1]
    return first.strerror if isinstance(first, OSError) and first.strerror else _NETWORK_REASON


def _retry_after(error: Exception) -> str | None:
    """From the provider's headers, if the exception has them."""
    for headers in (getattr(error, "litellm_response_headers", None), getattr(error, "headers", None)):
        if headers is not None and (value := headers.get("retry-after")) is not None:
            return str(value)
    return None


def completion_arguments(request: Request, options: LiteLlmOptions, key: str | None) -> dict[str, Any]:
    """The arguments of `litellm.acompletion`: an OpenAI request, the address and the key."""
    reject_bare_prompts(request)
    if request.constraint is not None and request.constraint.kind in _GRAMMARS:
        raise Unsupported(
            f"this model takes JSON schemas, not a {request.constraint.kind} grammar", code="structured_unsupported"
        )
    accepted = Request(
        model=options.litellm_model,
        messages=request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=Sampling(**{name: getattr(request.sampling, name) for name in _SAMPLING}),
        max_tokens=request.max_tokens,
        stop=request.stop,
        logprobs=request.logprobs,
        constraint=request.constraint,
        reasoning=Reasoning(effort=request.reasoning.effort),
        stream=True,
        include_usage=True,
        user=request.user,
    )
    body: dict[str, Any] = msgspec.json.decode(openai_chat.write_request(accepted))
    connection = {"api_key": key, "api_base": options.litellm_api_base, "timeout": options.litellm_timeout_s}
    set_ = {name: value for name, value in connection.items() if value is not None}
    given = {name: _resolved(options.litellm_model, value) for name, value in (set_ | options.litellm_params).items()}
    return body | {"drop_params": True, "num_retries": 0, "max_retries": 0} | given


def _resolved(model: str, value: Any) -> Any:
    """LiteLLM's own form of a value that an environment variable has."""
    if not isinstance(value, str) or not value.startswith(_FROM_ENVIRONMENT):
        return value
    return read_api_key(model, value.removeprefix(_FROM_ENVIRONMENT))


# --- the plug-in interface --------------------------------------------------------------------------------------------

Options, create = LiteLlmOptions, LiteLlmEngine


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    options: LiteLlmOptions = spec.options
    yield from try_options(
        ("litellm_api_key_env", lambda name: read_api_key(spec.model, name), options.litellm_api_key_env),
        ("litellm_api_base", lambda value: _resolved(spec.model, value), options.litellm_api_base),
        *(
            ("litellm_params", lambda value: _resolved(spec.model, value), value)
            for value in options.litellm_params.values()
        ),
    )


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    kind="chat",
    capabilities=CAPABILITIES,
    holds_weights=False,
    remote=True,
    verify=verify,
    faults=faults,
    title="LiteLLM",
    distributions=("litellm",),
)
