"""Grammars of constrained calls, in llguidance's dialect of Lark: what a family's call looks like, as data.

A `Shape` is the text around a call's body; `JsonBody` and `TaggedBody` are the two ways in which families write names
and arguments. Texts that are tokens in the vocabulary are named by their id: a grammar's strings never match those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.output_format import GrammarContext
from modelyard.core.request import Constraint, Tool, ToolChoice
from modelyard.scanner.regular import escaped, form
from modelyard.scanner.typed import types

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SHARED = ("$defs", "definitions")
_SLASH = re.compile(r"\\.|/", re.DOTALL)


class Lark:
    """One grammar in the making: `rule` names a body, everything else gives text to put into one."""

    def __init__(self, place: GrammarContext) -> None:
        self._specials = place.specials
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def spelled(self, text: str) -> str:
        """The family's own text: what is a token in it, as that token."""
        tokens = sorted((t for t in self._specials if t in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return " ".join(f"<[{self._specials[p]}]>" if p in self._specials else quoted(p) for p in parts if p)

    def until(self, close: str) -> str:
        """Any text, up to and with this."""
        if any(close.startswith(token) for token in self._specials):
            return f"ANY {self.spelled(close)}"
        return self.rule("ANY", f"[suffix={quoted(close)}]")

    def matching(self, pattern: str, close: str) -> str:
        """A text of this form, up to and with what closes it, which does not stand inside."""
        form = re.sub(_SLASH, lambda found: found[0] if len(found[0]) > 1 else r"\/", pattern)
        if any(close.startswith(token) for token in self._specials):
            return f"/{form}/ {self.spelled(close)}"
        # One terminal: two would be read as far as each can, and the first may take what begins the second.
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: (/{form}/ & ~/(?s:.*){escaped(close)}(?s:.*)/) {quoted(close)}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': _SPACING}, ensure_ascii=False)}"

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, "ANY: /(?s:.*)/", r"GAP: /[ \n]{1,4}/", ""])


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def after_reasoning(asked: Constraint, schema: Mapping[str, Any], closing: str, place: GrammarContext) -> Constraint:
    """An answer's own schema where the prompt left reasoning open: it holds from where that is closed."""
    lark = Lark(place)
    body = lark.rule(lark.json(schema))
    return replace(asked, kind="lark", text=lark.text(f"{lark.until(closing)} GAP? {body}"))


Body = Callable[[Lark, Tool], str]


class Shape(Struct, frozen=True, kw_only=True):
    """`begin opening body closing between opening body closing … end`, where all but the body is the family's text.

    `trigger` is the part of the beginning after which nothing but a call can follow (empty: there is none, so calls
    that the client leaves open stay free). `thought` is what opens and closes reasoning before a call.
    """

    body: Body
    begin: str = ""
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    end: str = ""
    trigger: str = ""
    thought: tuple[str, str] | None = ("<think>", "</think>")
    several: bool = True

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, place: GrammarContext = GrammarContext()
    ) -> Constraint | None:
        wanted = [t for t in tools if t.kind != "server" and (choice.mode != "named" or t.name == choice.name)]
        is_forced = choice.mode in ("required", "named")
        if not wanted or choice.mode == "none" or not (is_forced or self.trigger):
            return None
        lark = Lark(place)
        body = lark.rule(" | ".join(lark.rule(self.body(lark, tool)) for tool in wanted))
        start = self._whole(lark, body, place) if is_forced else self._rest(lark, body, place)
        trigger = None if is_forced else self.trigger
        return Constraint("lark", lark.text(start), trigger=trigger, tools=tuple(t.name for t in wanted))

    def _whole(self, lark: Lark, body: str, place: GrammarContext) -> str:
        first = f"{self._reasoning(lark, place)} {lark.spelled(self.begin + self.opening)} {body}"
        return f"{first} {self._after_first(lark, body, place)}"

    def _rest(self, lark: Lark, body: str, place: GrammarContext) -> str:
        """What follows the trigger. Calls that stand alone are triggered one by one."""
        first = f"{lark.spelled((self.begin + self.opening).removeprefix(self.trigger))} {body}"
        return f"{first} {self._after_first(lark, body, place) if self.end else lark.spelled(self.closing)}"

    def _after_first(self, lark: Lark, body: str, place: GrammarContext) -> str:
        close = lark.spelled(self.closing)
        more = f"({lark.spelled(self.between + self.opening)} {body} {close})*" if self._may_repeat(place) else ""
        return f"{close} {more} {lark.spelled(self.end)}"

    def _may_repeat(self, place: GrammarContext) -> bool:
        return self.several and place.parallel

    def _reasoning(self, lark: Lark, place: GrammarContext) -> str:
        if self.thought is None:
            return ""
        opening, closing = self.thought
        if place.thinking:
            return f"{lark.until(closing)} GAP?"
        return f"({lark.spelled(opening)} {lark.until(closing)} GAP?)?"


