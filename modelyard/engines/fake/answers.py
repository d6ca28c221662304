"""Answers of the fake engine when no rule matches: a demo, and the smallest value that satisfies a constraint."""

from __future__ import annotations

import importlib
import json
import math
import re
import string
from collections.abc import Iterable
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.fake.script import ConversationView, ScriptCall, ScriptStep

Steps = tuple[ScriptStep, ...]
Schema = dict[str, Any]

_CALL = re.compile(r"\bcall\s+[`\"']?([\w.-]+)[`\"']?\s*(\{.*\})?", re.IGNORECASE | re.DOTALL)
_THINK = re.compile(r"\bthink\b", re.IGNORECASE)
_MAX_QUOTE = 300  # characters


# --- demo -------------------------------------------------------------------------------------------------------------


def demo_answer(conversation: ConversationView) -> Steps:
    user = conversation.user
    if conversation.result is not None:
        return (ScriptStep(text=f"The tool answered: {_shorten(conversation.result)}"),)
    call = _CALL.search(user)
    if call and (name := call[1].rstrip(".")) in conversation.tools:
        return (ScriptStep(text=f"I call {name} for you. "), ScriptStep(call=_make_call(name, conversation, call[2])))
    quote = f"You said: “{_shorten(user)}”. " if user else ""
    # Finding the tools decodes the whole prompt: only do it when the user mentions them.
    tool = next(iter(conversation.tools), None) if "tool" in user.lower() else None
    hint = f"You offer tools: say “call {tool}” and I will. " if tool else ""
    greeting = ScriptStep(
        text=f"Hello! I am the built-in fake engine: there is no model behind me, only a script. {quote}{hint}"
        "Everything around me is real, though: routes, templates, tokens and streams. "
        "Give a model another backend in the configuration to talk to somebody wiser."
    )
    if not _THINK.search(user):
        return (greeting,)
    return (ScriptStep(think="The user wants to see some reasoning, so here is a thought."), greeting)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + "…"


def _make_call(name: str, conversation: ConversationView, arguments: str | None) -> ScriptCall:
    """Uses the user's arguments if they are a JSON object, else the smallest ones that the tool's schema accepts."""
    try:
        value = json.loads(arguments or "null")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        value = schema_instance(conversation.tools.get(name) or {"type": "object"})
    return ScriptCall(name=name, arguments=value if isinstance(value, dict) else {})


# --- constraints ------------------------------------------------------------------------------------------------------


def constrained_answer(constraint: Constraint, conversation: ConversationView) -> Steps | None:
    """None if the constraint leaves the answer free or is a grammar, which the fake engine does not support."""
    if constraint.trigger is not None:
        return None
    if constraint.kind == "json_object":
        return (ScriptStep(text="{}"),)
    if constraint.kind == "json_schema":
        try:
            schema = json.loads(constraint.text)
        except ValueError as error:
            raise InvalidRequest(f"the JSON schema is not JSON: {error}", code="invalid_json_schema") from None
        value = schema_instance(schema if isinstance(schema, dict | bool) else {})
        return (ScriptStep(text=json.dumps(value, ensure_ascii=False)),)
    if constraint.kind == "regex":
        return (ScriptStep(text=regex_sample(constraint.text)),)
    if constraint.kind != "tools" and not constraint.tools:
        return None
    allowed = constraint.tools or tuple(conversation.tools)
    if not allowed:
        return None
    call = _CALL.search(conversation.user)
    name = call[1] if call and call[1] in allowed else allowed[0]
    return (ScriptStep(call=_make_call(name, conversation, call[2] if call else None)),)


# --- JSON schema ------------------------------------------------------------------------------------------------------

_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "user@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_MAX_NODES = 10_000


def schema_instance(schema: Schema | bool) -> Any:
    """Returns a minimal value that the JSON schema accepts. Raises InvalidRequest if the schema is invalid, needs an
    infinite value, or has a dangling reference."""
    try:
        return _SchemaSampler(schema if isinstance(schema, dict) else {}).make(schema, ())
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidRequest(f"the JSON schema is not valid: {error}", code="invalid_json_schema") from None


class _InfiniteSchema(InvalidRequest):
    default_code = "invalid_json_schema"


def _check_size(count: int) -> int:
    if count > _MAX_NODES:
        raise _InfiniteSchema("the JSON schema asks for a value that is too large to generate")
    return count


class _SchemaSampler:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._nodes = 0

    def make(self, schema: Schema | bool, path: tuple[str, ...]) -> Any:
        """`path` holds the references being followed; meeting one again means infinite recursion."""
        self._nodes += 1
        _check_size(self._nodes)
        if not isinstance(schema, dict):
            return "text"
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in path:
                raise _InfiniteSchema(f"the JSON schema never ends: every value of {ref} contains another one")
            return self.make(_merge(self._resolve(ref), _without(schema, "$ref")), (*path, ref))
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        if parts := schema.get("allOf"):
            merged = _without(schema, "allOf")
            for part in parts:
                merged = _merge(merged, self._resolve(part["$ref"]) if "$ref" in part else part)
            return self.make(merged, path)
        for keyword in ("anyOf", "oneOf"):
            if options := schema.get(keyword):
                return self._first_finite(_without(schema, keyword), options, path)
        return self._make_type(_type_of(schema), schema, path)

    def _make_type(self, type_: str, schema: Schema, path: tuple[str, ...]) -> Any:
        if type_ == "object":
            return self._object(schema, path)
        if type_ == "array":
            return self._array(schema, path)
        if type_ == "string":
            return _string(schema)
        if type_ == "integer":
            return math.ceil(_number(schema, integer=True))
        if type_ == "number":
            return _number(schema, integer=False)
        return True if type_ == "boolean" else None

    def _resolve(self, ref: str) -> Schema:
        target: Any = self._root
        for part in ref.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target if key == "" else target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise InvalidRequest(f"the JSON schema has no definition for {ref}", code="invalid_json_schema")
        return target

    def _first_finite(self, rest: Schema, options: Iterable[Schema], path: tuple[str, ...]) -> Any:
        problem: InvalidRequest = _InfiniteSchema("the JSON schema has an empty choice")
        for option in options:
            try:
                return self.make(_merge(rest, option), path)
            except _InfiniteSchema as error:
                problem = error
        raise problem

    def _object(self, schema: Schema, path: tuple[str, ...]) -> Any:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not all(isinstance(name, str) for name in required):
            raise TypeError("a required property must be a string")
        names = list(dict.fromkeys(required))
        missing = _check_size(max(0, schema.get("minProperties", 0) - len(names)))
        optional = [name for name in properties if name not in names]
        optional += [f"key{i}" for i in range(missing)] if len(optional) < missing else []
        return {name: self.make(properties.get(name, {}), path) for name in names + optional[:missing]}

    def _array(self, schema: Schema, path: tuple[str, ...]) -> Any:
        items = list(schema.get("prefixItems", ()))
        count = _check_size(max(schema.get("minItems", 0), 0))
        items += [schema.get("items", {})] * (count - len(items))
        items = items[: schema.get("maxItems", len(items))]
        if not schema.get("uniqueItems"):
            return [self.make(item, path) for item in items]
        schemas = [self._resolve(item["$ref"]) if "$ref" in item else item for item in items]
        return [_distinct(schemas[i], self.make(item, path), i) for i, item in enumerate(items)]


def _without(schema: Schema, keyword: str) -> Schema:
    return {key: value for key, value in schema.items() if key != keyword}


def _merge(base: Schema, over: Schema | bool) -> Schema:
    if not isinstance(over, dict):
        return base
    merged = base | over
    if "properties" in base and "properties" in over:
        merged["properties"] = base["properties"] | over["properties"]
    if "required" in base and "required" in over:
        merged["required"] = list(dict.fromkeys([*base["required"], *over["required"]]))
    return merged


