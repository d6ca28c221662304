r"""A word cache for ASCII text: the pre-tokenizer's pattern in Python's `re`, and the token ids of every word.

A byte-level tokenizer splits text by a pattern and encodes each word alone, so a cached word needs no tokenizer. Prose
takes a fraction of the library's time (19,000 characters: 0.6 ms instead of 37). With the common patterns a word begins
at every space between two other characters. Text is then cut there, which takes a tenth of the pattern's time, and what
is between two cuts, a **run**, is cached as a whole. Exact within limits that are checked:

- ASCII only: there `\p{L}`, `\p{N}` and `\s` are plain classes, and Unicode normalisation changes nothing;
- known patterns only: one `Split`, or the byte-level one (with or without separate digits), and nothing after it;
- no added token in the text: those are found before any pattern applies.

The library handles everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from modelyard.tokenizer.patterns import is_linear
from modelyard.tokenizer.shield import TokenSpellings

if TYPE_CHECKING:
    from modelyard.tokenizer.huggingface import TokenizerFile

MAX_TEXT = 32_000  # one uninterruptible call of about a millisecond
_MAX_WORDS = 200_000
_MAX_WORD = 64
_MIN_NEW = 64

_SPACE = r"\t\n\x0b\x0c\r\x20"
# The byte-level pattern with its words first, in a form that Python's engine matches without backtracking: half the
# time of the usual `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| …`, and the same matches.
_WORD = r"[ \p{L}]\p{L}*(?<=\p{L})|'(?:s|t|re|ve|m|ll|d)"
_BYTE_LEVEL = _WORD + r"| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are split off before the pattern applies: to it, a digit is the end of the text.
_SEPARATE_DIGITS = _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Nd": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
# What the common patterns consist of: none of it matches a space behind a character that is not white space.
_BREAKING = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_CUT = "\x80"  # not ASCII, so no text contains it
_DIGIT = re.compile("[0-9]")
_PARTS = re.compile(r"\\p\{(\w+)\}|\\([sSrntdu\\'.+*?()\[\]{}|/-])|\\(.)|(\[\^?)|(\])|.", re.DOTALL)


class RunCache(dict[str, list[int]]):
    """The token ids of runs, by the text behind their `space`. A missing run consists of known words, or is a
    KeyError."""

    def __init__(self, space: str, find: Callable[[str], list[str]], words: dict[str, list[int]]) -> None:
        super().__init__()
        self._space, self._find, self._words = space, find, words

    def __missing__(self, text: str) -> list[int]:
        run = self._space + text
        # White space at the ends of a run could belong to a word with the space beside it.
        words = self._find(run) if text and text == text.strip() else []
        if "".join(words) != run:
            raise KeyError(run)
        ids = [*chain.from_iterable(map(self._words.__getitem__, words))]
        if len(run) <= _MAX_WORD and not _DIGIT.search(run):  # every number is another run, of the same digits
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[text] = ids
        return ids


class WordCache:
    """`encode_words` calls the library. Thread-safe: a race only encodes the same word twice."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        added: TokenSpellings,
        encode_words: Callable[[list[str]], list[list[int]]],
        *,
        breaks_at_spaces: bool = False,
    ) -> None:
        self._find, self._added, self._encode_words = pattern.findall, added, encode_words
        self._breaks_at_spaces = breaks_at_spaces
        self._words: dict[str, list[int]] = {}
        self._first_runs, self._runs = (RunCache(space, self._find, self._words) for space in ("", " "))

    def encode(self, text: str) -> list[int] | None:
        """None: the text is outside the limits."""
        if len(text) > MAX_TEXT or not text.isascii() or self._added.found_in(text):
            return None
        if self._breaks_at_spaces and "  " not in text:
            first, *others = text.split(" ")
            try:
                return [*self._first_runs[first], *chain.from_iterable(map(self._runs.__getitem__, others))]
            except KeyError:
                pass  # it has new words, or white space beside a space
        words = self._find(text)
        if len("".join(words)) != len(text):
            return None
        try:
            return [*chain.from_iterable(map(self._words.__getitem__, words))]
        except KeyError:
            return self._encode_new(words)

    def _encode_new(self, words: list[str]) -> list[int] | None:
        """Encode all new words in one call: each call releases the GIL and waits for it again."""
        ids = {word: self._words.get(word) for word in words}
        new = [word for word, known in ids.items() if known is None]
        if len(new) > _MIN_NEW and len(new) > 0.7 * len(words):
            return None  # hardly any word repeats: not prose, and not worth caching
        learned = dict(zip(new, self._encode_words(new), strict=True))
        if len(self._words) + len(new) > _MAX_WORDS:
            self._words.clear()
        self._words.update((word, ids) for word, ids in learned.items() if len(word) <= _MAX_WORD)
        ids |= learned
        return [id for word in words for id in ids[word] or ()]


