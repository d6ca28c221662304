"""Shared by engines that start a server as a child process and forward to it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import (
    Embeddings,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Ranking,
)
from modelyard.core.errors import ENGINE_DIED, Incomplete, ModelyardError, NotFound, Timeout, Unavailable
from modelyard.core.events import Event, Failed, Finished
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Audio, EmbeddingRequest, Image, Request, RerankRequest, ToolResult
from modelyard.engines.upstream import (
    UPSTREAM_LOST,
    UPSTREAM_UNREACHABLE,
    Emit,
    Upstream,
    UpstreamAddress,
    UpstreamJobs,
    append_fields,
    embed_inputs,
    rerank_documents,
)
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.processes.ports import reserve_port
from modelyard.protocols import openai_chat, openai_completions

T = TypeVar("T")

_POLL_S = 0.1

PrivateFolder = tempfile.TemporaryDirectory[str]  # only this user may read it; it holds the socket of the server


class ListenAddress(Struct, frozen=True):
    """A unix socket (`host` is its path, `port` is None) or a TCP address."""

    host: str
    port: int | None = None
    key: str = ""

    @classmethod
    def choose(
        cls, folder: PrivateFolder | None, host: str | None, port: int | None, key: str | None = None
    ) -> ListenAddress:
        """A socket in the folder if there is one; else the port, or a free one, behind a new key."""
        if folder is not None:
            return cls(str(Path(folder.name) / "server.sock"), key=key or "")
        host = host or "127.0.0.1"
        if not port:
            with reserve_port(host, 0) as reserved:
                port = reserved.getsockname()[1]
        return cls(host, port, key or secrets.token_urlsafe(24))

    def upstream(self, name: str, timeout: float | None) -> UpstreamAddress:
        """`timeout`: seconds without data during an answer."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return UpstreamAddress(
            name=name,
            base_url="http://localhost" if self.port is None else f"http://{host}:{self.port}",
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            socket=self.host if self.port is None else None,
            timeout=timeout,
            is_child=True,
        )


def find_program(field: str, configured: str | None, defaults: Sequence[str | Path], missing: str) -> str:
    """The configured program, else the first default that is installed. `missing` is the error without either."""
    programs = defaults if configured is None else [Path(configured).expanduser()]
    if found := next(filter(None, map(shutil.which, map(str, programs))), None):
        return found
    message = missing if configured is None else f"{field}: there is no program {str(programs[0])!r}"
    raise NotFound(message, code="program_missing")


