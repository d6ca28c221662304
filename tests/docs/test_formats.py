"""docs/formats.md names every format, and only markers that the format really has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import all_markers

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))


def test_every_format_has_a_row_and_every_row_a_format() -> None:
    assert sorted(ROWS) == list(names())


@pytest.mark.parametrize("name", names())
def test_a_row_shows_how_reasoning_and_calls_begin(name: str) -> None:
    form, row = load(name), ROWS[name].replace("\\|", "|")
    shown = re.findall(r"`([^`]+)`", row)
    known = (*all_markers(form), *form.bare_markers)
    assert shown or not known
    for text in shown:
        assert text in names() or any(text.startswith(k) or k in text or k.startswith(text) for k in known), text
