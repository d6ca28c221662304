"""The grammar of a custom tool as one regular expression, so that it holds in any family's way to write a call. Pure.

A custom tool's input is free text, which families wrap into JSON strings or tags. A regular expression can be held to
there, a grammar cannot: so a Lark grammar without recursion is written out as one. `apply_patch` is of that kind.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

from modelyard.core.request import Tool
from modelyard.scanner.lark import Irregular, Tokens, bare, read_rules

_LONGEST = 20_000  # characters, of a grammar and of the expression that comes of it
_DEEPEST = 50
_SPECIAL = frozenset(".^$|()[]{}*+?\\/-#&~")
_SPELLED = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}


class Form(Struct, frozen=True):
    """What a custom tool's input is held to; `fault` says why it is held to nothing."""

    pattern: str | None = None
    fault: str | None = None


def form(tool: Tool) -> Form:
    told = tool.grammar
    if tool.kind != "custom" or not told:
        return Form()
    return _form(str(told.get("syntax", "lark")), str(told.get("definition", "")))


@lru_cache(64)
def _form(syntax: str, definition: str) -> Form:
    try:
        if syntax == "lark":
            return Form(regular(definition))
        if syntax == "regex" and definition:
            return Form(definition)
    except Irregular as fault:
        return Form(fault=str(fault))
    return Form(fault=f"its syntax is {syntax!r}, and only lark and regex are known")


def regular(definition: str) -> str:
    """The language of the rule `start`, as an expression for a whole text."""
    if len(definition) > _LONGEST:
        raise Irregular(f"the grammar is longer than {_LONGEST} characters")
    return Expansion(*read_rules(definition)).named("start", ())


class Expansion:
    """Rules written out where they are named."""

    def __init__(self, rules: Mapping[str, Tokens], imported: Mapping[str, str]) -> None:
        self._rules, self._written = rules, dict(imported)

    def named(self, name: str, within: tuple[str, ...]) -> str:
        if name in self._written:
            return self._written[name]
        if name not in self._rules:
            raise Irregular(f"the rule {name!r} is not defined")
        if name in within:
            raise Irregular(f"the rule {name!r} refers to itself")
        if len(within) > _DEEPEST:
            raise Irregular("its rules refer to each other too deeply")
        self._written[name] = text = Writer(self, self._rules[name], (*within, name)).whole()
        return text


class Writer:
    """One rule's tokens as an expression."""

    def __init__(self, home: Expansion, tokens: Tokens, within: tuple[str, ...]) -> None:
        self._home, self._tokens, self._within = home, tokens, within
        self._place, self._depth = 0, 0

    def whole(self) -> str:
        text = self._choices()
        if self._place < len(self._tokens):
            raise Irregular(f"{self._next()[1]!r} in the rule {self._within[-1]!r} is not understood")
        return text

    def _choices(self) -> str:
        choices = [self._sequence()]
        while self._accepts("|"):
            choices.append(self._sequence())
        return f"(?:{'|'.join(choices)})" if len(choices) > 1 else choices[0]

    def _sequence(self) -> str:
        parts: list[str] = []
        while (token := self._next())[0] != "end" and token[1] not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom()))
            if sum(map(len, parts)) > _LONGEST:
                raise Irregular(f"written out it is longer than {_LONGEST} characters")
        if self._accepts("->"):
            self._place += 1  # what Lark calls it in its tree
        return "".join(parts)

    def _atom(self) -> str:
        kind, text = self._next()
        self._place += 1
        if text in ("(", "["):
            return self._group(text)
        if kind == "string":
            return self._range(text) if self._accepts("..") else _literal(text)
        if kind == "regex":
            return _expression(text)
        if kind == "name":
            return self._home.named(bare(text), self._within)
        raise Irregular(f"{text!r} in the rule {self._within[-1]!r} is not understood")

    def _group(self, opened: str) -> str:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Irregular("it is nested too deeply")
        inner = self._choices()
        if not self._accepts(")" if opened == "(" else "]"):
            raise Irregular(f"a {opened!r} in the rule {self._within[-1]!r} is not closed")
        self._depth -= 1
        return inner if opened == "(" else f"(?:{inner})?"

    def _range(self, first: str) -> str:
        low, high = _said(first), _said(self._next()[1] if self._next()[0] == "string" else '""')
        self._place += 1
        if len(low) != 1 or len(high) != 1:
            raise Irregular(f"a range in the rule {self._within[-1]!r} is not between two characters")
        return f"[{escaped(low)}-{escaped(high)}]"

    def _repeated(self, atom: str) -> str:
        for sign in ("?", "*", "+"):
            if self._accepts(sign):
                return f"(?:{atom}){sign}"
        if not self._accepts("~"):
            return atom
        least = self._number()
        most = self._number() if self._accepts("..") else least
        return f"(?:{atom}){{{least},{most}}}"

    def _number(self) -> int:
        text = self._next()[1]
        self._place += 1
        if not text.isdecimal():
            raise Irregular(f"{text!r} in the rule {self._within[-1]!r} is no number")
        return int(text)

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")

    def _accepts(self, sign: str) -> bool:
        found = self._next() == ("sign", sign)
        self._place += found
        return found


def _literal(text: str) -> str:
    said = escaped(_said(text))
    return f"(?i:{said})" if text.endswith("i") else said


def _said(text: str) -> str:
    try:
        return str(ast.literal_eval(text.removesuffix("i")))
    except (SyntaxError, ValueError):
        raise Irregular(f"{text} is no string") from None


def escaped(text: str) -> str:
    return "".join(_SPELLED.get(char) or (f"\\{char}" if char in _SPECIAL else char) for char in text)


def _expression(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    if set(flags) - {"i", "s", "u"}:
        raise Irregular(f"{text} has flags that are not supported")
    return f"(?{flags.replace('u', '')}:{body})"
