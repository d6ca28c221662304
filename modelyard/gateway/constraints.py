"""The constraint of an output: the client's own, or the format's grammar for tool calls.

`schemas.py` says JSON Schemas in the words of a grammar. What it cannot say is refused where the client asked for
`strict`. Else the rest is enforced, because many schemas come from the author of a tool and not from the client, and
the keywords that are not are named in a header of the reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from modelyard.core.errors import InvalidRequest
from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Request, Tool
from modelyard.gateway.model import Model, TextPipeline
from modelyard.gateway.schemas import rewritten
from modelyard.scanner.custom_grammar import input_pattern
from modelyard.scanner.grammar import after_reasoning
from modelyard.scanner.scanner import Scanner


class Constrained(msgspec.Struct):
    """`not_enforced`: paths of keywords that the constraint leaves out, `name/path`."""

    constraint: Constraint | None = None
    not_enforced: Sequence[str] = ()
    warnings: Sequence[str] = ()


# --- JSON Schemas -----------------------------------------------------------------------------------------------------


def enforceable(tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools with schemas of words that a grammar can enforce, and what is left out of them."""
    not_enforced: list[str] = []
    return tuple(_tool(tool, not_enforced) for tool in tools), not_enforced


def _tool(tool: Tool, not_enforced: list[str]) -> Tool:
    made = rewritten(tool.parameters)
    found = [f"{tool.name}{path}" for path in made.not_enforced]
    if tool.strict and found:
        raise _cannot_enforce(found, "tools")
    not_enforced += found
    return msgspec.structs.replace(tool, parameters=made.schema)


def enforceable_format(constraint: Constraint) -> tuple[Constraint, list[str]]:
    """The same for a response format. Invalid text stays: the engine reports what is wrong with it."""
    schema = schema_of(constraint) if constraint.text else None
    if schema is None:
        return constraint, []
    made = rewritten(schema)
    if made.loop is not None:
        raise InvalidRequest(
            f"the schema describes no value: $ref {made.loop[:80]!r} leads back to itself",
            code="bad_schema",
            param="response_format",
        )
    not_enforced = [f"{constraint.name or 'schema'}{path}" for path in made.not_enforced]
    if constraint.strict and not_enforced:
        raise _cannot_enforce(not_enforced, "response_format")
    return msgspec.structs.replace(constraint, text=json.dumps(made.schema, ensure_ascii=False)), not_enforced


def _cannot_enforce(paths: Sequence[str], param: str) -> InvalidRequest:
    words = ", ".join(dict.fromkeys(path.rpartition("/")[2] for path in paths[:8]))
    return InvalidRequest(
        f"strict: {words} cannot be enforced here ({', '.join(paths[:8])[:500]}); leave it out of the schema, or set "
        "strict to false",
        code="unsupported_schema",
        param=param,
    )


def schema_of(constraint: Constraint) -> dict[str, Any] | None:
    """The schema of a response format; None if its text is not a schema."""
    if not constraint.text:
        return {"type": "object"} if constraint.kind == "json_object" else {}
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


# --- the constraint of a request --------------------------------------------------------------------------------------


def constrain(request: Request, model: Model, prompt: str, *, structured: bool = True) -> Constrained:
    """The constraint, if any. `prompt` is the rendered text.

    `structured`: the engine supports constraints. Without support, required constraints fail in the capability check
    and optional ones are dropped.
    """
    own, pipeline = request.constraint, model.text
    if model.kind == "chat" or pipeline is None:
        return Constrained(own)  # the engine renders and constrains by itself
    is_forced = request.tool_choice.mode in ("required", "named")
    if own is not None and own.kind in ("json_schema", "json_object"):
        if not (is_forced and request.tools):  # a schema is for text, and the output must be a call
            return _response_format(own, request, pipeline, prompt)
    elif own is not None:
        return Constrained(own)
    if not request.tools:
        return Constrained()
    bad_grammars = [(tool.name, error) for tool in request.tools if (error := input_pattern(tool).error)]
    warnings = [f"grammar_not_enforced: {name}: {error}" for name, error in bad_grammars]
    left_out = [f"{name}/grammar" for name, _ in bad_grammars]
    if not is_forced and not (model.settings.constrain_calls or any(_is_strict(tool) for tool in request.tools)):
        return Constrained(None, left_out, warnings)
    if not is_forced and not structured:
        why = f"strict_not_enforced: the engine of {model.name} does not support constraints"
        return Constrained(None, [*left_out, *_strict_names(request)], [*warnings, why])
    tools, not_enforced = enforceable(_callable_tools(request))
    grammar = pipeline.format_for(request).grammar
    made: Constraint | None = None
    if grammar is not None:
        context = _grammar_context(request, pipeline, _scanner_at_start(request, pipeline, prompt))
        made = grammar(tools, request.tool_choice, context)
        not_enforced += _not_said(context, tools)
    if made is not None:
        return Constrained(made, [*left_out, *not_enforced], warnings)
    if is_forced:
        return Constrained(Constraint("tools", tools=tuple(tool.name for tool in tools)))
    return Constrained(None, [*left_out, *_strict_names(request)], warnings)


def _response_format(own: Constraint, request: Request, pipeline: TextPipeline, prompt: str) -> Constrained:
    """A text that matches the schema, or calls of the tools that are offered."""
    own, not_enforced = enforceable_format(own)
    begin, schema, warnings = _scanner_at_start(request, pipeline, prompt), schema_of(own), list[str]()
    if schema is None:
        return Constrained(own, not_enforced)
    if offered := _callable_tools(request):
        tools, of_tools = enforceable(offered)
        context = _grammar_context(request, pipeline, begin, schema)
        grammar = pipeline.format_for(request).grammar
        made = None if grammar is None else grammar(tools, request.tool_choice, context)
        if made is not None:
            return Constrained(made, [*not_enforced, *of_tools, *_not_said(context, tools)])
        warnings = ["calls_excluded: the format has no grammar for calls beside a response schema"]
    if begin.reasoning_end is not None:
        own = after_reasoning(own, schema, begin.reasoning_end, GrammarContext(pipeline.tokenizer.specials))
    return Constrained(own, not_enforced, warnings)


def _not_said(context: GrammarContext, tools: Sequence[Tool]) -> list[str]:
    """What the format's grammar leaves out of the tools' schemas: some write texts without quotes."""
    strict = {tool.name for tool in tools if tool.strict}
    if found := [path for path in context.not_enforced if path.partition("/")[0] in strict]:
        raise _cannot_enforce(found, "tools")
    return context.not_enforced


def _strict_names(request: Request) -> list[str]:
    return [f"{tool.name}/strict" for tool in request.tools if tool.strict]


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
    tail = pipeline.renderer.tail(prompt)
    return Scanner(pipeline.format_for(request), prefill=tail, new_id=str, specials=pipeline.specials)
