"""Grammars for constrained calls, in llguidance's dialect of Lark: the call syntax of a family as data.

`CallSyntax` is the text around the body of a call. `JsonBody`, `TaggedBody` and `PythonBody` are the ways in which
families write names and arguments. Calls can be constrained to a `CallGrammar`. Texts that are tokens of the vocabulary
are written as token ids: strings in a grammar never match special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.output_format import Dumps, GrammarContext, NamedCalls
from modelyard.core.request import Constraint, Tool, ToolChoice
from modelyard.scanner.arguments import schema_types
from modelyard.scanner.custom_grammar import escape_regex, input_pattern

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_DEFINITIONS = ("$defs", "definitions")
_JSON_LEXEMES = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[:,] ', re.DOTALL)
_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", NoneType: "null"}
_OF_OBJECTS = ("anyOf", "allOf", "$ref", "patternProperties", "minProperties", "maxProperties", "enum", "const")
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format", "anyOf", "allOf", "enum", "const", "not")
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SLASH = re.compile(r"\\.|/", re.DOTALL)


class LarkBuilder:
    """Builds one grammar. `rule` and `matching` add a rule and return its name, the others return text for a rule."""

    def __init__(self, context: GrammarContext) -> None:
        self._specials, self._not_enforced = context.specials, context.not_enforced
        self._rules: list[str] = []
        self._literals: dict[str, str] = {}  # a family has a handful, and every tool uses them

    def leave_out(self, paths: Iterable[str]) -> None:
        """Note keywords of a tool's schema that the grammar does not say."""
        self._not_enforced.extend(paths)

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A fixed text of the family, with its special tokens as token ids."""
        if (known := self._literals.get(text)) is None:
            known = self._literals[text] = self._literal(text)
        return known

    def _literal(self, text: str) -> str:
        tokens = sorted((t for t in self._specials if t in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return " ".join(f"<[{self._specials[p]}]>" if p in self._specials else _quote(p) for p in parts if p)

    def until(self, closing: str) -> str:
        """Any text, up to and including `closing`."""
        if any(closing.startswith(token) for token in self._specials):
            return f"ANY {self.literal(closing)}"
        return self.rule("ANY", f"[suffix={_quote(closing)}]")

    def matching(self, pattern: str, closing: str) -> str:
        """A text that matches `pattern`, up to and including `closing`, which it must not contain."""
        pattern = re.sub(_SLASH, lambda found: found[0] if len(found[0]) > 1 else r"\/", pattern)
        if any(closing.startswith(token) for token in self._specials):
            return f"/{pattern}/ {self.literal(closing)}"
        # One terminal: two would match greedily, and the first could take the beginning of the second.
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: (/{pattern}/ & ~/(?s:.*){escape_regex(closing)}(?s:.*)/) {_quote(closing)}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': _SPACING}, ensure_ascii=False)}"

    def build(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, "ANY: /(?s:.*)/", r"GAP: /[ \n]{1,4}/", ""])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def after_reasoning(
    constraint: Constraint, schema: Mapping[str, Any], closing: str, context: GrammarContext
) -> Constraint:
    """A response schema that applies after `closing`, the marker that ends the reasoning which the prompt opened."""
    lark = LarkBuilder(context)
    body = lark.rule(lark.json(schema))
    text = lark.build(f"{lark.until(closing)} GAP? {body}")
    return replace(constraint, kind="lark", text=text, schema=json.dumps(schema, ensure_ascii=False))


class CallSyntax(Struct, frozen=True):
    """`begin opening body closing between opening body closing … end`. All but the body is fixed text of the family.

    Unless a grammar is made of it, `opening` may contain {name} and {number}: which call it is, from 1.
    """

    body: Any  # JsonBody, TaggedBody, PythonBody or another with their `write`; that of a grammar is called, too
    begin: str = ""
    end: str = ""
    opening: str = ""
    closing: str = ""
    between: str = "\n"

    def write(self, calls: NamedCalls, dumps: Dumps, _specials: Container[str] = ()) -> str:
        written: list[str] = []
        for number, (name, arguments) in enumerate(calls, 1):
            opening = self.opening.replace("{number}", str(number)).replace("{name}", name)
            written.append(opening + self.body.write(name, arguments, dumps, number) + self.closing)
        return self.begin + self.between.join(written) + self.end


class CallGrammar(CallSyntax, frozen=True, kw_only=True):
    """A syntax to which calls can be constrained.

    `trigger` is the prefix of the beginning after which only a call can follow. Without one, optional calls stay
    unconstrained. `reasoning` is what opens and closes reasoning before a call. `before_text` comes before a text that
    matches a schema.
    """

    trigger: str = ""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    before_text: str = ""
    may_repeat: bool = True

    def __call__(
        self, tools: Sequence[Tool], choice: ToolChoice, context: GrammarContext = GrammarContext()
    ) -> Constraint | None:
        callable_tools = [t for t in tools if t.kind != "server" and (choice.mode != "named" or t.name == choice.name)]
        is_forced = choice.mode in ("required", "named")
        schema = None if is_forced else context.schema
        from_start = is_forced or schema is not None
        if not callable_tools or choice.mode == "none" or not (from_start or self.trigger):
            return None
        lark = LarkBuilder(context)
        body = lark.rule(" | ".join(lark.rule(self.body(lark, tool)) for tool in callable_tools))
        beginning = self.begin + self.opening
        first = f"{lark.literal(beginning if from_start else beginning.removeprefix(self.trigger))} {body}"
        # Optional calls without a common end are triggered one by one.
        repeats = from_start or self.end
        rest = self._after_first(lark, body, context) if repeats else lark.literal(self.closing)
        output = f"{first} {rest}"
        if schema is not None:
            output = f"({output} | {lark.literal(self.before_text)} {lark.rule(lark.json(schema))})"
        if from_start:
            output = f"{self._reasoning(lark, context)} {output}"
        return Constraint(
            "lark",
            lark.build(output),
            trigger=None if from_start else self.trigger,
            tools=tuple(tool.name for tool in callable_tools),
            schema="" if schema is None else json.dumps(schema, ensure_ascii=False),
        )

    def _after_first(self, lark: LarkBuilder, body: str, context: GrammarContext) -> str:
        closing, more = lark.literal(self.closing), ""
        if self.may_repeat and context.parallel:
            more = f"({lark.literal(self.between + self.opening)} {body} {closing})*"
        return f"{closing} {more} {lark.literal(self.end)}"

    def _reasoning(self, lark: LarkBuilder, context: GrammarContext) -> str:
        opening, closing = self.reasoning
        if context.thinking:
            return f"{lark.until(closing)} GAP?"
        return f"({lark.literal(opening)} {lark.until(closing)} GAP?)?"


class JsonBody(Struct, frozen=True):
    """`before` name `between` arguments `after`. If `before` opens a JSON string, the name is escaped."""

    before: str
    between: str
    after: str = ""

    def write(self, name: str, arguments: Mapping[str, Any], dumps: Dumps, number: int) -> str:
        shown = dumps(name)[1:-1] if self.before.endswith('"') else name
        return f"{self.before}{shown}{self.between.replace('{at}', str(number - 1))}{dumps(arguments)}{self.after}"

    def __call__(self, lark: LarkBuilder, tool: Tool) -> str:
        name = tool.name if not self.before.endswith('"') else json.dumps(tool.name, ensure_ascii=False)[1:-1]
        if self.before.startswith("{"):  # the same lexemes as %json: a response schema may be the alternative
            head = " ".join(map(_quote, _JSON_LEXEMES.findall(f"{self.before}{name}{self.between}")))
        else:
            head = f"{lark.literal(self.before)} {_quote(name)} {lark.literal(self.between)}"
        return f"{head} {lark.json(arguments_schema(tool))} {lark.literal(self.after)}"


class TaggedBody(Struct, frozen=True):
    """Every parameter between tags, in the order of the schema: text unchanged, other values as JSON.

    Unless a grammar is made of it, `parameter` may contain the {type} of a value, or whether it {is_text}.
    """

    function: str  # the text around the name, with {} in its place
    parameter: str
    closing: str  # of a parameter
    end: str = ""

    def write(self, name: str, arguments: Mapping[str, Any], dumps: Dumps, _: int) -> str:
        written = (self._write(key, value, dumps) for key, value in arguments.items())
        return self.function.replace("{}", name) + "".join(written) + self.end

    def _write(self, key: str, value: Any, dumps: Dumps) -> str:
        is_text = isinstance(value, str)
        tag = self.parameter.replace("{type}", _JSON_TYPES.get(type(value), "object")).replace(
            "{is_text}", dumps(is_text)
        )
        return tag.replace("{}", key) + (value if is_text else dumps(value)) + self.closing.replace("{}", key)

    def __call__(self, lark: LarkBuilder, tool: Tool) -> str:
        function = self._tag(lark, self.function, tool.name)
        if (pattern := input_pattern(tool).pattern) is not None:
            tag = self.closing.rstrip("\n")
            value = f"{lark.matching(pattern, tag)} {lark.literal(self.closing.removeprefix(tag))}"
            return f"{function} {self._tag(lark, self.parameter, 'input')} {value} {lark.literal(self.end)}"
        schema = arguments_schema(tool)
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        words = [word for word in _OF_OBJECTS if word in schema]
        words += ["required"] if set(required) - set(properties) else []
        lark.leave_out(f"{tool.name}/{word}" for word in words)
        parameters = [
            lark.rule(f"{self._tag(lark, self.parameter, name)} {self._value(lark, tool, name, schema)}")
            + ("" if name in required else "?")
            for name, one in properties.items()
            if one is not False
        ]
        return " ".join([function, *parameters, lark.literal(self.end)])

    def _tag(self, lark: LarkBuilder, tag: str, name: str) -> str:
        before, _, after = tag.partition("{}")
        return f"{lark.literal(before)} {_quote(name)} {lark.literal(after)}"

    def _value(self, lark: LarkBuilder, tool: Tool, name: str, root: Mapping[str, Any]) -> str:
        schema, closing = root["properties"][name], lark.literal(self.closing)
        if texts := _allowed_texts(schema):
            return f"({' | '.join(map(_quote, texts))}) {closing}"
        types = schema_types(schema, root)
        if not types or "string" in types or _refers_elsewhere(schema):
            tag = self.closing.rstrip("\n")  # it ends the text by itself
            pattern = _pattern_of(schema)
            words = [] if pattern else [word for word in _OF_TEXTS if isinstance(schema, Mapping) and word in schema]
            lark.leave_out(f"{tool.name}/properties/{name}/{word}" for word in words)
            text = lark.matching(pattern, tag) if pattern else lark.until(tag)
            return f"{text} {lark.literal(self.closing.removeprefix(tag))}"
        return f"{lark.json({**{k: root[k] for k in _DEFINITIONS if k in root}, **schema})} {closing}"


class PythonBody(Struct, frozen=True):
    """A call with keyword arguments. Texts, lists and objects are written as JSON."""

    def write(self, name: str, arguments: Mapping[str, Any], dumps: Dumps, _: int) -> str:
        written = (dumps(v) if isinstance(v, str | list | dict) else repr(v) for v in arguments.values())
        return f"{name}({', '.join(f'{key}={value}' for key, value in zip(arguments, written, strict=True))})"


OBJECT = JsonBody('{"name": "', '", "arguments": ', "}")


def listed(opening: str = "", closing: str = "", body: JsonBody | PythonBody = OBJECT) -> CallSyntax:
    """Calls in a list."""
    return CallSyntax(body, f"{opening}[", f"]{closing}", between=", ")


def invoke(prefix: str = "", attribute: str = "") -> TaggedBody:
    """`<invoke name=…>` with one `<parameter name=…>` per value."""
    tag = f'<{prefix}parameter name="{{}}"{attribute}>'
    return TaggedBody(f'<{prefix}invoke name="{{}}">\n', tag, f"</{prefix}parameter>\n", f"</{prefix}invoke>")


def _allowed_texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it allows nothing else."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, Mapping) else []
    return listed if all(isinstance(text, str) and text for text in listed) else []


def _pattern_of(schema: Any) -> str:
    """The whole text of a schema of texts, as a regular expression; empty if one cannot say it."""
    words = set(schema) - {"type"} if isinstance(schema, Mapping) and schema.get("type") == "string" else set()
    if words and words <= {"minLength", "maxLength"}:
        return f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    if words != {"pattern"}:
        return ""
    pattern, depth = str(schema["pattern"]), 0
    for found in _PATTERN_PARTS.findall(pattern):
        depth += (found == "(") - (found == ")")
        if found == "|" and depth == 0 and ("^" in pattern or "$" in pattern):
            return ""  # an anchor belongs to one of the branches
    before = "" if pattern.startswith("^") else "(?s:.*)"
    is_anchored = _PATTERN_PARTS.findall(f"^{pattern}")[-1] == "$"
    body = pattern.removeprefix("^").removesuffix("$" if is_anchored else "")
    return f"{before}(?:{body}){'' if is_anchored else '(?s:.*)'}"


def _refers_elsewhere(schema: Any) -> bool:
    """Whether it refers to a part of the complete schema that one property does not include."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        here = isinstance(ref, str) and not ref.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))
        return here or any(map(_refers_elsewhere, schema.values()))
    return isinstance(schema, list) and any(map(_refers_elsewhere, schema))


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments. Unless it says otherwise, it allows no properties that it does not name."""
    schema: dict[str, Any] = {**tool.parameters, "type": "object"}
    if tool.kind == "custom":
        schema = dict(_CUSTOM_INPUT)
        if (pattern := input_pattern(tool).pattern) is not None:
            schema["properties"] = {"input": {"type": "string", "pattern": f"^(?:{pattern})$"}}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema
