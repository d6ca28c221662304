"""The constraint of an output: the client's own, or the format's grammar for tool calls.

JSON Schemas are reduced to what a grammar can enforce. Other keywords are dropped with a warning, never refused. A
tool's schema comes from the tool's author. A keyword that the grammar language does not support, or that makes no
sense, must not fail the request: the rest of the schema is enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from modelyard.core.errors import InvalidRequest
from modelyard.core.limits import MAX_PATTERN
from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Request, Tool
from modelyard.gateway.model import Model, TextPipeline
from modelyard.scanner.custom_grammar import input_pattern
from modelyard.scanner.grammar import after_reasoning
from modelyard.scanner.scanner import Scanner

# --- JSON Schemas that a grammar can enforce --------------------------------------------------------------------------

_TYPES = frozenset({"string", "boolean", "integer", "number", "null", "object", "array"})
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_SIZES = ("int32", "int64", "float", "double")  # storage sizes of numbers; they restrict nothing
_BRANCHING = {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
_COUNTING = {"contains", "minContains", "maxContains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"}
_UNENFORCEABLE = frozenset({*_BRANCHING, *_COUNTING, "propertyNames", "$dynamicRef", "$recursiveRef"})
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_NUMBER_BOUNDS = (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"))
# Lookaround, back-references, word boundaries and possessive repetition are not regular.
_UNREGULAR = re.compile(r"\(\?(?!:)|\\[1-9bBAZzGkKpPQE]|[*+?}]\+")
# Where ^ and $ are not anchors, or are at either end; elsewhere they are not supported.
# A class that is not closed reaches to the end: searching for its end again and again would take quadratic time.
_UNANCHORED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\Z)|\A\^|\$\Z", re.DOTALL)
# Set operations in a class: languages read them differently.
_SET_OPERATION = re.compile(r"\A\[\^?\[|--|&&|~~|\|\|")
# `re.compile` takes 10 ms for a class with characters beyond these 256. Which ones they are makes no pattern invalid.
_FAR_CHARACTER = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\0-\xff]")
_MAX_DEPTH = 64
_MAX_VISITS = 10_000  # of references; beyond that the engine decides
_DROP = object()


def enforceable(tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools with enforceable schemas, and a warning for each dropped keyword."""
    warnings: list[str] = []
    return tuple(_tool(tool, warnings) for tool in tools), warnings


def enforceable_format(constraint: Constraint) -> tuple[Constraint, list[str]]:
    """The same for a response format. Invalid text stays: the engine reports what is wrong with it."""
    warnings: list[str] = []
    schema = schema_of(constraint) if constraint.text else None
    if schema is None:
        return constraint, warnings
    reducer = SchemaReducer(constraint.name or "schema", schema, warnings)
    reduced = reducer.reduced()
    if reducer.loop is not None:
        raise InvalidRequest(
            f"the schema describes no value: $ref {reducer.loop[:80]!r} leads back to itself",
            code="bad_schema",
            param="response_format",
        )
    return msgspec.structs.replace(constraint, text=json.dumps(reduced, ensure_ascii=False)), warnings


def schema_of(constraint: Constraint) -> dict[str, Any] | None:
    """The schema of a response format; None if its text is not a schema."""
    if not constraint.text:
        return {"type": "object"} if constraint.kind == "json_object" else {}
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def _tool(tool: Tool, warnings: list[str]) -> Tool:
    reduced = SchemaReducer(tool.name, tool.parameters, warnings).reduced()
    return msgspec.structs.replace(tool, parameters=reduced if isinstance(reduced, dict) else {})


