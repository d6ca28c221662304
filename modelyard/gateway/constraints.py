"""The constraint of an output: the client's own, or the format's grammar for tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Request, Tool
from modelyard.gateway.model import Model, TextPipeline
from modelyard.prompt.constraints import enforceable, enforceable_format, schema_of
from modelyard.scanner.custom_grammar import input_pattern
from modelyard.scanner.grammar import after_reasoning
from modelyard.scanner.scanner import Scanner


def constrain(
    request: Request, model: Model, prompt: str, *, structured: bool = True
) -> tuple[Constraint | None, Sequence[str]]:
    """The constraint, if any, and warnings about it. `prompt` is the rendered text.

    `structured`: the engine supports constraints. Without support, required constraints fail in the capability check
    and optional ones are dropped.
    """
    own, pipeline = request.constraint, model.text
    if model.kind == "chat" or pipeline is None:
        return own, ()  # the engine renders and constrains by itself
    is_forced = request.tool_choice.mode in ("required", "named")
    if own is not None and own.kind in ("json_schema", "json_object"):
        if not (is_forced and request.tools):  # a schema is for text, and the output must be a call
            return _response_format(own, request, pipeline, prompt)
    elif own is not None:
        return own, ()
    if not request.tools:
        return None, ()
    not_enforced = [
        f"grammar_not_enforced: {tool.name}: {error}" for tool in request.tools if (error := input_pattern(tool).error)
    ]
    if not is_forced and not (model.constrain_calls or any(_is_strict(tool) for tool in request.tools)):
        return None, not_enforced
    if not is_forced and not structured:
        return None, (f"strict_not_enforced: the engine of {model.name} does not support constraints",)
    tools, warnings = enforceable(_callable_tools(request))
    grammar = pipeline.format_for(request).grammar
    made: Constraint | None = None
    if grammar is not None:
        context = _grammar_context(request, pipeline, _scanner_at_start(request, pipeline, prompt))
        made = grammar(tools, request.tool_choice, context)
    if made is None and is_forced:
        return Constraint("tools", tools=tuple(tool.name for tool in tools)), ()
    return made, [*warnings, *not_enforced] if made is not None else not_enforced


def _response_format(
    own: Constraint, request: Request, pipeline: TextPipeline, prompt: str
) -> tuple[Constraint, Sequence[str]]:
    """A text that matches the schema, or calls of the tools that are offered."""
    own, dropped = enforceable_format(own)
    begin, schema = _scanner_at_start(request, pipeline, prompt), schema_of(own)
    if schema is None:
        return own, dropped
    if offered := _callable_tools(request):
        tools, warnings = enforceable(offered)
        context = _grammar_context(request, pipeline, begin, schema)
        grammar = pipeline.format_for(request).grammar
        made = None if grammar is None else grammar(tools, request.tool_choice, context)
        if made is not None:
            return made, [*dropped, *warnings]
        dropped = [*dropped, "calls_excluded: the format has no grammar for calls beside a response schema"]
    if begin.reasoning_end is not None:
        own = after_reasoning(own, schema, begin.reasoning_end, GrammarContext(pipeline.tokenizer.specials))
    return own, dropped


def _grammar_context(
    request: Request, pipeline: TextPipeline, begin: Scanner, schema: Mapping[str, Any] | None = None
) -> GrammarContext:
    parallel = request.parallel_tool_calls is not False
    return GrammarContext(pipeline.tokenizer.specials, begin.is_thinking, parallel, schema)


def _is_strict(tool: Tool) -> bool:
    """A custom tool with a grammar relies on it, as on a strict schema."""
    return bool(tool.strict) or input_pattern(tool).pattern is not None


def _callable_tools(request: Request) -> list[Tool]:
    """The named tool, or all that are offered."""
    choice = request.tool_choice
    return [t for t in request.tools if t.kind != "server" and (choice.mode != "named" or t.name == choice.name)]


def _scanner_at_start(request: Request, pipeline: TextPipeline, prompt: str) -> Scanner:
    """A scanner at the point where the output begins: a grammar may have to close the reasoning first."""
    tail, tokenizer = pipeline.renderer.tail(prompt), pipeline.tokenizer
    return Scanner(pipeline.format_for(request), prefill=tail, new_id=str, specials=tokenizer.specials)
