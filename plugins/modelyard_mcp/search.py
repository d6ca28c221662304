"""The MCP server `search`: searches the web by a provider of the configuration.

| provider | needs |
|---|---|
| `searxng` | `url` of an instance whose settings allow JSON |
| `brave` | `key_env` |
| `tavily` | `key_env` |

`url` is the operator's choice, so it may be in their own network; the model chooses only the words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_TIMEOUT_S = 30.0
_MAX_QUERY = 1000


class Provider(NamedTuple):
    """`request`: the arguments of an HTTP request for words, a count and a key. `rows`: where the results are, and the
    names of their title, address and text."""

    url: str
    request: Callable[[str, int, str], dict[str, Any]]
    rows: tuple[str, ...]
    names: tuple[str, str, str]


PROVIDERS = {
    "searxng": Provider(
        "",
        lambda words, _count, _key: {"method": "GET", "params": {"q": words, "format": "json"}},
        ("results",),
        ("title", "url", "content"),
    ),
    "brave": Provider(
        "https://api.search.brave.com/res/v1/web/search",
        lambda words, count, key: {
            "method": "GET",
            "params": {"q": words, "count": str(count)},
            "headers": {"x-subscription-token": key, "accept": "application/json"},
        },
        ("web", "results"),
        ("title", "url", "description"),
    ),
    "tavily": Provider(
        "https://api.tavily.com/search",
        lambda words, count, key: {
            "method": "POST",
            "json": {"query": words, "max_results": count},
            "headers": {"authorization": f"Bearer {key}"},
        },
        ("results",),
        ("title", "url", "content"),
    ),
}


class SearchOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    provider: Literal["searxng", "brave", "tavily"] = Field(description="Whose search it is.")
    url: str | None = Field(default=None, description="Address of the search; needed for searxng: …/search.")
    key_env: str | None = Field(default=None, description="Environment variable with the provider's key.")
    max_results: int = Field(default=8, ge=1, le=20, description="Results of one search.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.provider == "searxng" and not self.url:
            raise ValueError("searxng needs the url of an instance, such as http://localhost:8888/search")
        if self.provider != "searxng" and not self.key_env:
            raise ValueError(f"{self.provider} needs key_env")
        return self


def server(options: dict[str, Any], env: Mapping[str, str]) -> Any:
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    settings, made = SearchOptions.model_validate(options), MCPServer("search")
    key = env.get(settings.key_env or "", "")
    if settings.key_env and not key:
        raise ValueError(f"the environment has no {settings.key_env}")

    @made.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=True), structured_output=False)
    async def web_search(query: str) -> str:
        """Search the web. The result lists titles, addresses and short texts."""
        found = await _search(settings, query[:_MAX_QUERY], key)
        return "\n\n".join(f"{title}\n{url}\n{text}" for title, url, text in found) or "Nothing was found."

    return made


async def _search(settings: SearchOptions, words: str, key: str) -> list[tuple[str, ...]]:
    import httpx2
    from mcp.server.mcpserver.exceptions import ToolError

    provider = PROVIDERS[settings.provider]
    request = provider.request(words, settings.max_results, key)
    try:
        async with asyncio.timeout(_TIMEOUT_S), httpx2.AsyncClient(timeout=_TIMEOUT_S) as client:
            answer = await client.request(url=settings.url or provider.url, **request)
            answer.raise_for_status()
            rows: Any = answer.json()
        for name in provider.rows:
            rows = rows[name]
        return [tuple(str(row.get(name) or "") for name in provider.names) for row in rows[: settings.max_results]]
    except TimeoutError:
        raise ToolError(f"{settings.provider} did not answer within {_TIMEOUT_S:g} s") from None
    except httpx2.HTTPStatusError as error:
        raise ToolError(f"{settings.provider} answered {error.response.status_code}") from None
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ToolError(f"{settings.provider} gave no results: {type(error).__name__}") from None
