"""Texts that match a regular expression."""

import re

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines.fake.sample import sample

PATTERNS = [
    "",
    "abc",
    "a|b",
    "[a-f0-9]{8}",
    r"\d{4}-\d\d-\d\d",
    r"(\w+)=\1",
    r"^(?:yes|no)$",
    ".{3}",
    "[^a-zA-Z0-9]x",
    r"\s\S\D\W",
    "(a(b(c)?)+)*d",
    "x+?y{2,}",
    "[^x]",
    "(?i:abc)",
    "(?>ab)c",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sample_matches_its_pattern(pattern: str) -> None:
    assert re.fullmatch(pattern, sample(pattern))


def test_bad_pattern_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a regular expression"):
        sample("(")


def test_huge_repeat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        sample("(a{60000}){60000}")
