"""One MCP server: a session that is opened at its first use, kept, and opened again after it died.

The library's session belongs to the task that opened it, so each session has a task of its own; requests call it from
theirs. Whatever goes wrong with a call is its result, because the model may try something else. Only a server that
cannot be reached, or does not list its tools, raises `ServerFailed`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Audio, Document, Image, ResultPart, Text
from modelyard.mcp.elicitation import Elicitation, answer
from modelyard.outbound import AddressGuard, PrivateAddress, host_name
from modelyard.plugins import load
from modelyard.processes.child_process import OutputTail
from modelyard.processes.parent_death import die_with_parent

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, types

log = logging.getLogger("modelyard.mcp")

_MAX_TOOLS = 1000
_MAX_PAGES = 100
_LIST_AGE_S = 300.0  # a server that changes its tools should say so; some do not
_MAX_BODY = 16 << 20  # bytes of an answer
_FIRST_PAUSE_S, _LAST_PAUSE_S = 2.0, 60.0  # after a server could not be opened
_CLOSE_S = 8.0  # the library waits for a program to end, then kills it
_PIPE_ITERATIONS = 5  # of the event loop, in which asyncio finishes with the pipes of a program that has ended
_LAST_LINES = 10  # of a program's stderr
_READ_ONLY = {"readOnlyHint": True}
_questions: ContextVar[list[str]] = ContextVar("questions")  # of the call that this task makes


class ServerFailed(InvalidRequest):
    """A server whose tools a request needs cannot be reached, or does not list them."""

    default_code = "mcp_server_failed"


class McpTool(Struct, frozen=True):
    """`schema` is what the server wrote; `is_valid`: it is a JSON schema of an object."""

    name: str
    description: str
    schema: dict[str, Any]
    annotations: dict[str, Any] | None = None
    is_valid: bool = True

    @property
    def is_read_only(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint"))


CallStatus = Literal["ok", "error", "timeout", "lost", "cancelled", "limit", "asked", "left_to_client"]


class McpResult(Struct, frozen=True):
    """What a call returned, or why it did not."""

    content: tuple[ResultPart, ...]
    status: CallStatus = "ok"


Transport = Callable[[OutputTail, Callable[[], None]], AbstractAsyncContextManager[Any]]


class McpConnection:
    """`transport` opens the streams of a session; it gets where a program's stderr goes, and what to call at its end.
    `timeout_s` is for one call. `offered`: what the model gets as tools besides them (`resources`, `prompts`)."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        elicitation: Elicitation = "decline",
        offered: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.used = name, 0.0
        self._elicitation, self._offered = elicitation, offered
        self._transport, self._timeout_s, self._connect_timeout_s = transport, timeout_s, connect_timeout_s
        self._session: _Session | None = None
        self._ending: list[_Session] = []  # sessions before it, whose programs may not have ended yet
        self._listing: asyncio.Lock | None = None
        self._fault: ServerFailed | None = None  # why it could not be opened
        self._pause_s, self._retry_at = _FIRST_PAUSE_S, 0.0

    def __repr__(self) -> str:
        state = "closed" if self._session is None or self._session.is_over else "open"
        return f"<McpConnection {self.name} {state}>"

    async def tools(self) -> tuple[McpTool, ...]:
        """The tools of the server, as it lists them."""
        loop = asyncio.get_running_loop()
        self.used = loop.time()
        self._listing = self._listing or asyncio.Lock()
        async with self._listing:
            session = await self._open()
            if session.tools is not None and loop.time() - session.listed < _LIST_AGE_S:
                return session.tools
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    session.tools = await session.list(self._offered)
            except TimeoutError:
                session.end()
                raise self._failed(f"did not list its tools within {self._connect_timeout_s:g} s") from None
            except Exception as error:
                session.end()
                raise self._failed(f"does not list its tools: {_reason(error)}") from error
            session.listed = loop.time()
            self._fault, self._pause_s = None, _FIRST_PAUSE_S
            return session.tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> McpResult:
        """Cancel the task to cancel the call: the server is told."""
        self.used = asyncio.get_running_loop().time()
        for is_last in (False, True):
            try:
                session = await self._open()
            except ServerFailed as error:
                return failed_call(error.message, "lost")
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await session.call(tool, arguments)
            except TimeoutError:
                return failed_call(f"the tool {tool!r} did not answer within {self._timeout_s:g} s", "timeout")
            except Exception as error:
                if _is_lost(error):
                    session.end()
                    if _never_ran(error) and not is_last:
                        continue
                    session.log_last_words()
                    return failed_call(f"the MCP server {self.name!r} was lost during the call", "lost")
                return failed_call(f"the tool {tool!r} failed: {_reason(error)}")
        raise AssertionError("the last attempt returns")

    async def close(self) -> None:
        sessions, self._session, self._ending = [*self._ending, self._session], None, []
        await asyncio.gather(*(session.close() for session in sessions if session is not None))

    async def _open(self) -> _Session:
        """A server that cannot be opened is not tried again for a while: every request of its route would wait."""
        loop, session = asyncio.get_running_loop(), self._session
        if session is None or session.is_over:
            if self._fault is not None and loop.time() < self._retry_at:
                raise ServerFailed(self._fault.message, param="mcp_servers")
            self._ending = [one for one in (*self._ending, session) if one is not None and not one.is_closed]
            session = self._session = _Session(self.name, self._transport, self._elicitation)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.shield(session.ready)
        except TimeoutError:
            session.end()
            session.log_last_words()
            raise self._failed(f"did not start within {self._connect_timeout_s:g} s") from None
        except InvalidRequest:
            session.end()
            raise
        except Exception as error:
            session.end()
            session.log_last_words()
            raise self._failed(f"cannot be reached: {_reason(error)}") from error
        return session

    def _failed(self, what: str) -> ServerFailed:
        self._fault = ServerFailed(f"the MCP server {self.name!r} {what}", param="mcp_servers")
        self._retry_at = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        return self._fault


