"""What an answer's form is held to: the client's own constraint, or the family's grammar where calls are to fit."""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Request, Tool
from modelyard.gateway.model import Model, TextPipeline
from modelyard.prompt.constraints import enforceable, enforceable_format, schema_of
from modelyard.scanner.grammar import after_reasoning
from modelyard.scanner.regular import form
from modelyard.scanner.scanner import Scanner


def constrain(
    request: Request, model: Model, prompt: str, *, structured: bool = True
) -> tuple[Constraint | None, Sequence[str]]:
    """The constraint, if any, and what the client should know of it. `prompt` is the rendered text; `structured` is
    whether the engine can hold an answer to anything: where it cannot, a demand fails there and a wish is let go."""
    own = request.constraint
    if model.kind == "chat":
        return own, ()  # its engine renders, and constrains, by itself
    if own is not None and own.kind in ("json_schema", "json_object") and model.text is not None:
        own, dropped = enforceable_format(own)
        return _after_reasoning(own, request, model.text, prompt), dropped
    if own is not None or model.text is None or not request.tools:
        return own, ()
    is_forced = request.tool_choice.mode in ("required", "named")
    unheld = [f"grammar_not_enforced: {tool.name}: {fault}" for tool in request.tools if (fault := form(tool).fault)]
    if not is_forced and not (model.constrain_calls or any(_is_strict(tool) for tool in request.tools)):
        return None, unheld
    if not is_forced and not structured:
        return None, (f"the engine of {model.name} cannot hold calls to their schema: strict tools are not enforced",)
    tools, warnings = enforceable(_callable(request))
    grammar = model.text.format_for(request).grammar
    made = grammar(tools, request.tool_choice, _place(request, model.text, prompt)) if grammar is not None else None
    if made is None and is_forced:
        return Constraint("tools", tools=tuple(tool.name for tool in tools)), ()
    return made, [*warnings, *unheld] if made is not None else unheld


def _is_strict(tool: Tool) -> bool:
    """Whoever gives a custom tool a grammar relies on it, as on a strict schema."""
    return bool(tool.strict) or form(tool).pattern is not None


def _after_reasoning(own: Constraint, request: Request, parts: TextPipeline, prompt: str) -> Constraint:
    begun = _begun(request, parts, prompt)
    schema = schema_of(own)
    if schema is None or begun.closing is None:
        return own
    return after_reasoning(own, schema, begun.closing, GrammarContext(parts.vocab.specials))


def _callable(request: Request) -> list[Tool]:
    """The tools that may be called: the named one, or all on offer."""
    choice = request.tool_choice
    return [t for t in request.tools if t.kind != "server" and (choice.mode != "named" or t.name == choice.name)]


def _place(request: Request, parts: TextPipeline, prompt: str) -> GrammarContext:
    """The grammar begins where the prompt ends: its first words may have to close the reasoning."""
    begun = _begun(request, parts, prompt)
    return GrammarContext(parts.vocab.specials, begun.is_thinking, request.parallel_tool_calls is not False)


def _begun(request: Request, parts: TextPipeline, prompt: str) -> Scanner:
    """Stands where the answer begins."""
    tail = parts.renderer.tail(prompt)
    return Scanner(parts.format_for(request), prefill=tail, new_id=str, specials=parts.vocab.specials)
