"""Where things are in the text of a configuration file: the lines of its settings and of its syntax errors. Parsers
report neither all errors nor the lines of values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from modelyard.config.problems import ConfigPath, Table

# --- TOML -------------------------------------------------------------------------------------------------------------


class TomlStatement(Struct, frozen=True):
    """A header or a key with its value, which may span the lines from `line` to `end`, counted from 1. `path` is the
    section, or the section and the key; `table` is what the statement says by itself."""

    line: int
    end: int
    path: ConfigPath
    is_header: bool
    table: Table


def toml_statements(text: str) -> Iterator[TomlStatement]:
    """The statements of a valid text. An entry of a list of sections, `[[routes]]`, has its number in the path."""
    entries: dict[ConfigPath, int] = {}  # how many [[…]] a path has had
    section: ConfigPath = ()
    for line, statement, table in _statements(text):
        end = line + statement.rstrip("\n").count("\n")
        if not statement.lstrip().startswith("["):
            yield TomlStatement(line, end, (*section, next(iter(table))), False, table)
            continue
        section = ()
        keys = [*_header_keys(table)]
        for depth, key in enumerate(keys, 1):
            section = (*section, key)
            if depth == len(keys) and statement.lstrip().startswith("[["):
                entries[section] = entries.get(section, 0) + 1
            if section in entries:
                section = (*section, entries[section] - 1)
        yield TomlStatement(line, end, section, True, table)


def toml_lines(text: str) -> dict[ConfigPath, int]:
    """The line of each section and key of a valid text; lines are counted from 1."""
    found: dict[ConfigPath, int] = {}
    for statement in toml_statements(text):
        path = statement.path
        if statement.is_header:
            for length in range(1, len(path) + 1):
                found.setdefault(path[:length], statement.line)
        else:
            for inner in _paths(statement.table):
                found.setdefault((*path[:-1], *inner), statement.line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str, Table]]:
    """Each header or key with its value, which may span lines: its first line, its text and what it says."""
    start, statement = 1, ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        statement += line
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # it goes on in the next line
        if table:
            yield start, statement, table
        start, statement = number + 1, ""


def _header_keys(table: Any) -> Iterator[str]:
    while isinstance(table, list | dict) and table:
        if isinstance(table, list):
            table = table[0]
        else:
            ((key, table),) = table.items()
            yield key


def _paths(value: Any) -> Iterator[ConfigPath]:
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (key,)
        yield from ((key, *path) for path in _paths(inner))


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]|[^\s{}\[\],:"]+')


def json_lines(text: str) -> dict[ConfigPath, int]:
    """The line of each key and element of a valid text."""
    found: dict[ConfigPath, int] = {}
    path: list[str | int] = []  # of the value that comes next
    line, is_key = 1, False
    for word in _JSON_WORD.findall(text):
        if word == "\n":
            line += 1
        elif word in "}]":
            path.pop()
            is_key = False
        elif word == ",":
            last = path[-1]
            is_key = isinstance(last, str)
            path[-1] = last + 1 if isinstance(last, int) else last
        elif is_key:
            path[-1] = json.loads(word)
            found.setdefault(tuple(path), line)
            is_key = False
        elif word != ":":  # a value
            if path and isinstance(path[-1], int):
                found.setdefault(tuple(path), line)
            if word in "{[":
                path.append("" if word == "{" else 0)
                is_key = word == "{"
    return found


# --- syntax errors of TOML --------------------------------------------------------------------------------------------

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_MAX_ERRORS = 20
# the beginning of the parser's message → what its author did; others are quoted
_MEANINGS = (
    ("Illegal character '\\n'", "a text is not closed: its last quote is missing"),
    ("Unterminated string", "a text is not closed: its last quotes are missing"),
    ("Cannot overwrite a value", "the key is given twice in one section"),
    ("Cannot declare", "the section is given twice, or its name is that of a key"),
    ("Expected '=' after a key", "a setting is written as key = value"),
    ("Invalid initial character for a key", "a key has letters, digits, - and _; others need quotes"),
    ("Invalid value", "there is no valid value: texts need quotes; true and false are written in lower case"),
    ("Unescaped '\\'", "a backslash in a text is written twice; between single quotes once is enough"),
    ("Invalid hex value", "a backslash in a text is written twice; between single quotes once is enough"),
    ("Unclosed array", "a list is not closed, or a comma is missing in it"),
    ("Unclosed inline table", "a table in braces is not closed, or a comma is missing in it"),
    ("Expected newline or end of document", "a value is followed by more than a comment: texts need quotes"),
)
_GOES_ON = ("Unclosed", "Unterminated")  # the line where it begins is unknown: what follows may be part of it


def syntax_errors(text: str) -> list[tuple[int, str]]:
    """All lines that are not valid TOML, with a reason; empty if the text is valid. The parser stops at its first
    error, so each faulty line is taken out and the rest is parsed again."""
    lines = text.splitlines()
    found: list[tuple[int, str]] = []
    while len(found) < _MAX_ERRORS:
        try:
            tomllib.loads("\n".join(lines))
            break
        except tomllib.TOMLDecodeError as error:
            message = str(error)
        position = _POSITION.search(message)
        line = int(position[1]) if position and position[1] else len(lines)
        reason = message[: position.start()] if position else message
        meaning = next((meaning for start, meaning in _MEANINGS if reason.startswith(start)), None)
        if found and line <= found[-1][0]:
            break
        found.append((line, meaning or reason[:1].lower() + reason[1:]))
        if reason.startswith(_GOES_ON):
            break
        lines[line - 1] = ""
    return found
