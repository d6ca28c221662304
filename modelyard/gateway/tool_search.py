"""Tool search: the model finds tools that a request defers, by words (BM25) or a regular expression.

The search is a tool like those of MCP servers: the gateway runs its calls between two generations. Its results are
references to tools, whose definitions the model reads where they were found.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from modelyard.core.request import TOOL_SEARCH, Tool, ToolReference
from modelyard.mcp.connection import McpResult, failed_call

_FOUND = 5  # tools of one search
_MAX_PATTERN = 200  # characters
_K1, _B = 1.5, 0.75  # BM25's usual constants
_WORD = re.compile(r"[a-z]+|\d+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # getWeather
_ASKS = {"regex": "a regular expression that matches names or descriptions of tools", "": "words for what is needed"}


def is_tool_search(tool: Tool) -> bool:
    """A search that the client runs is an ordinary tool."""
    return tool.kind == "server" and (tool.type or "").startswith("tool_search")


class ToolSearch:
    """The connection of a search tool: it has the interface of an `McpConnection`."""

    name = TOOL_SEARCH

    def __init__(self, search: Tool, tools: Sequence[Tool]) -> None:
        self._is_regex = "regex" in (search.type or "")
        self._tools = [tool for tool in tools if tool.deferred]
        self.tool = Tool(
            search.name,
            f"Find tools: {len(self._tools)} more can be called once this has found them.",
            {
                "type": "object",
                "properties": {"query": {"type": "string", "description": _ASKS["regex" if self._is_regex else ""]}},
                "required": ["query"],
            },
        )

    async def call(self, _tool: str, arguments: dict[str, Any]) -> McpResult:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return failed_call("query must be a text")
        if self._is_regex and len(query) > _MAX_PATTERN:
            return failed_call(f"the pattern is longer than {_MAX_PATTERN} characters")
        texts = [" ".join(filter(None, _texts(tool))) for tool in self._tools]
        try:
            places = await asyncio.to_thread(match if self._is_regex else rank, query, texts)
        except ValueError as error:
            return failed_call(f"the pattern cannot be used: {error}")
        return McpResult(tuple(ToolReference(self._tools[place].name) for place in places[:_FOUND]))


def _texts(tool: Tool) -> Iterator[str]:
    """What is searched of a tool: its name, description, and those of its arguments."""
    yield from (tool.namespace or "", tool.name, tool.description)
    properties = tool.parameters.get("properties")
    for name, field in properties.items() if isinstance(properties, dict) else ():
        yield name
        if isinstance(field, dict) and isinstance(text := field.get("description"), str):
            yield text


def rank(query: str, texts: Sequence[str]) -> list[int]:
    """The places of the texts that have words of the query, best first (BM25)."""
    bags = [Counter(_words(text)) for text in texts]
    length = sum(bag.total() for bag in bags) / max(1, len(bags)) or 1
    scores = dict.fromkeys(range(len(texts)), 0.0)
    for word in set(_words(query)):
        having = [place for place, bag in enumerate(bags) if word in bag]
        rarity = math.log(1 + (len(bags) - len(having) + 0.5) / (len(having) + 0.5))
        for place in having:
            often, size = bags[place][word], bags[place].total()
            scores[place] += rarity * often * (_K1 + 1) / (often + _K1 * (1 - _B + _B * size / length))
    return sorted((place for place, score in scores.items() if score > 0), key=lambda place: -scores[place])


def _words(text: str) -> list[str]:
    return _WORD.findall(_HUMP.sub(" ", text).lower())


def match(pattern: str, texts: Sequence[str]) -> list[int]:
    """The places of the texts in which the pattern occurs, in their order. llguidance matches in linear time; Python's
    own matcher can take for ever. Raises ValueError for a pattern that it does not know."""
    from llguidance import LLMatcher, LLTokenizer

    inner = pattern.removeprefix("(?i)").removeprefix("^").removesuffix("$")
    before = "" if pattern.removeprefix("(?i)").startswith("^") else "(?s:.*)"
    whole = LLMatcher.grammar_from_regex(f"{before}(?i:{inner}){'' if pattern.endswith('$') else '(?s:.*)'}")
    matcher, places = LLMatcher(LLTokenizer("byte"), whole, log_level=0), []
    for place, text in enumerate(texts):
        one, data = matcher.deep_copy(), list(text.encode())
        if one.is_error():
            raise ValueError(one.get_error().splitlines()[0][:200])
        if one.try_consume_tokens(data) == len(data) and one.is_accepting():
            places.append(place)
    return places
