"""ASCII text word by word: the pre-tokenizer's own pattern in Python's `re`, and a memory of every word's ids.

A byte-level tokenizer splits text by a pattern and encodes each word alone, so a word met before needs no tokenizer:
ordinary prose costs a quarter of what the library takes. Exact by construction, within limits that are checked:

- ASCII only: there `\\p{L}`, `\\p{N}` and `\\s` are the plain classes written here, and normal forms change nothing;
- a pattern of known parts only, one `Split` or the byte-level one (with or without digits apart), nothing after it;
- no added token's spelling in the text: those are found before any pattern.

Everything else is the library's.

Where a pattern begins a word at every single space, a clause reads the same wherever it stands. Those of short texts
are remembered, too: what programs ask again and again differs in a name or a number, and only its clause is new.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

from modelyard.vocab.cuts import TokenizerFile

MAX_TEXT = 32_000  # one search is one call that nothing can interrupt: about a millisecond
_MAX_WORDS = 200_000
_MAX_WORD = 64
_MANY = 64
_SHORT = 2_000  # characters: of a longer text hardly any clause comes again
_MAX_CLAUSES = 1 << 20  # characters

_SPACE = r"\t\n\x0b\x0c\r\x20"
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are pieces of their own before the pattern is looked at: to it, a digit is where the text ends.
_DIGITS_APART = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Nd": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
_PARTS = re.compile(r"\\p\{(\w+)\}|\\([sSrntdu\\'.+*?()\[\]{}|/-])|\\(.)|(\[\^?)|(\])|.", re.DOTALL)


class Words:
    """`encode_words` is the library's. Safe in threads: a race only learns the same word twice."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        added: re.Pattern[str] | None,
        encode_words: Callable[[list[str]], list[list[int]]],
    ) -> None:
        self._find, self._added, self._encode_words = pattern.findall, added, encode_words
        self._known: dict[str, list[int]] = {}
        self._may_cut = _begins_at_spaces(pattern)
        self._clauses: dict[str, list[int]] = {}
        self._held = 0  # characters of them

    def encode(self, text: str) -> list[int] | None:
        """None: not for us."""
        if len(text) > MAX_TEXT or not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        if self._may_cut and len(text) <= _SHORT and "\0" not in text:
            clauses = text.replace(". ", ".\0 ").replace(", ", ",\0 ").split("\0")
            if len(clauses) > 1 and (found := self._by_clauses(clauses)) is not None:
                return found
        return self._by_words(text)

    def _by_clauses(self, clauses: list[str]) -> list[int] | None:
        ids: list[int] = []
        for clause in clauses:
            found = self._clauses.get(clause)
            if found is None and (found := self._learn(clause)) is None:
                return None
            ids += found
        return ids

    def _learn(self, clause: str) -> list[int] | None:
        """None where the space that it begins with is not alone: then it may belong to what follows."""
        if clause[:1].isspace() and not clause[1:2].strip():
            return None
        ids = self._by_words(clause)
        if ids is not None:
            if self._held > _MAX_CLAUSES:
                self._clauses, self._held = {}, 0
            self._clauses[clause] = ids
            self._held += len(clause)
        return ids

    def _by_words(self, text: str) -> list[int] | None:
        words = self._find(text)
        try:
            ids = [*chain.from_iterable(map(self._known.__getitem__, words))]
        except KeyError:
            return self._with_new(words, text)
        return ids if len("".join(words)) == len(text) else None

    def _with_new(self, words: list[str], text: str) -> list[int] | None:
        """What is new is learned in one call: the library's price is mostly for being called."""
        if sum(map(len, words)) != len(text):
            return None
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        if len(new) > _MANY and len(new) > 0.7 * len(words):
            return None  # hardly any word comes twice: no prose, and nothing worth remembering
        learned = dict(zip(new, self._encode_words(new), strict=True))
        known = self._known
        if len(known) + len(new) > _MAX_WORDS:
            self._known = {}
        self._known.update((word, ids) for word, ids in learned.items() if len(word) <= _MAX_WORD)
        return [id for word in words for id in learned.get(word) or known[word]]


_SIDES = ("a", "B", "aB", "7", "12", ".", ")", "-", "'", "'s", "b's", "'S", "_", "/", "a\nb", ".\n(", "\x1f", "\x7f")


def _begins_at_spaces(pattern: re.Pattern[str]) -> bool:
    """Whether a space between two characters that are none always begins a word, and looks only ahead."""
    find = pattern.findall
    pairs = ((one, f" {other}") for one in _SIDES for other in _SIDES)
    return all(find(one + other) == find(one) + find(other) for one, other in pairs)


def ascii_pattern(file: TokenizerFile) -> re.Pattern[str] | None:
    """The tokenizer's pattern for ASCII text, or None where it is not certain to be the same."""
    if not _keeps_ascii(file.normalizer) or file.model.type not in (None, "BPE") or file.model.dropout:
        return None
    source = _source(_flat(file.pre_tokenizer))
    translated = _translate(source) if source is not None else None
    return re.compile(translated, re.ASCII) if translated is not None else None


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
    by_itself = steps[-1].get("use_regex", True)
    before = steps[:-1]
    if by_itself and not before:
        return _BYTE_LEVEL
    if by_itself and len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits"):
        return _DIGITS_APART
    if not by_itself and len(before) == 1 and before[0].get("type") == "Split" and _is_isolating(before[0]):
        found: str | None = before[0]["pattern"].get("Regex")
        return found
    return None


def _is_isolating(split: dict[str, Any]) -> bool:
    return split.get("behavior") == "Isolated" and not split.get("invert")


def _translate(source: str) -> str | None:
    """Oniguruma's classes as ASCII ones; None where the pattern has a part that is not known to mean the same."""
    out: list[str] = []
    inside = False
    for part in _PARTS.finditer(source):
        named, escape, strange, opening, closing = part.groups()
        if strange or (named and named not in _CLASSES) or (opening and inside):
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
