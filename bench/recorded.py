"""Recorded requests sent to a llama-server, one after another, in the words in which the agent sent them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from bench import peers
from modelyard.prompt.template_source import builtin

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_GENERATION = re.compile(r"\{%-? (?:end)?generation -?%\}")  # a mark for training that only some renderers know


class Failed(Exception):
    """A session that could not be measured."""


class Recorded(Struct, frozen=True):
    """A request as it came: where to, and its body."""

    path: str
    body: str


def replayed(
    requests: Sequence[Recorded], model: Path, template: str, window: int, slots: int
) -> list[tuple[int, int]]:
    """(prompt tokens, those of them that were cached) of each."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(_GENERATION.sub("", builtin(template)))
        file.flush()
        more = ("--jinja", "--chat-template-file", file.name)
        with (
            peers.llama_server(model, 1, window, slots, *more) as server,
            httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600, trust_env=False) as client,
        ):
            return [_asked(client, one) for one in requests]


def _asked(client: httpx.Client, one: Recorded) -> tuple[int, int]:
    reply = client.post(one.path, json=shortened(json.loads(one.body), one.path))
    if reply.status_code != 200:
        raise Failed(f"llama-server refused a recorded {one.path}: {reply.status_code} {reply.text[:500]}")
    return counted(reply.json())


def shortened(body: dict[str, Any], path: str) -> dict[str, Any]:
    """For one token of an answer, not streamed; and without the tools that run on their maker's servers, which it
    refuses."""
    kept = {key: value for key, value in body.items() if key not in (*_LIMITS, "stream", "stream_options")}
    if "tools" in kept:
        kept["tools"] = [tool for tool in kept["tools"] if _is_function(tool, path)]
    return kept | {"stream": False, "max_output_tokens" if path.endswith("responses") else "max_tokens": 1}


def _is_function(tool: dict[str, Any], path: str) -> bool:
    if path.endswith("messages"):
        return "input_schema" in tool
    return tool.get("type") == "function"


def counted(reply: dict[str, Any]) -> tuple[int, int]:
    """Each wire has words of its own for it."""
    if timings := reply.get("timings"):
        return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]
    usage = reply["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage.get("input_tokens_details", {}).get("cached_tokens", 0)
    return usage["prompt_tokens"], usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
