"""docs/formats.md lists every format, with markers that the format really has."""

from __future__ import annotations

import re
from pathlib import Path

from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import all_markers

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.partition("## Rules")[0], re.MULTILINE))


def test_every_format_has_a_row_and_every_row_a_format() -> None:
    assert sorted(ROWS) == list(names())


def test_a_row_says_what_a_call_inside_reasoning_is() -> None:
    for name in names():
        form = load(name)
        if not form.reads_calls or all(region.kind == "text" for region in form.regions.values()):
            says = ""
        elif form.has_messages:
            says = "own message"
        else:
            says = "calls" if form.calls_in_reasoning else "drafts"
        assert ROWS[name].replace("\\|", "").split("|")[-1].strip() == says, name


def test_a_row_shows_how_reasoning_and_calls_begin() -> None:
    for name in names():
        form = load(name)
        shown = re.findall(r"`([^`]+)`", ROWS[name].replace("\\|", "|"))
        known = (*all_markers(form), *form.bare_markers)
        assert shown or not known, name
        for text in shown:
            is_marker = any(text.startswith(k) or k in text or k.startswith(text) for k in known)
            assert is_marker or text in names(), (name, text)
