"""The vllm serve engine: requests in vLLM's format, readiness by a trial request, and sleep after unloading.

Unloaded servers may sleep instead of exiting: they release the GPU memory, and a later load wakes them up. Every load
creates a new engine, so sleeping servers are kept per event loop. A sleeping server is stopped when its time is over,
when it exits, and when the event loop ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, OnProgress
from modelyard.core.errors import ContextOverflow, ModelyardError, NotFound
from modelyard.core.request import Request
from modelyard.engines.managed import ManagedEngine, ManagedServer, has_media, server_request
from modelyard.engines.upstream import append_fields
from modelyard.protocols import openai_chat, openai_completions
from modelyard_vllm.errors import startup_stage
from modelyard_vllm.options import max_model_len
from modelyard_vllm.request import IGNORED
from modelyard_vllm.serve.options import VllmServeOptions
from modelyard_vllm.serve.server import (
    lists_models,
    model_template,
    server_command,
    switches_thinking,
    tool_call_parser,
)

log = logging.getLogger(__name__)

_LEVEL = 1  # the weights move to RAM; level 2 would discard them


class SleepingServers:
    def __init__(self) -> None:
        self._servers: dict[str, list[tuple[ManagedServer, asyncio.Task[None]]]] = {}

    def __len__(self) -> int:
        return sum(len(servers) for servers in self._servers.values())

    async def put_to_sleep(self, key: str, server: ManagedServer, seconds: float) -> None:
        """Stops the server if it cannot sleep."""
        if not await _post(server, f"/sleep?level={_LEVEL}"):
            await server.stop()
            return
        task = asyncio.get_running_loop().create_task(self._stop_after(key, server, seconds))
        self._servers.setdefault(key, []).append((server, task))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not stop the server

    async def wake_up(self, key: str) -> ManagedServer | None:
        """A server with this key, awake; None if there is none."""
        while servers := self._servers.get(key):
            server, task = servers.pop()
            task.cancel()
            await asyncio.wait({task})
            if not server.has_exited and await _post(server, "/wake_up"):
                return server
            await server.stop()
        return None

    async def clear(self) -> None:
        """Stops all sleeping servers, as the end of the event loop does."""
        tasks = [task for servers in self._servers.values() for _, task in servers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_after(self, key: str, server: ManagedServer, seconds: float) -> None:
        try:
            await server.wait_exited(seconds)
        finally:
            before = self._servers.get(key, [])
            self._servers[key] = [entry for entry in before if entry[0] is not server]
            if len(self._servers[key]) < len(before):  # else it was woken up
                await server.stop()


async def _post(server: ManagedServer, path: str) -> bool:
    try:
        status, reply = await server.upstream.request_json("POST", path)
    except ModelyardError as error:
        status, reply = 0, error.message
    if status != 200:
        log.warning("%s: %s failed (%s: %s); stopping it", server.command.address.name, path, status, reply)
    return status == 200


_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, SleepingServers] = WeakKeyDictionary()


def sleeping_servers() -> SleepingServers:
    """The sleeping servers of the running event loop."""
    return _BY_LOOP.setdefault(asyncio.get_running_loop(), SleepingServers())


_GRAMMARS = {"gbnf": "grammar", "lark": "grammar", "regex": "regex"}

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    prompt_logprobs=True,
    lora=True,
    ignored=IGNORED,
    thinking_modes=("default", "enabled", "disabled"),
    embeddings=True,  # a server of a pooling model does; others refuse
    rerank=True,
)


class VllmServeEngine(ManagedEngine):
    """Create it on its event loop."""

    exit_grace_s = 15.0  # the HTTP server checks every five seconds whether the engine behind it is alive

    def __init__(self, spec: EngineSpec) -> None:
        self._options = cast(VllmServeOptions, spec.options)
        template = model_template(self._options)
        capabilities = replace(
            CAPABILITIES,
            modalities=spec.modalities,
            lora=bool(self._options.lora),
            tools=tool_call_parser(self._options, template) is not None,
            thinking_modes=CAPABILITIES.thinking_modes if switches_thinking(template) else ("default",),
        )
        info = EngineInfo("vllm_serve", dict(spec.caches), capabilities)
        super().__init__(spec, info, self._options.vllm_serve_start_timeout_s)
        self._progress = 0.0

    @property
    def _sleep_key(self) -> str:
        """Servers with equal keys are interchangeable: they were started in the same way."""
        return f"{self._spec.model}\n{self._options.model_dump_json()}\n{dict(self._spec.caches)!r}"

    async def _start_server(self, progress: OnProgress) -> ManagedServer:
        if self._options.vllm_serve_sleep_s:
            server = await sleeping_servers().wake_up(self._sleep_key)
            if server is not None:
                self._report(0.9, "woken up", progress)
                return server
        progress(0.0, "starting vllm serve")
        return await ManagedServer.start(server_command(self._spec))

    async def _is_ready(self, server: ManagedServer, progress: OnProgress) -> bool:
        if not await lists_models(server):
            self._report(*startup_stage(server.child.log.lines()), progress)
            return False
        if not self._options.vllm_serve_trial:
            return True
        self._report(0.95, "requesting a first token", progress)
        trial = {"model": self._spec.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        try:
            status, _ = await server.upstream.request_json("POST", "/v1/chat/completions", msgspec.json.encode(trial))
        except ModelyardError:
            return False
        return status < 500  # a refusal is an answer too

    def _report(self, done: float, stage: str, progress: OnProgress) -> None:
        if done > self._progress:  # old lines leave the log, so a later look may see less
            self._progress = done
            progress(done, stage)

    def _may_be_exit(self, error: ModelyardError) -> bool:
        """The HTTP server outlives the engine behind it by some seconds; its errors name the engine."""
        return super()._may_be_exit(error) or "EngineCore" in error.message or "EngineDead" in error.message

    async def _release_server(self, server: ManagedServer) -> None:
        if self._options.vllm_serve_sleep_s and self._server is not None:
            self._server = None  # another engine may take it now
            await sleeping_servers().put_to_sleep(self._sleep_key, server, self._options.vllm_serve_sleep_s)
        else:
            await server.stop()

    def _request_body(self, request: Request) -> bytes:
        return chat_body(request, self._options, self._spec.model, max_model_len(self._spec.caches))

    async def _diagnose(self, error: ModelyardError, server: ManagedServer, request: Request | None) -> ModelyardError:
        """vLLM stops counting at the end of the window; its tokenizer endpoint knows the true length of the prompt."""
        has_messages = request is not None and bool(request.messages) and not has_media(request)
        if (
            isinstance(error, ContextOverflow)
            and request
            and has_messages
            and (counted := await self.count(request)) is not None
        ):
            return ContextOverflow(max(counted, error.prompt_tokens), error.window)
        return await super()._diagnose(error, server, request)

    async def count(self, request: Request) -> int | None:
        """Counts the prompt as the server renders it; None if the server does not answer."""
        if has_media(request):
            return await self._count_by_answering(request)
        body = tokenize_body(request, self._options, self._spec.model)
        status, reply = await self.server.upstream.request_json("POST", "/tokenize", body)
        count: Any = reply.get("count") if status == 200 and isinstance(reply, dict) else None
        return count if isinstance(count, int) else None


# --- requests ---------------------------------------------------------------------------------------------------------


def chat_body(request: Request, options: VllmServeOptions, model: str, window: int) -> bytes:
    """The body of /v1/chat/completions: OpenAI Chat with vLLM's extensions. It is a stream with usage, but for the
    prompt's log probabilities, which vLLM sends with a whole reply only.

    `model` is the name that the server knows. vLLM ends an answer at the end of the window, but it refuses a
    `max_tokens` larger than the window.
    """
    max_tokens = min(request.max_tokens, window) if request.max_tokens is not None else None
    is_stream = request.prompt_logprobs is None or request.echo
    streamed = replace(
        _vllm_request(request, options, model), max_tokens=max_tokens, n=1, stream=is_stream, include_usage=is_stream
    )
    fields: dict[str, Any] = {}
    if request.constraint is not None and (grammar := _GRAMMARS.get(request.constraint.kind)):
        fields["structured_outputs"] = {grammar: request.constraint.text}
    if request.kv_scope:
        fields["cache_salt"] = request.kv_scope  # prefixes are reused among equal salts only
    if request.prompts:
        return append_fields(openai_completions.write_request(_with_schema(streamed, fields)), fields)
    return append_fields(openai_chat.write_request(streamed), fields | _continuation(request))


def _with_schema(request: Request, fields: dict[str, Any]) -> Request:
    """vLLM takes the schema of a bare prompt among the structured outputs."""
    if request.constraint is None or request.constraint.kind not in ("json_schema", "json_object"):
        return request
    is_any = request.constraint.kind == "json_object"
    schema = {"json_object": True} if is_any else {"json": msgspec.Raw(request.constraint.text.encode())}
    fields["structured_outputs"] = schema
    return replace(request, constraint=None)


def tokenize_body(request: Request, options: VllmServeOptions, model: str) -> bytes:
    """The body of /tokenize: only the fields that add tokens to the prompt."""
    full = _vllm_request(request, options, model)
    prompt = Request(
        model=full.model,
        messages=full.messages,
        tools=full.tools,
        reasoning=replace(full.reasoning, effort=None, budget=None, visible=None),
        chat_template_kwargs=full.chat_template_kwargs,
        add_generation_prompt=full.add_generation_prompt,
        continue_final_message=full.continue_final_message,
    )
    return append_fields(openai_chat.write_request(prompt), _continuation(request))


def _vllm_request(request: Request, options: VllmServeOptions, model: str) -> Request:
    adapter, tools = request.lora_adapter, request.tools
    if adapter is not None and adapter not in options.lora:
        raise NotFound(f"the model {model!r} has no LoRA adapter {adapter!r}", code="adapter_not_found")
    if request.tool_choice.mode in ("required", "named"):
        # vLLM enforces the schema of a forced call for strict tools only.
        tools = tuple(replace(tool, strict=True) if tool.strict is None else tool for tool in tools)
    return replace(
        server_request(request, enable_thinking=options.enable_thinking),
        model=adapter or model,  # vLLM serves an adapter under its own model name
        add_generation_prompt=None if request.continue_final_message else request.add_generation_prompt,
        continue_final_message=None if request.continue_final_message else request.continue_final_message,
        tools=tools,
        sampling=replace(request.sampling, **dict.fromkeys(IGNORED)),
        constraint=None if request.constraint and request.constraint.kind in _GRAMMARS else request.constraint,
    )


def _continuation(request: Request) -> dict[str, Any]:
    """A conversation that ends with an assistant message is continued, unless the client says something else. vLLM does
    not take the name of the part."""
    asked = request.continue_final_message
    if asked is None and (request.add_generation_prompt is not None or not request.messages):
        return {}
    if asked or (asked is None and request.messages[-1].role == "assistant"):
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {}