class _Session:
    """One open session, in a task of its own. It is over when the server is lost or `end` was called."""

    client: Client

    def __init__(self, name: str, transport: Transport, elicitation: Elicitation) -> None:
        self._name, self._transport, self._elicitation = name, transport, elicitation
        self._own: Mapping[str, Any] = {}
        self._running: list[list[str]] = []  # what the server has asked during each call
        self._loop = asyncio.get_running_loop()
        self._stop, self.is_over = asyncio.Event(), False
        # Not the task's own cancellation: the library would leave a program that is still ending.
        self._opening = anyio.CancelScope()
        self._stderr = OutputTail()
        self.tools: tuple[McpTool, ...] | None = None
        self.listed = 0.0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # a reader may have left
        self._task = self._loop.create_task(self._run(), context=Context())  # of no request

    async def _run(self) -> None:
        ended = ConnectionError("it ended at once; the log has what it wrote")
        try:
            with self._opening:
                library = await asyncio.to_thread(_library)
                client = library.Client(
                    self._transport(self._stderr, self.end),
                    message_handler=self._on_message,
                    elicitation_callback=self._on_elicitation,
                )
                async with client:
                    self.client = client
                    self.ready.set_result(None)
                    await self._stop.wait()
            if not self.ready.done():
                self.ready.set_exception(ended)
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(_leaf(error) if isinstance(error, Exception) else ended)
            elif not self._stop.is_set():
                log.warning("the MCP server %s was lost: %s", self._name, _reason(error))
            if not isinstance(error, Exception):
                raise
        finally:
            self.is_over = True

    @property
    def is_closed(self) -> bool:
        return self._task.done()

    async def list(self, offered: frozenset[str]) -> tuple[McpTool, ...]:
        """The server's tools, and ours for its resources and prompts under names that the server does not use."""
        listed = await _list(self.client, self._name)
        found = load("mcp", "own_tools")(self.client.server_capabilities, offered) if offered else ()
        taken = {tool.name for tool in listed}
        self._own = own = {tool.name: tool for tool in found if tool.name not in taken}
        return *listed, *(McpTool(its.name, its.description, its.schema, _READ_ONLY) for its in own.values())

    async def call(self, tool: str, arguments: dict[str, Any]) -> McpResult:
        asked: list[str] = []
        _questions.set(asked)
        self._running.append(asked)
        try:
            if (own := self._own.get(tool)) is not None:
                result = McpResult(tuple(map(_part, await own.run(self.client, arguments))))
            else:
                result = _result(await self.client.call_tool(tool, arguments))
        finally:
            self._running.remove(asked)
        return msgspec.structs.replace(result, content=(*result.content, *map(Text, asked)))

    async def _on_elicitation(self, _context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        """The model reads what was asked. A server that asks outside of a request does not say for which call: then
        only a call that runs alone has the question, for others may be of another client."""
        made, question = answer(params, self._elicitation)
        asked = _questions.get(self._running[0] if len(self._running) == 1 else [])
        asked.append(question)
        return made

    async def _on_message(self, message: Any) -> None:
        if type(message).__name__ == "ToolListChangedNotification":
            self.tools = None

    def end(self) -> None:
        self.is_over = True
        self._stop.set()
        if not self.ready.done():
            self._opening.cancel()

    def log_last_words(self) -> None:
        """Not in the error: a client need not read what a program writes to its stderr."""
        if tail := self._stderr.tail(_LAST_LINES).strip():
            log.warning("the MCP server %s wrote: %s", self._name, tail)

    async def close(self) -> None:
        self.end()
        await asyncio.wait({self._task}, timeout=_CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)


def _library() -> Any:
    """The official package, which is an extra: importing it takes a second."""
    try:
        import mcp
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"MCP servers need the Python package {error.name!r}: install it with pip install 'modelyard[mcp]'",
            code="missing_library",
        ) from error
    return mcp


