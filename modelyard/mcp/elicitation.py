"""Elicitation: a tool asks the user for input while it runs. No user sits at a gateway: a form is declined or gets its
own default values, an address is never opened, and the model reads the question, so that it can pass it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mcp import types

Elicitation = Literal["decline", "defaults"]
_MAX_CHARS = 2000  # of a question


def answer(params: types.ElicitRequestParams, how: Elicitation) -> tuple[types.ElicitResult, str]:
    """The answer to the server, and what the model reads of it."""
    from mcp.types import ElicitResult

    question = params.message[:_MAX_CHARS]
    if params.mode == "url":
        return ElicitResult(action="decline"), f"[the tool asks the user to open {params.url[:_MAX_CHARS]}: {question}]"
    schema = params.requested_schema
    fields = {name: field for name, field in schema.get("properties", {}).items() if isinstance(field, dict)}
    values: dict[str, Any] = {name: field["default"] for name, field in fields.items() if "default" in field}
    named = ", ".join(fields)[:_MAX_CHARS]
    if how == "defaults" and values.keys() >= set(schema.get("required") or ()):
        return ElicitResult(action="accept", content=values), f"[answered with the defaults of {named}: {question}]"
    return ElicitResult(action="decline"), f"[not answered: the tool asks the user for {named}: {question}]"
