"""Answers that are nothing but visible text, told by one search: the scanner would hand all of it on as it stands.

For answers that are there as a whole. Whether one is plain is decided here and nowhere else; what is not goes through
the scanner.
"""

from __future__ import annotations

from functools import lru_cache

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.lexer import alphabet


class Plain:
    """Of one format in one vocabulary, with these stop strings, where the prompt has left nothing open."""

    __slots__ = ("_begins_in_text", "_starters")

    def __init__(self, form: OutputFormat, specials: frozenset[str], stop: tuple[str, ...]) -> None:
        self._begins_in_text = form.regions[form.start].kind == "text"
        self._starters = tuple(alphabet(form, specials).starters(stop))  # a handful: quicker than a pattern

    def takes(self, text: str) -> bool:
        """Whether this, in which no control token was said, is all plain; if not, the scanner has to look. White space
        alone may be a marker's own."""
        for starter in self._starters:
            if starter in text:
                return False
        return self._begins_in_text and bool(text) and not text.isspace()


@lru_cache(maxsize=256)
def plain(form: OutputFormat, specials: frozenset[str], stop: tuple[str, ...]) -> Plain:
    return Plain(form, specials, stop)
