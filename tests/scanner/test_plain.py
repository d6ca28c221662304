"""What is plain is what the scanner hands on as it stands: the same events, in every format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Piece
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load, names
from modelyard.scanner.plain import plain
from tests.scanner.reading import TOOLS, tokens

_WORDS = [
    "Hello",
    " world",
    ".",
    " ",
    "\n",
    "\n\n",
    "<",
    "{",
    "[",
    "x<|",
    "</",
    "é😀",
    '"name"',
    "STOP",
    "ST",
    "OP",
    "\t",
]


@pytest.mark.parametrize("name", names())
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_plain_text_is_what_the_scanner_would_say(name: str, data: st.DataObject) -> None:
    form = load(name)
    words = st.sampled_from([*_WORDS, *form.markers, *form.naked])
    said = data.draw(st.lists(words.map(Piece), max_size=6))
    stop = data.draw(st.sampled_from([(), ("STOP",), ("", "zz")]))
    specials = frozenset(data.draw(st.sampled_from([(), tokens(form)])))
    text = "".join(piece.text for piece in said)
    if not plain(form, specials, stop).takes(text):
        return
    scanner = Scanner(form, tools=TOOLS, stop=stop, new_id=str, specials=specials)
    events: list[Event] = [*scanner.feed(said), *scanner.finish(cut=data.draw(st.booleans()))]
    assert events == [BlockStart(0, "text"), BlockDelta(0, text), BlockEnd(0)]
    assert (scanner.stopped, scanner.called, scanner.reasoning_tokens, scanner.warnings) == (None, False, 0, [])


def test_ordinary_words_are_plain() -> None:
    assert plain(load("hermes"), frozenset(), ()).takes("Hello world.")
    assert plain(load("hermes"), frozenset(), ("STOP",)).takes("Hello world.")


@pytest.mark.parametrize("said", ["", "  ", "a\nb", "a <tool_call>", "Stop here"])
def test_what_has_to_be_looked_at_is_not(said: str) -> None:
    assert not plain(load("hermes"), frozenset(), ("Stop",)).takes(said)


def test_a_model_that_thinks_first_says_nothing_plain() -> None:
    thinking = [form for name in names() if (form := load(name)).regions[form.start].kind == "thinking"]
    assert thinking
    assert not any(plain(form, frozenset(), ()).takes("Hello") for form in thinking)
