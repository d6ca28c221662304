"""The MCP server `fetch`: reads a page of the web as text, for models whose gateway allows it.

Only public addresses are read, also after a redirect, unless `allow_private` says otherwise.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from modelyard.mcp.connection import guarded_transport
from modelyard.outbound import AddressGuard

_MAX_BYTES = 4 << 20
_MAX_REDIRECTS = 5
_TIMEOUT_S = 30.0
_TEXTS = ("text/", "application/json", "application/xml", "application/xhtml+xml", "application/javascript")
_SPACE, _LINES = re.compile(r"[ \t\r\f\v]+"), re.compile(r"\n\s*\n\s*")


class FetchOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    allow_hosts: list[str] = Field(default_factory=lambda: ["*"], description="Globs of the hosts that are read.")
    allow_private: bool = Field(default=False, description="Whether they may have private or loopback addresses.")
    max_chars: int = Field(default=20_000, ge=100, description="Characters of a page that one call returns.")


def server(options: dict[str, Any], _env: Mapping[str, str]) -> Any:
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    settings, made = FetchOptions.model_validate(options), MCPServer("fetch")
    guard = AddressGuard(settings.allow_hosts, allow_private=settings.allow_private)

    @made.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=True), structured_output=False)
    async def fetch(url: str, start: int = 0) -> str:
        """Read a page of the web as text. A long page is returned in parts: `start` is the first character."""
        text = await read_page(url, guard)
        rest = len(text) - start - settings.max_chars
        more = f"\n[{rest} more characters: call again with start={start + settings.max_chars}]" if rest > 0 else ""
        return text[max(0, start) :][: settings.max_chars] + more

    return made


async def read_page(url: str, guard: AddressGuard) -> str:
    """Raises the library's `ToolError` with a reason for the model."""
    import httpx2
    from mcp.server.mcpserver.exceptions import ToolError

    headers = {"user-agent": "Modelyard", "accept": "text/html, text/plain, application/json, */*;q=0.5"}
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx2.AsyncClient(
                transport=guarded_transport(guard),
                headers=headers,
                follow_redirects=True,
                max_redirects=_MAX_REDIRECTS,
                timeout=_TIMEOUT_S,
            ) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code >= 400:
                raise ToolError(f"{url} answered {response.status_code} {response.reason_phrase}")
            kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
            if not kind.startswith(_TEXTS) and not kind.endswith(("+json", "+xml")):
                raise ToolError(f"{url} is {kind}, which is not text")
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ToolError(f"{url} is larger than {_MAX_BYTES} bytes")
            text = body.decode(response.charset_encoding or "utf-8", errors="replace")
    except TimeoutError:
        raise ToolError(f"{url} did not answer within {_TIMEOUT_S:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, LookupError, ValueError) as error:
        raise ToolError(f"cannot read {url}: {error or type(error).__name__}") from None
    return await asyncio.to_thread(plain_text, text) if "html" in kind else text


def plain_text(html: str) -> str:
    """What a reader sees of a page, with the addresses of its links."""
    reader = _PageText()
    reader.feed(html)
    reader.close()
    return _LINES.sub("\n\n", _SPACE.sub(" ", "".join(reader.found))).strip()


class _PageText(HTMLParser):
    _HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "head"})
    _BLOCKS = frozenset(
        {
            "p",
            "div",
            "br",
            "li",
            "tr",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "section",
            "article",
            "pre",
            "table",
            "title",
        }
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._hidden: list[str] = []
        self._link = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._HIDDEN:
            self._hidden.append(tag)
        elif tag in self._BLOCKS:
            self.found.append("\n")
        elif tag == "a":
            self._link = dict(attrs).get("href") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif tag in self._BLOCKS:
            self.found.append("\n")
        elif tag == "a" and self._link.startswith(("http://", "https://")) and not self._hidden:
            self.found.append(f" ({self._link})")
            self._link = ""

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.found.append(data)
