"""The grammar of a custom tool as one regular expression, which every family's call syntax can enforce.

The input of a custom tool is free text, which families wrap in JSON strings or tags. A regular expression can be
enforced there, a grammar cannot. So a Lark grammar without recursion is expanded to one. The grammar of `apply_patch`
is of that kind.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

from modelyard.core.request import Tool

_MAX_SIZE = 20_000  # characters of a grammar, and of its regular expression
_MAX_DEPTH = 50
_TOO_LONG = f"the expanded expression is longer than {_MAX_SIZE} characters"
_REGEX_CHARS = frozenset(".^$|()[]{}*+?\\/-#&~")
_CONTROLS = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}
_TOKEN = re.compile(
    r"""\s+
    | (?P<comment>//[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<directive>^%[^\n]*)
    | (?P<name>(?:^[?!]{1,2})?_*[A-Za-z]\w*(?:\.-?\d+)?)
    | (?P<sign>->|\.\.|[:|()\[\]?*+~]|\d+)""",
    re.MULTILINE | re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*$")
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+\\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}

LarkTokens = list[tuple[str, str]]


class NotRegular(Exception):
    """Why a grammar cannot be written as a regular expression."""


class InputPattern(Struct, frozen=True):
    """The regular expression for the input of a custom tool. `error` says why there is none."""

    pattern: str | None = None
    error: str | None = None


def input_pattern(tool: Tool) -> InputPattern:
    grammar = tool.grammar
    if tool.kind != "custom" or not grammar:
        return InputPattern()
    return _input_pattern(str(grammar.get("syntax", "lark")), str(grammar.get("definition", "")))


@lru_cache(64)
def _input_pattern(syntax: str, definition: str) -> InputPattern:
    try:
        if syntax == "lark":
            return InputPattern(lark_to_regex(definition))
        if syntax == "regex" and definition:
            if len(definition) > _MAX_SIZE:
                raise NotRegular(f"the expression is longer than {_MAX_SIZE} characters")
            return InputPattern(definition)
    except NotRegular as error:
        return InputPattern(error=str(error))
    return InputPattern(error=f"the syntax {syntax!r} is not supported, only lark and regex are")


def lark_to_regex(definition: str) -> str:
    """The language of the rule `start`, as an expression for a complete text."""
    if len(definition) > _MAX_SIZE:
        raise NotRegular(f"the grammar is longer than {_MAX_SIZE} characters")
    return _expand("start", *read_rules(definition))


# --- reading a Lark grammar -------------------------------------------------------------------------------------------


def read_rules(definition: str) -> tuple[dict[str, LarkTokens], dict[str, str]]:
    """The tokens of each rule, and the expressions of the imported terminals."""
    rules: dict[str, LarkTokens] = {}
    imported: dict[str, str] = {}
    tokens = _tokenize(definition)
    body: LarkTokens | None = None
    for index, (kind, text) in enumerate(tokens):
        if kind == "directive":
            imported |= _read_import(text)
        elif kind == "name" and tokens[index + 1 : index + 2] == [("sign", ":")]:
            body = rules.setdefault(_rule_name(text), [])
        elif body is None:
            raise NotRegular(f"{text!r} comes before the first rule")
        elif (kind, text) != ("sign", ":"):
            body.append((kind, text))
    return rules, imported


def _tokenize(definition: str) -> LarkTokens:
    tokens: LarkTokens = []
    pos = 0
    while pos < len(definition):
        match = _TOKEN.match(definition, pos)
        if match is None:
            raise NotRegular(f"{definition[pos : pos + 20]!r} is not understood")
        pos = match.end()
        if match.lastgroup not in (None, "comment"):
            tokens.append((str(match.lastgroup), match.group()))
    return tokens


def _read_import(line: str) -> dict[str, str]:
    match = _IMPORT.match(line.partition("//")[0].rstrip())
    if match is None:
        raise NotRegular(f"{line.strip()!r} is not supported")
    one, renamed, several = match.groups()
    names = {renamed or one: one} if one else {name.strip(): name.strip() for name in several.split(",")}
    if unknown := [name for name in names.values() if name not in _COMMON]:
        raise NotRegular(f"common.{unknown[0]} is not known")
    return {name: _COMMON[common] for name, common in names.items()}


def _rule_name(name: str) -> str:
    """Without the prefix and the priority, which only affect Lark's tree."""
    return name.lstrip("?!").partition(".")[0]


# --- writing a regular expression -------------------------------------------------------------------------------------


def _expand(name: str, rules: Mapping[str, LarkTokens], expanded: dict[str, str], parents: tuple[str, ...] = ()) -> str:
    """The expression of a rule, with those of the rules that it refers to. `expanded` holds the finished ones."""
    if name in expanded:
        return expanded[name]
    if name not in rules:
        raise NotRegular(f"the rule {name!r} is not defined")
    if name in parents:
        raise NotRegular(f"the rule {name!r} refers to itself")
    if len(parents) > _MAX_DEPTH:
        raise NotRegular("its rules refer to each other too deeply")
    expanded[name] = _RegexWriter(rules, expanded, (*parents, name)).write()
    return expanded[name]


class _RegexWriter:
    """Writes the tokens of one rule, the last of `parents`, as a regular expression."""

    def __init__(self, rules: Mapping[str, LarkTokens], expanded: dict[str, str], parents: tuple[str, ...]) -> None:
        self._rules, self._expanded, self._parents = rules, expanded, parents
        self._rule, self._tokens = parents[-1], rules[parents[-1]]
        self._index, self._depth = 0, 0

    def write(self) -> str:
        text = self._choices()
        if self._index < len(self._tokens):
            raise NotRegular(f"{self._peek()[1]!r} in the rule {self._rule!r} is not understood")
        return text

    def _choices(self) -> str:
        choices = [self._sequence()]
        size = len(choices[0])
        while self._accept("|"):
            choices.append(self._sequence())
            size += len(choices[-1])
            if size > _MAX_SIZE:
                raise NotRegular(_TOO_LONG)
        return f"(?:{'|'.join(choices)})" if len(choices) > 1 else choices[0]

    def _sequence(self) -> str:
        parts: list[str] = []
        size = 0
        while (token := self._peek())[0] != "end" and token[1] not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom()))
            size += len(parts[-1])
            if size > _MAX_SIZE:
                raise NotRegular(_TOO_LONG)
        if self._accept("->"):
            self._index += 1  # an alias for Lark's tree
        return "".join(parts)

    def _atom(self) -> str:
        kind, text = self._peek()
        self._index += 1
        if text in ("(", "["):
            return self._group(text)
        if kind == "string":
            return self._range(text) if self._accept("..") else _string_regex(text)
        if kind == "regex":
            return _inline_regex(text)
        if kind == "name":
            return _expand(_rule_name(text), self._rules, self._expanded, self._parents)
        raise NotRegular(f"{text!r} in the rule {self._rule!r} is not understood")

    def _group(self, opening: str) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotRegular("it is nested too deeply")
        inner = self._choices()
        if not self._accept(")" if opening == "(" else "]"):
            raise NotRegular(f"a {opening!r} in the rule {self._rule!r} is not closed")
        self._depth -= 1
        return inner if opening == "(" else f"(?:{inner})?"

    def _range(self, first: str) -> str:
        low, high = _string_value(first), _string_value(self._peek()[1] if self._peek()[0] == "string" else '""')
        self._index += 1
        if len(low) != 1 or len(high) != 1:
            raise NotRegular(f"a range in the rule {self._rule!r} is not between two characters")
        return f"[{escape_regex(low)}-{escape_regex(high)}]"

    def _repeated(self, atom: str) -> str:
        for sign in ("?", "*", "+"):
            if self._accept(sign):
                return f"(?:{atom}){sign}"
        if not self._accept("~"):
            return atom
        least = self._number()
        most = self._number() if self._accept("..") else least
        return f"(?:{atom}){{{least},{most}}}"

    def _number(self) -> int:
        text = self._peek()[1]
        self._index += 1
        if not text.isdecimal():
            raise NotRegular(f"{text!r} in the rule {self._rule!r} is not a number")
        return int(text)

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._index] if self._index < len(self._tokens) else ("end", "")

    def _accept(self, sign: str) -> bool:
        found = self._peek() == ("sign", sign)
        self._index += found
        return found


def _string_regex(text: str) -> str:
    escaped = escape_regex(_string_value(text))
    return f"(?i:{escaped})" if text.endswith("i") else escaped


def _string_value(text: str) -> str:
    try:
        return str(ast.literal_eval(text.removesuffix("i")))
    except (SyntaxError, ValueError):
        raise NotRegular(f"{text} is not a string") from None


def escape_regex(text: str) -> str:
    return "".join(_CONTROLS.get(char) or (f"\\{char}" if char in _REGEX_CHARS else char) for char in text)


def _inline_regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    if set(flags) - {"i", "s", "u"}:
        raise NotRegular(f"{text} has flags that are not supported")
    return f"(?{flags.replace('u', '')}:{body})"