def _type_of(schema: Schema) -> str:
    type_ = schema.get("type")
    if isinstance(type_, list):
        type_ = type_[0] if type_ else None
    if type_ in ("object", "array", "string", "integer", "number", "boolean", "null"):
        return str(type_)
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    return "number" if "minimum" in schema or "maximum" in schema else "string"


def _string(schema: Schema) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    if "pattern" in schema:
        return regex_sample(schema["pattern"])
    return "text"[: schema.get("maxLength", 4)].ljust(_check_size(schema.get("minLength", 0)), "x")


def _number(schema: Schema, *, integer: bool) -> float | int:
    """Returns the lowest allowed number, or 0 if there is no lower bound."""
    low, exclusive = schema.get("minimum"), schema.get("exclusiveMinimum")
    if exclusive is not None and integer:
        low = math.floor(exclusive) + 1
    elif exclusive is not None:
        bound = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        low = float(exclusive + 1 if bound > exclusive + 1 else (exclusive + bound) / 2)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - 1)
    value: float | int = low if low is not None else min(0, high)
    multiple: float | int | None = schema.get("multipleOf")
    return math.ceil(value / multiple) * multiple if multiple else value


def _distinct(schema: Schema, value: Any, index: int) -> Any:
    """The item at `index` of an array whose items must differ."""
    if "enum" in schema:
        return schema["enum"][index % len(schema["enum"])]
    if isinstance(value, bool):
        return index % 2 == 0
    if isinstance(value, int | float):
        return value + index * schema.get("multipleOf", 1)
    return f"{value[: len(value) - len(str(index))]}{index}" if isinstance(value, str) and index else value


# --- regular expressions ----------------------------------------------------------------------------------------------

_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " \t\n",
    "CATEGORY_WORD": string.ascii_letters + string.digits + "_",
    "CATEGORY_NOT_DIGIT": string.ascii_letters,
    "CATEGORY_NOT_SPACE": string.ascii_letters,
    "CATEGORY_NOT_WORD": " -",
}
_MAX_SAMPLE = 100_000  # characters
_PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " "


def regex_sample(pattern: str) -> str:
    """Returns a short text that the pattern matches. It uses the parser of `re`, so it understands every pattern that
    `re` does; it ignores look-arounds."""
    try:
        parsed = importlib.import_module("re._parser").parse(pattern)
    except re.error as error:
        raise InvalidRequest(f"{pattern!r} is not a regular expression: {error}", code="invalid_regex") from None
    return _sample(parsed, {})


def _sample(parsed: Iterable[tuple[Any, Any]], groups: dict[int, str]) -> str:
    return "".join(_sample_node(str(op), argument, groups) for op, argument in parsed)


def _sample_node(op: str, argument: Any, groups: dict[int, str]) -> str:
    if op == "LITERAL":
        return chr(argument)
    if op == "ANY":
        return "a"
    if op == "NOT_LITERAL":
        return next(c for c in _PRINTABLE if ord(c) != argument)
    if op == "IN":
        if str(argument[0][0]) != "NEGATE":
            return _members(*argument[0])[0]
        excluded = {c for item in argument[1:] for c in _members(*item)}
        return next((c for c in _PRINTABLE if c not in excluded), "\u00e9")
    if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        text = _sample(argument[2], groups)
        if len(text) * argument[0] > _MAX_SAMPLE:
            raise InvalidRequest("a match of the regular expression is too long to generate", code="invalid_regex")
        return text * int(argument[0])
    if op == "SUBPATTERN":
        text = _sample(argument[-1], groups)
        if argument[0] is not None:
            groups[argument[0]] = text
        return text
    if op in ("BRANCH", "ATOMIC_GROUP"):
        return _sample(argument[1][0] if op == "BRANCH" else argument, groups)
    return groups.get(argument, "") if op == "GROUPREF" else ""


def _members(op: Any, argument: Any) -> str:
    if str(op) == "LITERAL":
        return chr(argument)
    if str(op) == "RANGE":
        return "".join(map(chr, range(argument[0], min(argument[1], argument[0] + 0x100) + 1)))
    return _CATEGORIES.get(str(argument), "a")