class JsonBody(Struct, frozen=True):
    """`before` name `between` arguments `after`; the name is written into the text as it is."""

    before: str
    between: str
    after: str = ""

    def __call__(self, lark: Lark, tool: Tool) -> str:
        name = tool.name if not self.before.endswith('"') else json.dumps(tool.name, ensure_ascii=False)[1:-1]
        parts = (lark.spelled(self.before), quoted(name), lark.spelled(self.between), lark.json(arguments(tool)))
        return " ".join((*parts, lark.spelled(self.after)))


class TaggedBody(Struct, frozen=True):
    """Every parameter between tags, in the schema's order: texts as they are, other values as JSON."""

    function: str  # what stands around the name, with {} in its place
    parameter: str
    closing: str  # of a parameter

    def __call__(self, lark: Lark, tool: Tool) -> str:
        if (pattern := form(tool).pattern) is not None:
            return self._formed(lark, tool, pattern)
        schema = arguments(tool)
        required = schema.get("required") or ()
        given = [
            self._parameter(lark, name, one, schema) + ("" if name in required else "?")
            for name, one in (schema.get("properties") or {}).items()
        ]
        return " ".join([self._named(lark, self.function, tool.name), *given])

    def _formed(self, lark: Lark, tool: Tool, pattern: str) -> str:
        function, parameter = self._named(lark, self.function, tool.name), self._named(lark, self.parameter, "input")
        tag = self.closing.rstrip("\n")
        return f"{function} {parameter} {lark.matching(pattern, tag)} {lark.spelled(self.closing.removeprefix(tag))}"

    def _parameter(self, lark: Lark, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        return lark.rule(f"{self._named(lark, self.parameter, name)} {self._value(lark, schema, root)}")

    def _named(self, lark: Lark, tag: str, name: str) -> str:
        before, _, after = tag.partition("{}")
        return f"{lark.spelled(before)} {quoted(name)} {lark.spelled(after)}"

    def _value(self, lark: Lark, schema: Any, root: Mapping[str, Any]) -> str:
        close = lark.spelled(self.closing)
        if texts := _texts(schema):
            return f"({' | '.join(map(quoted, texts))}) {close}"
        allowed = types(schema, root)
        if not allowed or "string" in allowed or _refers_elsewhere(schema):
            tag = self.closing.rstrip("\n")  # it ends the text by itself
            return f"{lark.until(tag)} {lark.spelled(self.closing.removeprefix(tag))}"
        return f"{lark.json({**{k: root[k] for k in _SHARED if k in root}, **schema})} {close}"


def _texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it allows nothing else."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, Mapping) else []
    return listed if all(isinstance(one, str) and one for one in listed) else []


def _refers_elsewhere(schema: Any) -> bool:
    """To a part of the whole schema that does not come along with one property."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        here = isinstance(ref, str) and not ref.startswith(tuple(f"#/{place}/" for place in _SHARED))
        return here or any(map(_refers_elsewhere, schema.values()))
    return isinstance(schema, list) and any(map(_refers_elsewhere, schema))


def arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments. What it does not name is not asked for, unless it says so."""
    schema = {**(_free_text(tool) if tool.kind == "custom" else tool.parameters), "type": "object"}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _free_text(tool: Tool) -> dict[str, Any]:
    pattern = form(tool).pattern
    return _FREE_TEXT if pattern is None else _FREE_TEXT | {"properties": {"input": _text_of(pattern)}}


def _text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}
