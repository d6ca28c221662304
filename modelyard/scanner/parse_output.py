"""Parse a complete output: `modelyard.scanner.parse` in Python, `modelyard parse` in a shell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, count
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Finished, ReplyBuilder, Started, Usage
from modelyard.core.output_format import OutputFormat, SwitchRegion
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner.detect import detect
from modelyard.scanner.formats import load
from modelyard.scanner.scanner import Scanner, opened_quote

_SCHEMA_KEYS = ("parameters", "input_schema")


class ParsedCall(Struct, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ParsedOutput(Struct, frozen=True):
    reasoning: str
    content: str
    tool_calls: tuple[ParsedCall, ...]


def parse(
    chunks: Iterable[str | Piece | tuple[str, bool]],
    *,
    format: OutputFormat | str,
    tools: Sequence[Tool] | None = None,
    prefill: str = "",
    specials: Collection[str] = (),
) -> ParsedOutput:
    """Parse an output, given as text or as tokens. Without `tools` every name is a call.

    In text every marker counts. A token is a `Piece`, or a pair of its text and its special flag. What is a token
    somewhere counts only as that token: ordinary tokens that spell it quote it. `specials` names more such tokens.
    Without a `prefill`, a closing tag that comes before every other marker tells what the prompt opened.
    """
    form = load(format) if isinstance(format, str) else format
    pieces = [_as_piece(chunk) for chunk in ([chunks] if isinstance(chunks, str) else chunks)]
    tokens = frozenset((*specials, *(piece.text for piece in pieces if piece.special or piece.added)))
    prefill = prefill or _infer_prefill(form, pieces, tokens)
    ids = count()
    scanner = Scanner(
        form,
        tools=tools,
        prefill=prefill,
        new_id=lambda: f"call_{next(ids)}",
        tool_stream=False,
        specials=tokens,
    )
    builder = ReplyBuilder()
    builder.feed([Started("", "", 0)])
    for piece in pieces:
        builder.feed(scanner.feed([piece]))
    builder.feed([*scanner.finish(), Finished("end", Usage())])
    reply = builder.reply()
    return ParsedOutput(reply.thinking, reply.text, tuple(ParsedCall(c.name, c.arguments) for c in reply.calls))


def _as_piece(chunk: str | Piece | tuple[str, bool]) -> Piece:
    if isinstance(chunk, str):
        return Piece(chunk)
    return Piece(*chunk) if isinstance(chunk, tuple) else chunk


def _infer_prefill(form: OutputFormat, pieces: Sequence[Piece], tokens: Collection[str]) -> str:
    """The opening tag that must end the prompt, if the first marker of the output is its closing tag. A quoted one, and
    ordinary tokens that spell one, tell nothing."""
    closing = {
        f"{marker[0]}/{marker[1:]}": marker
        for region in form.regions.values()
        for marker, action in region.markers.items()
        if isinstance(action, SwitchRegion) and form.regions[action.region].kind == "thinking"
    }
    if not closing:
        return ""
    text = "".join(piece.text for piece in pieces)
    starts = accumulate((len(piece.text) for piece in pieces), initial=0)
    own = {start for start, piece in zip(starts, pieces, strict=False) if piece.special or piece.added}
    for found in re.finditer("|".join(map(re.escape, sorted(form.markers, key=len, reverse=True))), text):
        quote = opened_quote(text[max(0, found.start() - 2) : found.start()])
        is_quoted = quote is not None and text.startswith(quote, found.end())
        if not is_quoted and (found.group() not in tokens or found.start() in own):
            return closing.get(found.group(), "")
    return ""


def parse_command(
    text: str,
    *,
    format: str,
    template: str | None = None,
    tools: bytes | None = None,
    chunk: int | None = None,
    prefill: str = "",
) -> str:
    """`modelyard parse`: the result as JSON. `tools` is a JSON list in the shape of any protocol; `chunk` is a size."""
    if format == "auto" and template is None:
        raise InvalidRequest("--format auto needs --template FILE, the chat template to detect the format from")
    size = chunk or max(1, len(text))
    found = parse(
        [text[start : start + size] for start in range(0, len(text), size)],
        format=detect(format, template or "", "").format,
        tools=None if tools is None else read_tools(tools),
        prefill=prefill,
    )
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def read_tools(text: bytes) -> list[Tool]:
    try:
        given: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the tools are not JSON: {error}") from error
    listed = given.get("tools", [given]) if isinstance(given, dict) else given
    if not isinstance(listed, list):
        raise InvalidRequest("the tools must be a JSON list or an object with `tools`")
    return [_read_tool(item) for item in listed]


def _read_tool(given: Any) -> Tool:
    """The shapes of OpenAI, with or without `function` around the rest, and of Anthropic."""
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(name, str):
        raise InvalidRequest(f"a tool has no name: {msgspec.json.encode(given).decode()[:80]}")
    schema: dict[str, Any] = next((inner[key] for key in _SCHEMA_KEYS if isinstance(inner.get(key), dict)), {})
    return Tool(name, parameters=schema, kind="custom" if given.get("type") == "custom" else "function")