# --- transports -----------------------------------------------------------------------------------------------------


def program(command: str, args: list[str], env: Mapping[str, str], cwd: str | None) -> Transport:
    """A program on this machine, which ends with this process."""

    @asynccontextmanager
    async def open_streams(stderr: OutputTail, on_end: Callable[[], None]) -> AsyncIterator[Any]:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        loop = asyncio.get_running_loop()
        executable, *arguments = die_with_parent([command, *args], group=True)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)

        def read() -> None:
            with suppress(BlockingIOError):
                if data := os.read(read_end, 1 << 16):
                    stderr.feed(data)
                    return
                loop.remove_reader(read_end)
                on_end()  # only a program that has ended closes it

        loop.add_reader(read_end, read)
        try:
            with os.fdopen(write_end, "w") as errlog:
                server = StdioServerParameters(command=executable, args=arguments, env=dict(env), cwd=cwd)
                async with stdio_client(server, errlog) as streams:
                    errlog.close()  # the program has its own
                    yield streams
        finally:
            loop.remove_reader(read_end)
            os.close(read_end)
            for _ in range(_PIPE_ITERATIONS):
                await asyncio.sleep(0)

    return open_streams


def endpoint(
    url: str,
    headers: Mapping[str, str],
    guard: AddressGuard | None = None,
    auth: Callable[[], httpx2.Auth] | None = None,
) -> Transport:
    """A server that speaks streamable HTTP. With a `guard` only the addresses that it allows are connected to. `auth`
    makes what gets tokens for a session."""

    @asynccontextmanager
    async def open_streams(_stderr: OutputTail, _on_end: Callable[[], None]) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        transport, made = None if guard is None else guarded_transport(guard), auth and auth()
        timeout = httpx2.Timeout(30.0, read=None)  # a call's own limit ends it
        async with (
            httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=transport, auth=made) as client,
            streamable_http_client(url, http_client=client) as streams,
        ):
            yield streams

    return open_streams


def builtin(make: Callable[..., Any], name: str, options: dict[str, Any], env: Mapping[str, str]) -> Transport:
    """A server of the library in this process; the library connects to the object itself."""

    def open_server(_stderr: OutputTail, _on_end: Callable[[], None]) -> Any:
        try:
            return make(options, env)
        except ValueError as error:
            raise InvalidRequest(f"mcp.servers.{name}.options: {error}") from error

    return open_server