def child_environment(
    inherited: Mapping[str, str], own: Mapping[str, str], library_path: Sequence[str], key: tuple[str, str]
) -> dict[str, str]:
    """`key` is (variable, value). The key is not on the command line, where every user could read it."""
    env = {**inherited, **own}
    name, value = key
    if value:
        env[name] = value
    else:
        env.pop(name, None)
    if library_path:
        folders = [str(Path(folder).expanduser()) for folder in library_path]
        env["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    return env


class ServerCommand(Struct, frozen=True, kw_only=True):
    """How to start and reach a server. `failure_reason` finds the reason of its end in its log. `folder` is removed
    with the server."""

    name: str
    model: str
    argv: Sequence[str]
    env: Mapping[str, str]
    address: UpstreamAddress
    failure_reason: Callable[[Sequence[str]], str]
    folder: PrivateFolder | None = None


class ManagedServer:
    """A started server."""

    def __init__(self, command: ServerCommand, child: ChildProcess, upstream: Upstream) -> None:
        self.command, self.child, self.upstream = command, child, upstream

    @classmethod
    async def start(cls, command: ServerCommand) -> ManagedServer:
        try:
            child = await ChildProcess.start(command.argv, command.env)
        except BaseException:
            if command.folder is not None:
                command.folder.cleanup()
            raise
        return cls(command, child, Upstream(command.address))

    @property
    def has_exited(self) -> bool:
        return self.child.ended.done()

    async def wait_exited(self, seconds: float | None = None) -> bool:
        await asyncio.wait({self.child.ended}, timeout=seconds)
        return self.has_exited

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Polls `is_ready`; raises if the server exits or is not ready after `seconds`."""
        name = self.command.name
        try:
            async with asyncio.timeout(seconds):
                while not await is_ready():
                    if await self.wait_exited(_POLL_S):
                        message = f"{name} {self._describe_exit()} (while loading {self.command.model})"
                        raise Unavailable(message, code="load_failed")
        except TimeoutError:
            last = self.child.log.tail(1) or "it wrote nothing"
            raise Timeout(f"{name} was not ready after {seconds:g} s: {last}", code="load_timeout") from None

    def exit_error(self) -> Unavailable:
        return Unavailable(f"{self.command.address.name} {self._describe_exit()}", code=ENGINE_DIED)

    def _describe_exit(self) -> str:
        exit_, reason = describe_exit(self.child.ended.result()), self.command.failure_reason(self.child.log.lines())
        return f"{exit_}: {reason}" if reason else exit_

    async def stop(self) -> None:
        """Idempotent."""
        await self.upstream.close()
        await self.child.stop()
        if self.command.folder is not None:
            self.command.folder.cleanup()


# --- the engine -------------------------------------------------------------------------------------------------------

Endpoint = tuple[str, WireProtocol]  # path and protocol
CHAT: Endpoint = ("/v1/chat/completions", cast(WireProtocol, openai_chat))
COMPLETIONS: Endpoint = ("/v1/completions", cast(WireProtocol, openai_completions))


def server_request(request: Request, *, enable_thinking: bool | None) -> Request:
    """Removes the fields that are for this gateway only. `enable_thinking` is the model's default."""
    reasoning = request.reasoning
    if reasoning.enabled is None and enable_thinking is not None:
        reasoning = replace(reasoning, enabled=enable_thinking)
    return replace(
        request,
        reasoning=reasoning,
        lora_adapter=None,
        priority=None,
        session=None,
        user=None,
        metadata=None,
        store=None,
        previous=None,
    )


def has_media(request: Request) -> bool:
    for message in request.messages:
        for part in message.parts:
            inner = part.content if isinstance(part, ToolResult) else (part,)
            if any(isinstance(each, Image | Audio) for each in inner):
                return True
    return False


class ManagedEngine(ABC):
    """Create it on its event loop. `exit_grace_s`: how long a failed answer waits for the exit of the server."""

    exit_grace_s = 5.0

    def __init__(self, spec: EngineSpec, info: EngineInfo, start_timeout_s: float) -> None:
        self._spec, self._start_timeout_s, self.info = spec, start_timeout_s, info
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._jobs = UpstreamJobs()
        self._server: ManagedServer | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._reused_tokens = self._evaluated_tokens = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec.model} pid {self.pid} {len(self._jobs)} running>"

    # --- to be defined by each engine ---------------------------------------------------------------------------------

    @abstractmethod
    async def _start_server(self, progress: OnProgress) -> ManagedServer: ...

    @abstractmethod
    async def _is_ready(self, server: ManagedServer, progress: OnProgress) -> bool: ...

    async def _checked(self, request: Request) -> Request:
        """The request as the server can take it; raises if it cannot."""
        return request

    @abstractmethod
    def _request_body(self, request: Request) -> bytes: ...

    @abstractmethod
    async def count(self, request: Request) -> int | None: ...

    async def _count_by_answering(self, request: Request) -> int | None:
        """Of a prompt with images, whose tokens the server tells only with an answer. Its cache has the prompt then."""
        events: list[Event] = []
        async for batch in self.chat(replace(request, max_tokens=1, n=1, constraint=None)):
            events += batch
        last = events[-1] if events else None
        if isinstance(last, Failed):
            raise last.error
        return last.usage.prompt if isinstance(last, Finished) else None

    def _endpoint(self, request: Request) -> Endpoint:
        return COMPLETIONS if request.prompts else CHAT

    @contextmanager
    def _placed(self, request: Request) -> Iterator[Mapping[str, Any]]:
        """While a request runs: further fields of its body, which say where in the server it runs."""
        del request
        yield {}

    def _may_be_exit(self, error: ModelyardError) -> bool:
        """Whether the error may be the first sign that the server exits."""
        return isinstance(error, Incomplete) or error.code in (UPSTREAM_LOST, UPSTREAM_UNREACHABLE)

    async def _release_server(self, server: ManagedServer) -> None:
        await server.stop()

    # --- process ------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return self._server.child.pid if self._server is not None else None

    def log_tail(self, count: int = 100) -> list[str]:
        """The last lines of its output."""
        return self._server.child.log.lines()[-count:] if self._server is not None else []

    @property
    def server(self) -> ManagedServer:
        if self._server is None:
            raise RuntimeError("the engine is not open")
        return self._server

    # --- life cycle ---------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        try:
            self._server = server = await self._start_server(progress)
            await server.wait_ready(lambda: self._is_ready(server, progress), self._start_timeout_s)
        except BaseException:
            await self._stop_jobs()
            if self._server is not None:
                await self._server.stop()
            raise
        self._watch_task = asyncio.get_running_loop().create_task(self._watch(server))
        progress(1.0, "ready")

    async def _watch(self, server: ManagedServer) -> None:
        await server.wait_exited()
        self._set_lost(server)

    def _set_lost(self, server: ManagedServer) -> None:
        """Idempotent. Sets `lost` before it fails the jobs: their clients ask for another engine at once."""
        if not self.lost.done():
            self.lost.set_result(error := server.exit_error())
            self._jobs.close(error)

    async def close(self) -> None:
        """Idempotent."""
        was_open = await self._stop_jobs()
        if self._server is not None:
            await (self._release_server(self._server) if was_open else self._server.stop())

    async def _stop_jobs(self) -> bool:
        """Returns whether the engine was open and well until now."""
        watch_task, self._watch_task = self._watch_task, None
        if watch_task is not None:
            watch_task.cancel()
        self._jobs.close(Unavailable("the engine was closed"))
        await self._jobs.join()
        return watch_task is not None and not self.lost.done()

    # --- requests -----------------------------------------------------------------------------------------------------

    def chat(self, request: Request) -> Generation[Event]:
        async def run(emit: Emit) -> None:
            server = self.server

            async def inspect(events: Sequence[Event]) -> bool:
                """Counts the tokens and diagnoses a failure before it is passed on."""
                last = events[-1] if events else None
                if isinstance(last, Finished):
                    self._reused_tokens += last.usage.cached
                    self._evaluated_tokens += last.usage.prompt - last.usage.cached
                elif isinstance(last, Failed):
                    events = [*events[:-1], Failed(await self._diagnose(last.error, server, request))]
                return await emit(events)

            try:
                checked = await self._checked(request)
                with self._placed(request) as fields:
                    body = append_fields(self._request_body(checked), fields)
                    path, protocol = self._endpoint(request)
                    await server.upstream.stream_chat(path, body, protocol, inspect)
            except ModelyardError as error:
                raise await self._diagnose(error, server, request) from error

        return self._jobs.start(run)

    async def embed_inputs(self, request: EmbeddingRequest) -> Embeddings:
        return await self._call(embed_inputs(self.server.upstream, "/v1/embeddings", request, self._spec.model))

    async def rerank(self, request: RerankRequest) -> Ranking:
        return await self._call(rerank_documents(self.server.upstream, "/v1/rerank", request, self._spec.model))

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except ModelyardError as error:
            raise await self._diagnose(error, self.server, None) from error

    async def _diagnose(
        self,
        error: ModelyardError,
        server: ManagedServer,
        request: Request | None,  # noqa: ARG002 - for subclasses
    ) -> ModelyardError:
        """A connection breaks just before the exit of the process is known; the log of the process has the reason."""
        if not self._may_be_exit(error) or not await server.wait_exited(self.exit_grace_s):
            return error
        self._set_lost(server)
        died = server.exit_error()
        return Unavailable(died.message) if error.code == UPSTREAM_UNREACHABLE else died  # it never got the request

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._jobs), reused_tokens=self._reused_tokens, evaluated_tokens=self._evaluated_tokens
        )