def ascii_pattern(file: TokenizerFile) -> re.Pattern[str] | None:
    """The tokenizer's pattern for ASCII text, or None if it is not certain to be equivalent."""
    if not _keeps_ascii(file.normalizer) or file.model.type not in (None, "BPE") or file.model.dropout:
        return None
    source = _source(_flat(file.pre_tokenizer))
    # Python's engine has no limit on its steps, and holds the GIL.
    is_safe = source in (_BYTE_LEVEL, _SEPARATE_DIGITS) or (source is not None and is_linear(source))
    translated = _translate(source) if source is not None and is_safe else None
    return re.compile(translated, re.ASCII) if translated is not None else None


def breaks_at_spaces(file: TokenizerFile) -> bool:
    """Whether a word begins at every space between two characters that are not white space."""
    source = _source(_flat(file.pre_tokenizer)) or ""
    if source in (_BYTE_LEVEL, _SEPARATE_DIGITS):
        return True
    for known in sorted(_BREAKING, key=len, reverse=True):
        source = source.replace(known, _CUT)
    return set(source.split("|")) == {_CUT}


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None or normalizer.get("type") in ("NFC", "NFD", "NFKC", "NFKD"):
        return True
    return normalizer.get("type") == "Sequence" and all(_keeps_ascii(part) for part in normalizer["normalizers"])


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part["pretokenizers"] if part.get("type") == "Sequence" else [part]


def _source(steps: list[dict[str, Any]]) -> str | None:
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    uses_regex = steps[-1].get("use_regex", True)
    before = steps[:-1]
    if uses_regex and not before:
        return _BYTE_LEVEL
    if uses_regex and len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits"):
        return _SEPARATE_DIGITS
    if not uses_regex and len(before) == 1 and before[0].get("type") == "Split" and _is_isolating(before[0]):
        found: str | None = before[0]["pattern"].get("Regex")
        return found
    return None


def _is_isolating(split: dict[str, Any]) -> bool:
    return split.get("behavior") == "Isolated" and not split.get("invert")


def _translate(source: str) -> str | None:
    """Translate Oniguruma's classes to ASCII ones; None for a pattern with unknown parts."""
    out: list[str] = []
    inside = False
    for part in _PARTS.finditer(source):
        named, escape, unknown, opening, closing = part.groups()
        if unknown or (named and named not in _CLASSES) or (opening and inside):
            return None
        if named is not None:
            text = _CLASSES[named]
            out.append(text if inside else f"[{text}]" if text else "(?!)")
        elif escape in ("s", "S"):
            if escape == "S" and inside:
                return None
            out.append(_SPACE if inside else f"[{'^' if escape == 'S' else ''}{_SPACE}]")
        else:
            inside = bool(opening) or (inside and not closing)
            out.append(part.group())
    try:
        re.compile("".join(out), re.ASCII)
    except re.error:
        return None
    return "".join(out)
