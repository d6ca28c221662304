"""Resources and prompts of a server as tools for the model: one that lists them, one that reads one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from mcp import Client, types

_MAX_PAGES = 20
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_URI = {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]}
_PROMPT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
}


class OwnTool(Struct, frozen=True):
    """`run` returns blocks of content of the library."""

    kind: str
    name: str
    description: str
    schema: dict[str, Any]
    run: Callable[[Client, dict[str, Any]], Awaitable[list[Any]]]


def own_tools(has: types.ServerCapabilities, offered: frozenset[str]) -> list[OwnTool]:
    """Those for what the server has and its settings offer."""
    return [tool for tool in _TOOLS if tool.kind in offered and getattr(has, tool.kind) is not None]


async def _list_resources(client: Client, _arguments: dict[str, Any]) -> list[Any]:
    found = [one async for page in _pages(client.list_resources) for one in page.resources]
    templates = [one async for page in _pages(client.list_resource_templates) for one in page.resource_templates]
    return [_text([*map(_described, found), *map(_described, templates)])]


async def _read_resource(client: Client, arguments: dict[str, Any]) -> list[Any]:
    from mcp.types import EmbeddedResource

    result = await client.read_resource(_string(arguments, "uri"))
    return [EmbeddedResource(resource=content) for content in result.contents]


async def _list_prompts(client: Client, _arguments: dict[str, Any]) -> list[Any]:
    return [_text([_described(one) async for page in _pages(client.list_prompts) for one in page.prompts])]


async def _get_prompt(client: Client, arguments: dict[str, Any]) -> list[Any]:
    values = arguments.get("arguments") or {}
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError("arguments must be an object of strings")
    result = await client.get_prompt(_string(arguments, "name"), values)
    return [message.content for message in result.messages]


async def _pages(read: Callable[..., Awaitable[Any]]) -> AsyncIterator[Any]:
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await read(cursor=cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


def _described(one: Any) -> dict[str, Any]:
    fields = one.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: fields[name] for name in ("uri", "uriTemplate", "name", "description", "arguments") if name in fields}


def _string(arguments: dict[str, Any], name: str) -> str:
    if not isinstance(value := arguments.get(name), str):
        raise ValueError(f"{name} must be a string")
    return value


def _text(value: Any) -> Any:
    from mcp.types import TextContent

    return TextContent(text=msgspec.json.encode(value).decode())


_TOOLS = (
    OwnTool("resources", "list_resources", "List the resources of this server.", _NOTHING, _list_resources),
    OwnTool("resources", "read_resource", "Read a resource of this server by its URI.", _URI, _read_resource),
    OwnTool("prompts", "list_prompts", "List the prompts of this server.", _NOTHING, _list_prompts),
    OwnTool("prompts", "get_prompt", "Read a prompt of this server.", _PROMPT, _get_prompt),
)
