"""A Lark grammar read into its rules, each as a list of tokens. Pure."""

from __future__ import annotations

import re

_COMMENT = r"(?P<comment>//[^\n]*)"
_STRING = r'(?P<string>"(?:\\.|[^"\\\n])*"i?)'
_REGEX = r"(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)"
_DIRECTIVE = r"(?P<directive>^%[^\n]*)"
_NAME = r"(?P<name>(?:^[?!]{1,2})?_*[A-Za-z]\w*(?:\.-?\d+)?)"
_TOKEN = re.compile(
    rf"\s+|{_COMMENT}|{_STRING}|{_REGEX}|{_DIRECTIVE}|{_NAME}|(?P<sign>->|\.\.|[:|()\[\]?*+~]|\d+)", re.MULTILINE
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

Tokens = list[tuple[str, str]]


class Irregular(Exception):
    """Why a grammar cannot be written as a regular expression."""


def read_rules(definition: str) -> tuple[dict[str, Tokens], dict[str, str]]:
    """Each rule's own tokens, and the expressions of what was imported."""
    rules: dict[str, Tokens] = {}
    imported: dict[str, str] = {}
    tokens = _tokens(definition)
    body: Tokens | None = None
    for place, (kind, text) in enumerate(tokens):
        if kind == "directive":
            imported |= _import(text)
        elif kind == "name" and tokens[place + 1 : place + 2] == [("sign", ":")]:
            body = rules.setdefault(bare(text), [])
        elif body is None:
            raise Irregular(f"{text!r} stands before any rule")
        elif (kind, text) != ("sign", ":"):
            body.append((kind, text))
    return rules, imported


def _tokens(definition: str) -> Tokens:
    found: Tokens = []
    place = 0
    while place < len(definition):
        match = _TOKEN.match(definition, place)
        if match is None:
            raise Irregular(f"{definition[place : place + 20]!r} is not understood")
        place = match.end()
        if match.lastgroup not in (None, "comment"):
            found.append((str(match.lastgroup), match.group()))
    return found


def _import(line: str) -> dict[str, str]:
    match = _IMPORT.match(line.partition("//")[0].rstrip())
    if match is None:
        raise Irregular(f"{line.strip()!r} is not supported")
    one, renamed, several = match.groups()
    names = {renamed or one: one} if one else {name.strip(): name.strip() for name in several.split(",")}
    if unknown := [name for name in names.values() if name not in _COMMON]:
        raise Irregular(f"common.{unknown[0]} is not known")
    return {name: _COMMON[common] for name, common in names.items()}


def bare(name: str) -> str:
    """Without what tells Lark how to build its tree."""
    return name.lstrip("?!").partition(".")[0]
