from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.router.routes import compile_globs, glob_covers

GLOBS = st.text(alphabet="ab*?[]!", max_size=6)
TEXTS = st.text(alphabet="ab[]!", max_size=6)


def test_several_globs_match_as_one() -> None:
    globs = compile_globs(["*haiku*", "gpt-?"])
    assert [bool(globs.match(name)) for name in ("claude-haiku-4", "gpt-5", "gpt-55", "", "x\nhaiku")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_covering_is_seen_through_wildcards() -> None:
    assert glob_covers("*", "anything*")
    assert glob_covers("*haiku*", "claude-*-haiku*")
    assert glob_covers("claude-*", "claude-?")
    assert not glob_covers("claude-*", "*claude-x")
    assert not glob_covers("?", "*")
    assert not glob_covers("*haiku*", "[haiku]x")


@given(GLOBS, GLOBS, TEXTS)
@settings(deadline=None, max_examples=400)
def test_a_covered_glob_never_matches_alone(wide: str, narrow: str, text: str) -> None:
    if glob_covers(wide, narrow) and compile_globs([narrow]).match(text):
        assert compile_globs([wide]).match(text)