class SchemaReducer:
    """Processes one schema, keyword by keyword. A method that returns `_DROP` drops its keyword."""

    def __init__(self, name: str, schema: Mapping[str, Any], warnings: list[str]) -> None:
        self._name, self._root, self._warnings = name, schema, warnings
        self.loop: str | None = None  # a reference that leads back to itself
        self._open, self._ending, self._visits = set[str](), set[str](), 0

    def reduced(self) -> Any:
        return self._schema(self._root, "", 0)

    def _schema(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            self._warn(path)
            return {}
        out: dict[str, Any] = {}
        for word, value in schema.items():
            kept = self._keyword(word, value, f"{path}/{word}", depth)
            if kept is not _DROP:
                out[word] = kept
        return self._checked(out, schema, path)

    def _keyword(self, word: str, value: Any, path: str, depth: int) -> Any:
        if word in _LISTS_OF_SCHEMAS:
            return self._all(value, path, depth)
        if word in _MAPS_OF_SCHEMAS:
            return self._each(value, path, depth)
        if word in _SCHEMAS:
            return self._schema(value, path, depth + 1)
        if word == "items":  # a list in the older drafts
            return (self._all if isinstance(value, list) else self._schema)(value, path, depth + 1)
        if word == "$ref":
            return self._reference(value, path)
        if word == "format" and value in _SIZES:
            return _DROP
        if check := _CHECKS.get(word):
            return value if check(value) else self._warn(path)
        forbids = word in _UNENFORCEABLE and value is not False
        return self._warn(path) if forbids else _DROP  # the others do not restrict values

    def _all(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, list) or not value:
            return self._warn(path)
        return [self._schema(one, f"{path}/{at}", depth + 1) for at, one in enumerate(value)]

    def _each(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, Mapping):
            return self._warn(path)
        return {key: self._schema(one, f"{path}/{key}", depth + 1) for key, one in value.items()}

    def _checked(self, out: dict[str, Any], schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Check keywords that depend on each other."""
        for low, high in (*_BOUNDS, *_NUMBER_BOUNDS):
            if low in out and high in out and out[low] > out[high]:
                self._drop(out, high, path)
        if not set(out.get("properties", ())) <= set(out.get("required", ())):
            self._drop(out, "minProperties", path)
            self._drop(out, "maxProperties", path)
        patterns = out.get("patternProperties", {})
        if len(patterns) > 1 or not all(map(_is_regular, patterns)):  # two might fit one key
            self._drop(out, "patternProperties", path)
        if "oneOf" in out:
            self._widen(out, path)
        if schema.get("nullable") is True and isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
        return out

    def _widen(self, out: dict[str, Any], path: str) -> None:
        """A grammar cannot express "exactly one"; it can express "any"."""
        if "anyOf" in out:
            self._drop(out, "oneOf", path)
        else:
            out["anyOf"] = out.pop("oneOf")

    def _drop(self, out: dict[str, Any], word: str, path: str) -> None:
        if word in out:
            del out[word]
            self._warn(f"{path}/{word}")

    def _reference(self, ref: Any, path: str) -> Any:
        """The reference as a path inside this schema. Engines do not know anchors."""
        pointer = self._pointer(ref)
        if pointer is None:
            return self._warn(path)
        if not self._ends(pointer):
            self.loop = str(ref)
            return self._warn(path)
        return pointer

    def _pointer(self, ref: Any) -> str | None:
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        if ref == "#":
            return ref
        if not ref.startswith("#/"):
            return _find_anchor(self._root, ref[1:], "#", 0)
        pointer = ref if "%" not in ref else unquote(ref)
        return next((each for each in (ref, pointer) if isinstance(self._at(each), Mapping)), None)

    def _at(self, pointer: str) -> Any:
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        return found

    # --- references in a circle ---------------------------------------------------------------------------------------

    def _ends(self, pointer: str) -> bool:
        """Whether some value matches the target, so that following references comes to an end."""
        if pointer in self._open or self._visits > _MAX_VISITS:
            return pointer not in self._open
        if pointer not in self._ending:
            self._visits += 1
            self._open.add(pointer)
            if self._has_value(self._at(pointer), 0):
                self._ending.add(pointer)
            self._open.discard(pointer)
        return pointer in self._ending

    def _has_value(self, schema: Any, depth: int) -> bool:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return schema is not False
        if "$ref" in schema and (pointer := self._pointer(schema["$ref"])) is not None and not self._ends(pointer):
            return False
        return (
            all(self._has_value(one, depth + 1) for one in _schemas_in(schema, "allOf"))
            and all(
                any(self._has_value(one, depth + 1) for one in schemas)
                for word in ("anyOf", "oneOf")
                if (schemas := _schemas_in(schema, word))
            )
            and all(self._has_value(one, depth + 1) for one in _needed_parts(schema))
        )

    def _warn(self, path: str) -> Any:
        self._warnings.append(f"schema keyword not enforced: {self._name}{path}")
        return _DROP


def _schemas_in(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


def _needed_parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a part of every value must match."""
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        leading = _schemas_in(schema, "prefixItems")
        yield from leading[:least]
        if least > len(leading) and isinstance(schema.get("items"), Mapping):
            yield schema["items"]


def _find_anchor(schema: Any, name: str, pointer: str, depth: int) -> str | None:
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        return None
    if schema.get("$anchor") == name or schema.get("$id") == f"#{name}":
        return pointer
    for key, value in schema.items():
        step = str(key).replace("~", "~0").replace("/", "~1")
        if (found := _find_anchor(value, name, f"{pointer}/{step}", depth + 1)) is not None:
            return found
    return None


def _is_regular(pattern: Any) -> bool:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        return False
    if _UNREGULAR.search(pattern.replace(r"\\", "/")):  # what follows an escaped backslash is not escaped
        return False
    if {"^", "$"} & set(_UNANCHORED.sub("", pattern)):
        return False
    classes = (found.group() for found in _UNANCHORED.finditer(pattern) if found.group().startswith("["))
    if any(map(_SET_OPERATION.search, classes)):
        return False
    try:
        re.compile(_FAR_CHARACTER.sub("\xff", pattern))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    named = value if isinstance(value, list) and value else [value]
    return all(isinstance(one, str) and one in _TYPES for one in named)


_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMAS = frozenset({"additionalProperties", "additionalItems"})
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda _: True,
    "required": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "pattern": _is_regular,
    "format": lambda value: isinstance(value, str) and value in _FORMATS,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **{word: _is_number for pair in _NUMBER_BOUNDS for word in pair},
    **{word: _is_count for pair in _BOUNDS for word in pair},
}


# --- the constraint of a request --------------------------------------------------------------------------------------


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
    if not is_forced and not (model.settings.constrain_calls or any(_is_strict(tool) for tool in request.tools)):
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
    tail = pipeline.renderer.tail(prompt)
    return Scanner(pipeline.format_for(request), prefill=tail, new_id=str, specials=pipeline.specials)
