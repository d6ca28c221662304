"""Code blocks of a page, and its curl commands as requests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent.parent / "docs"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return blocks_of((DOCS / page).read_text(), language)


def blocks_of(text: str, *languages: str) -> list[str]:
    return [block for name, block in _BLOCK.findall(text) if name in languages]


def sections(page: str) -> dict[str, str]:
    """The texts of a page by their headings; what comes before the first one is left out."""
    _, *parts = _HEADING.split((DOCS / page).read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


class Call(NamedTuple):
    """The request of one curl command; `path` includes the query. `form` has the fields of a form."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    form: tuple[str, ...] = ()


def calls(page: str, beginning: str = "") -> list[Call]:
    commands = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [_call(shlex.split(command)) for command in commands if command.startswith(beginning)]


def _call(words: list[str]) -> Call:
    """Only the options used in the pages; any other option is an error in the page."""
    assert words[0] == "curl", words
    method, url, headers, body, form = "", "", {}, "", []
    rest = iter(words[1:])
    for word in rest:
        if word == "-d":
            body = next(rest)
        elif word == "-X":
            method = next(rest)
        elif word == "-H":
            name, value = next(rest).split(": ")
            headers[name] = value
        elif word == "-F":
            method = "POST"
            form.append(next(rest))
        elif word == "-I":
            method = "HEAD"
        elif word != "-N":
            assert word.startswith("http://localhost:8000/"), word
            url = word
    path = url.removeprefix("http://localhost:8000")
    return Call(method or ("POST" if body else "GET"), path, headers, body, tuple(form))
