"""Long texts in slices, so that tokenizing them can be stopped: the client has left, or the prompt is too long already.

A slice ends between a letter and the white space before the next word. That is exact, the slices tokenize as the whole
does, if no token of the vocabulary spans a letter and the white space behind it, and if the tokenizer treats the start
of a text like its inside. `can_slice` finds out, once and only for the first long text. A text without such places is
one slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from modelyard.core.tokenizer import Tokenizer

OnProgress = Callable[[int, int], None]  # called with the tokens and the characters so far; it raises to stop

MAX_SLICE = 32_000  # characters: 1 to 100 ms
_MIN_SLICE = 24_000
EXACT_CHARS = 500_000  # shorter texts are tokenized to the end: agents shorten a prompt by the number of its tokens
_PLACE = re.compile(r"(?<=[A-Za-z])(?=[ \n][A-Za-z])")
# White space as vocabularies spell it: byte level ("Ġ", "Ċ"), sentencepiece ("▁") and plainly.
_SPANNING = re.compile(r"[A-Za-z][Ġ▁Ċ \n]")
_SEARCH_STEP = 1 << 16
_CUT_TOKENS = 16  # more than a cut at any place adds
_PROBE = "The quick fox jumps\nover it And then\nagain ABC def"


def slices(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > MAX_SLICE:
        end = _next_place(text, start + _MIN_SLICE)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _next_place(text: str, start: int) -> int:
    """Step by step: a search holds the GIL, and a text may have no such place."""
    for at in range(start, len(text), _SEARCH_STEP):
        if found := _PLACE.search(text, at, at + _SEARCH_STEP + 2):
            return found.start()
    return len(text)


def spans_words(spellings: Iterable[str]) -> bool:
    """Whether a token of this vocabulary spans a letter and the white space behind it."""
    return _SPANNING.search("\0".join(spellings)) is not None


def can_slice(tokenizer: Tokenizer) -> bool:
    if getattr(tokenizer, "spans_words", True):
        return False
    return [id for part in _PLACE.split(_PROBE) for id in tokenizer.encode(part)] == tokenizer.encode(_PROBE)


def estimate(text: str, encode: Callable[[str], list[int]], on_progress: OnProgress, tokens: int, chars: int) -> None:
    """Report the progress through a long text that cannot be sliced exactly. Cutting anywhere adds a few tokens."""
    if len(text) <= EXACT_CHARS:
        return
    for at in range(0, len(text), MAX_SLICE):
        tokens += max(0, len(encode(text[at : at + MAX_SLICE])) - _CUT_TOKENS)
        on_progress(tokens, chars + min(len(text), at + MAX_SLICE))


def encode_long(tokenizer: Tokenizer, text: str, on_progress: OnProgress) -> list[int]:
    """The token ids of a text, in slices where that is exact."""
    if len(text) <= MAX_SLICE:
        return tokenizer.encode(text)
    if not can_slice(tokenizer):
        estimate(text, tokenizer.encode, on_progress, 0, 0)
        return tokenizer.encode(text)
    ids: list[int] = []
    chars = 0
    for piece in slices(text):
        if len(piece) > MAX_SLICE:
            estimate(piece, tokenizer.encode, on_progress, len(ids), chars)
        ids += tokenizer.encode(piece)
        chars += len(piece)
        on_progress(len(ids), chars)
    return ids
