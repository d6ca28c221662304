"""`modelyard mcp`: log in at a configured MCP server, see what it offers, and call it by hand."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, urlsplit

import typer
from rich.markup import escape

from modelyard.cli.console import ConfigOption, JsonOption, err, load_or_exit, out, print_json, print_table, run_or_exit
from modelyard.core.errors import InvalidRequest, NotFound, Unavailable

if TYPE_CHECKING:
    from mcp.client.auth import AuthorizationCodeResult

    from modelyard.mcp.connection import McpConnection

app = typer.Typer(
    no_args_is_help=True, help="Log in at MCP servers, see what they offer, and call them.", rich_markup_mode="rich"
)
NameArgument = Annotated[str, typer.Argument(help="A server of \\[mcp.servers].", show_default=False)]
_LOGIN_S = 300.0
_MAX_LINE = 16 << 10
_PAGE = "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n{text}\n"


class BrowserLogin:
    """Opens the person's browser and waits on this machine for the authorization server's redirect."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None

    async def show(self, url: str) -> None:
        """Listen before the browser is sent away: its way back may be short."""
        self._found: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        if self._server is None:
            try:
                self._server = await asyncio.start_server(self._answer, "127.0.0.1", self._port)
            except OSError as error:
                raise InvalidRequest(
                    f"cannot wait for the browser on port {self._port} ({error.strerror}): set oauth.redirect_port"
                ) from None
        err.print(f"Log in here, if no browser opens:\n{escape(url)}", soft_wrap=True)
        await asyncio.to_thread(webbrowser.open, url)

    async def wait(self) -> AuthorizationCodeResult:
        from mcp.client.auth import AuthorizationCodeResult

        try:
            found = await asyncio.wait_for(self._found, _LOGIN_S)
        except TimeoutError:
            raise Unavailable(f"nobody logged in within {_LOGIN_S:g} s") from None
        if "code" not in found:
            reason = found.get("error_description") or found.get("error") or "it sent no code"
            raise InvalidRequest(f"the authorization server refused the login: {reason[:500]}")
        return AuthorizationCodeResult(code=found["code"], state=found.get("state"), iss=found.get("iss"))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of the browser; anything but the callback (an icon) is not it."""
        with suppress(ConnectionError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            line = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
            target = urlsplit(line[:_MAX_LINE].decode("latin-1").split(" ")[1])
            is_ours = target.path == "/callback"
            status, text = ("200 OK", "You can close this page.") if is_ours else ("404 Not Found", "Nothing here.")
            writer.write(_PAGE.format(status=status, text=text).encode())
            await writer.drain()
            if is_ours and not self._found.done():
                self._found.set_result({name: values[0] for name, values in parse_qs(target.query).items()})
        writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


def _use(
    name: str, config: Path | None, work: Callable[[McpConnection], Awaitable[Any]], *, login: bool = False
) -> Any:
    """Run `work` on a connection of its own to the server, with all that the server has as tools."""
    from modelyard.mcp.servers import McpServers

    settings = load_or_exit(config).config.mcp.model_copy(deep=True)

    async def run() -> Any:
        if name not in settings.servers:
            raise NotFound(
                f"there is no MCP server {name!r}; [mcp.servers] has: {', '.join(settings.servers) or 'none'}"
            )
        server = settings.servers[name]
        server.resources = server.prompts = True
        person = None
        if login:
            if server.oauth is None or server.oauth.grant != "authorization_code":
                raise InvalidRequest(f"nobody logs in at {name!r}: its section has no oauth with authorization_code")
            person = BrowserLogin(server.oauth.redirect_port)
            settings.connect_timeout_s += _LOGIN_S
        servers = McpServers(settings, os.environ, person)
        try:
            return await work(servers.named(name))
        finally:
            await servers.close()
            if person is not None:
                await person.close()

    return run_or_exit(asyncio.run, run())


@app.command()
def login(name: NameArgument, config: ConfigOption = None) -> None:
    """Log in at a server with OAuth. The gateway uses and renews the tokens, which only this user can read."""

    async def work(connection: McpConnection) -> int:
        return len(await connection.tools())

    out.print(f"Logged in: {escape(name)} has {_use(name, config, work, login=True)} tools.")


@app.command("list")
def list_tools(name: NameArgument, as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """List the tools of a server, with those that read its resources and prompts."""

    async def work(connection: McpConnection) -> Any:
        return await connection.tools()

    tools = _use(name, config, work)
    if as_json:
        print_json(tools)
    else:
        print_table(("tool", "description"), [(tool.name, " ".join(tool.description.split())) for tool in tools])


@app.command()
def call(
    name: NameArgument,
    tool: Annotated[str, typer.Argument(help="Name of the tool; get_prompt and read_resource are some, too.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments, as JSON.")] = "{}",
    config: ConfigOption = None,
) -> None:
    """Call a tool of a server and print what it returns."""
    import msgspec

    from modelyard.core.request import Text

    try:
        values: dict[str, Any] = msgspec.json.decode(arguments, type=dict)
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"the arguments are not a JSON object: {error}") from None

    async def work(connection: McpConnection) -> Any:
        await connection.tools()
        return await connection.call(tool, values)

    result = _use(name, config, work)
    for part in result.content:
        out.print(escape(part.text) if isinstance(part, Text) else f"[{type(part).__name__.lower()}]", soft_wrap=True)
    if result.status != "ok":
        raise typer.Exit(1)