def guarded_transport(guard: AddressGuard) -> httpx2.AsyncBaseTransport:
    import httpx2

    class GuardedTransport(httpx2.AsyncBaseTransport):
        """Connects to the address that was checked, without a proxy, which would resolve the name again."""

        def __init__(self) -> None:
            self._inner = httpx2.AsyncHTTPTransport(trust_env=False)

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await self._pin(request)
            response = await self._inner.handle_async_request(request)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.stream = LimitedStream(response.stream)
            return response

        async def _pin(self, request: httpx2.Request) -> None:
            host = host_name(request.url.raw_host)
            if not guard.allows(host):
                raise httpx2.ConnectError(f"the host {host!r} is not allowed (the setting mcp.allow_urls)")
            try:
                address = (await guard.resolve(host))[0]
            except PrivateAddress:
                raise httpx2.ConnectError(
                    f"the host {host!r} has a private address; the setting allow_private permits that"
                ) from None
            except (OSError, UnicodeError) as error:
                raise httpx2.ConnectError(f"the host {host!r} has no address: {error}") from None
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=address)  # the Host header keeps the name

        async def aclose(self) -> None:
            await self._inner.aclose()

    class LimitedStream(httpx2.AsyncByteStream):
        """The body of an answer that is no stream of events: it is read whole."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._inner:
                size += len(chunk)
                if size > _MAX_BODY:
                    raise httpx2.ReadError(f"the answer is larger than {_MAX_BODY} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._inner.aclose()

    return GuardedTransport()


# --- the library's objects ------------------------------------------------------------------------------------------


async def _list(client: Client, server: str) -> tuple[McpTool, ...]:
    found: list[McpTool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        found += [_tool(tool, server) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None or len(found) >= _MAX_TOOLS:
            break
    return tuple({tool.name: tool for tool in found[:_MAX_TOOLS]}.values())


def _tool(tool: types.Tool, server: str) -> McpTool:
    annotations = tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else None
    fault = _schema_fault(tool.input_schema)
    if fault is not None:
        log.warning("the MCP server %s: the schema of its tool %s is wrong: %s", server, tool.name, fault)
    return McpTool(tool.name, tool.description or "", tool.input_schema, annotations or None, fault is None)


def _schema_fault(schema: dict[str, Any]) -> str | None:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if schema.get("type", "object") != "object":
        return f"its type is {schema['type']!r}, not 'object'"
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:200]
    return None


def _result(result: types.CallToolResult) -> McpResult:
    parts = tuple(_part(block) for block in result.content)
    if not parts and result.structured_content is not None:
        parts = (Text(msgspec.json.encode(result.structured_content).decode()),)
    return McpResult(parts, "error" if result.is_error else "ok")


def _part(block: Any) -> ResultPart:
    if block.type == "text":
        return Text(block.text)
    if block.type == "image":
        return Image(f"data:{block.mime_type};base64,{block.data}")
    if block.type == "audio":
        return Audio(f"data:{block.mime_type};base64,{block.data}")
    if block.type == "resource":
        return _resource(block.resource)
    return Text(f"[{block.type}: {getattr(block, 'uri', '')}]")


def _resource(resource: Any) -> ResultPart:
    if (text := getattr(resource, "text", None)) is not None:
        return Text(text)
    kind, name = resource.mime_type or "", str(resource.uri)
    url = f"data:{kind};base64,{resource.blob}"
    if kind.startswith("image/"):
        return Image(url)
    return Document(url, name) if kind == "application/pdf" else Text(f"[resource: {name}, {kind or 'unknown type'}]")


def failed_call(message: str, status: CallStatus = "error") -> McpResult:
    return McpResult((Text(message),), status)


def _leaf(error: BaseException) -> Exception:
    """Task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else ConnectionError(type(error).__name__)


def _reason(error: BaseException) -> str:
    leaf = _leaf(error)
    return (str(leaf) or type(leaf).__name__).splitlines()[0][:300]


def _is_lost(error: Exception) -> bool:
    """Whether the session cannot be used any more."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    leaf = _leaf(error)
    if isinstance(leaf, MCPError):
        return leaf.code == CONNECTION_CLOSED or _never_ran(leaf)
    return not isinstance(leaf, RuntimeError | ValueError)


def _never_ran(error: Exception) -> bool:
    """The server has forgotten the session, because it was restarted: the call was not run."""
    return str(_leaf(error)) == "Session terminated"
