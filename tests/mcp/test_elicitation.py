"""What becomes of a tool's question to the user, in a session of the official SDK."""

from __future__ import annotations

from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import (
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitRequestURLParams,
    InputRequiredResult,
)

from modelyard.mcp.connection import McpConnection
from modelyard.mcp.elicitation import Elicitation

server = MCPServer("forms")
TRIP = {"city": {"type": "string", "default": "Rome"}, "nights": {"type": "integer", "default": 2}}


def asks(ctx: Context, params: ElicitRequestParams) -> str | InputRequiredResult:
    """The tool's result is that input is required, until the client repeats the call with an answer."""
    if ctx.input_responses is None:
        return InputRequiredResult(input_requests={"it": ElicitRequest(params=params)}, request_state="half")
    answer: Any = ctx.input_responses["it"]
    return f"{answer.action} {answer.content} {ctx.request_state}"


def form(message: str, **fields: Any) -> ElicitRequestFormParams:
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    return ElicitRequestFormParams(message=message, requested_schema=schema)


@server.tool(structured_output=False)
def book(ctx: Context) -> str | InputRequiredResult:
    return asks(ctx, form("Where to?", **TRIP))


@server.tool(structured_output=False)
def greet(ctx: Context) -> str | InputRequiredResult:
    return asks(ctx, form("Who are you?", name={"type": "string"}))


@server.tool(structured_output=False)
def pay(ctx: Context) -> str | InputRequiredResult:
    return asks(ctx, ElicitRequestURLParams(message="Pay here", url="https://pay.example/1", elicitation_id="1"))


async def ask(tool: str, how: Elicitation) -> list[Any]:
    connection = McpConnection("forms", lambda _e, _o: server, timeout_s=20, connect_timeout_s=60, elicitation=how)
    try:
        return [part.text for part in (await connection.call(tool, {})).content]
    finally:
        await connection.close()


async def test_a_form_gets_its_defaults_if_the_setting_says_so_and_the_model_reads_the_question() -> None:
    assert await ask("book", "defaults") == [
        "accept {'city': 'Rome', 'nights': 2} half",
        "[answered with the defaults of city, nights: Where to?]",
    ]


async def test_a_form_is_declined_otherwise_and_the_model_reads_what_was_asked() -> None:
    declined = "[not answered: the tool asks the user for {}]"
    assert await ask("book", "decline") == ["decline None half", declined.format("city, nights: Where to?")]
    assert await ask("greet", "defaults") == ["decline None half", declined.format("name: Who are you?")]


async def test_an_address_is_never_opened() -> None:
    asked = "[the tool asks the user to open https://pay.example/1: Pay here]"
    assert await ask("pay", "defaults") == ["decline None half", asked]
