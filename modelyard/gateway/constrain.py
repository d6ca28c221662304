"""What an answer's form is held to: the client's own constraint, or the family's grammar where calls are to fit."""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.format import Place
from modelyard.core.request import Constraint, Request, Tool
from modelyard.gateway.model import Model, TextParts
from modelyard.prompt.constraints import enforceable, enforceable_format
from modelyard.scanner.scanner import Scanner


def constrain(request: Request, model: Model, prompt: str) -> tuple[Constraint | None, Sequence[str]]:
    """The constraint, if any, and what the client should know of it. `prompt` is the rendered text."""
    own = request.constraint
    if own is not None and own.kind == "json_schema" and model.text is not None:
        return enforceable_format(own)
    if own is not None or model.text is None or not request.tools:
        return own, ()
    is_forced = request.tool_choice.mode in ("required", "named")
    if not is_forced and not (model.constrain_calls or any(tool.strict for tool in request.tools)):
        return None, ()
    tools, warnings = enforceable(_callable(request))
    grammar = model.text.format_for(request).grammar
    made = grammar(tools, request.tool_choice, _place(request, model.text, prompt)) if grammar is not None else None
    if made is None and is_forced:
        return Constraint("tools", tools=tuple(tool.name for tool in tools)), ()
    return made, warnings if made is not None else ()


def _callable(request: Request) -> list[Tool]:
    """The tools that may be called: the named one, or all on offer."""
    choice = request.tool_choice
    return [t for t in request.tools if t.kind != "server" and (choice.mode != "named" or t.name == choice.name)]


def _place(request: Request, parts: TextParts, prompt: str) -> Place:
    """The grammar begins where the prompt ends: its first words may have to close the reasoning."""
    tail = parts.renderer.tail(prompt)
    begun = Scanner(parts.format_for(request), prefill=tail, new_id=str, specials=parts.vocab.specials)
    return Place(parts.vocab.specials, begun.is_thinking, request.parallel_tool_calls is not False)
