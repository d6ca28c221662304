"""The token cache: a prompt is split at control tokens, and no stretch between two of them is tokenized twice.

A conversation that grows by a message costs one dictionary lookup per old stretch. The splits must be exact
(`huggingface.py`). Each stretch is encoded behind its control token, because some tokenizers treat the start of a text
differently; the first stretch has its own keys. A stretch with a shield's mark is encoded as plain text.

Used by the event loop and by worker threads at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from threading import Lock
from typing import Protocol, runtime_checkable

from modelyard.core.tokenizer import Tokenizer
from modelyard.tokenizer.shield import SENTINEL, spelling_pattern
from modelyard.tokenizer.slices import MAX_SLICE, OnProgress, can_slice, estimate, slices
from modelyard.tokenizer.word_cache import WordCache

_TOKEN_BYTES = 40  # a reference and an int
_FIRST = SENTINEL * 2  # key prefix of a first stretch; no text can begin like this
_MIN_LEARNED = 4  # characters; shorter stretches, such as a line break, occur in every prompt


class TwoGenerationCache:
    """An approximate LRU cache of token ids, bounded in bytes: entries that one generation does not use are dropped.

    Two dictionaries instead of an ordered one: a hit in `young` writes nothing, and reads need no lock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._limit = limit_bytes // 2
        self._size = 0
        self._lock = Lock()

    def __contains__(self, key: str) -> bool:
        return key in self.young or key in self._old

    def get(self, key: str) -> list[int] | None:
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: str, ids: list[int]) -> None:
        with self._lock:
            if key in self.young:
                return
            self._size += sys.getsizeof(key) + _TOKEN_BYTES * len(ids) + 100
            if self._size > self._limit:
                self._old, self.young, self._size = self.young, {}, 0
            self.young[key] = ids


@runtime_checkable
class SplittableTokenizer(Protocol):
    """A tokenizer that knows where text may be split, and how to encode plain text within a prompt."""

    cuts: frozenset[str]

    def encode_plain_inside(self, text: str) -> list[int]: ...


class TokenCache:
    def __init__(self, tokenizer: Tokenizer, cuts: Iterable[str], *, limit_bytes: int = 32 << 20) -> None:
        self._tokenizer = tokenizer
        self.cuts = {cut: ids[0] for cut in cuts if len(ids := tokenizer.encode(cut)) == 1}
        self._cut_ids = frozenset(self.cuts.values())
        self._pattern = spelling_pattern(self.cuts, group=True)
        self._specials = spelling_pattern((s for s in tokenizer.specials if len(s) > 1), group=True)
        self._plain_inside = tokenizer.encode_plain
        if isinstance(tokenizer, SplittableTokenizer):
            self._plain_inside = tokenizer.encode_plain_inside
        self._words: WordCache | None = getattr(tokenizer, "words", None)
        self._cache = TwoGenerationCache(limit_bytes)
        self._last: tuple[str, list[str]] = ("", [""])

    def encode(self, text: str, on_progress: OnProgress | None = None) -> list[int]:
        """`on_progress` is called after each step of a long text, and stops the work by raising."""
        if on_progress is not None:
            return self._encode_long(text, on_progress)
        parts = self._split(text)
        ids = list(self._encode_stretch("", parts[0])) if parts[0] else []
        young, cut_ids = self._cache.young, self.cuts
        for cut, stretch in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(cut_ids[cut])
            if stretch:
                ids += young.get(stretch) or self._encode_stretch(cut, stretch)
        return ids

    def _encode_long(self, text: str, on_progress: OnProgress) -> list[int]:
        parts, ids, chars, cut = self._split(text), list[int](), 0, ""
        for at, part in enumerate(parts):
            if at % 2:
                cut = part
                ids.append(self.cuts[cut])
            elif part:
                self._encode_long_stretch(cut, part, ids, chars, on_progress)
            chars += len(part)
            on_progress(len(ids), chars)
        return ids

    def _encode_long_stretch(self, cut: str, stretch: str, ids: list[int], chars: int, on_progress: OnProgress) -> None:
        key = stretch if cut else _FIRST + stretch
        if len(stretch) <= MAX_SLICE or key in self._cache:
            ids += self._encode_stretch(cut, stretch)
            return
        if SENTINEL in stretch or not self._can_slice:
            estimate(stretch, self._tokenizer.encode, on_progress, len(ids), chars)
            ids += self._encode_stretch(cut, stretch)
            return
        start = len(ids)
        for piece in slices(stretch):
            if len(piece) > MAX_SLICE:
                estimate(piece, self._tokenizer.encode, on_progress, len(ids), chars)
            ids += self._tokenize(cut, piece)
            chars += len(piece)
            on_progress(len(ids), chars)
        self._cache.put(key, ids[start:])

    @cached_property
    def _can_slice(self) -> bool:
        return can_slice(self._tokenizer)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Cache the tokens that the model generated after a prompt.

        Models do not always split words as their tokenizer does, and the KV cache holds what they generated. Known and
        short stretches stay as they are.
        """
        cuts = self._cut_ids
        start = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in cuts), None)
        if start is None:
            return
        stretch = list(prompt[start:])
        for token in (*output, None):
            if token is not None and token not in cuts:
                stretch.append(token)
                continue
            self._learn_stretch(stretch)
            stretch = []

    def _learn_stretch(self, ids: list[int]) -> None:
        try:
            text = b"".join(map(self._tokenizer.token_bytes, ids)).decode()
        except UnicodeDecodeError:
            return  # it ends in half a character; no prompt contains it
        # A control token's spelling may be the token or a quotation of it; the text does not tell.
        has_spelling = self._specials is not None and self._specials.search(text) is not None
        if len(text) >= _MIN_LEARNED and not has_spelling and text not in self._cache:
            self._cache.put(text, ids)

    def fresh(self, text: str) -> int:
        """How many characters `encode` would have to tokenize; the caller runs long ones in a thread."""
        parts, cache = self._split(text), self._cache
        first = parts[0] if parts[0] and _FIRST + parts[0] not in cache else ""
        return len(first) + sum(len(stretch) for stretch in parts[2::2] if stretch and stretch not in cache)

    def _split(self, text: str) -> list[str]:
        """Stretches and cuts in turn. The last result is kept, because `fresh` and `encode` get the same text."""
        last = self._last
        if last[0] is text:
            return last[1]
        parts = self._pattern.split(text) if self._pattern is not None else [text]
        self._last = (text, parts)
        return parts

    def _encode_stretch(self, cut: str, stretch: str) -> list[int]:
        key = stretch if cut else _FIRST + stretch
        ids = self._cache.get(key)
        if ids is None:
            ids = self._tokenize(cut, stretch)
            self._cache.put(key, ids)
        return ids

    def _tokenize(self, cut: str, stretch: str) -> list[int]:
        """Behind its control token, so that it is not taken for the start of a text. The word cache makes no difference
        between the two and refuses text with a mark."""
        if self._words is not None and (ids := self._words.encode(stretch)) is not None:
            return ids
        if SENTINEL in stretch:
            return self._tokenize_shielded(cut, stretch)
        return self._tokenizer.encode(cut + stretch)[1:] if cut else self._tokenizer.encode(stretch)

    def _tokenize_shielded(self, cut: str, stretch: str) -> list[int]:
        """Plain text, except for unmarked control tokens at which no exact split is possible."""
        parts = self._specials.split(stretch) if self._specials is not None else [stretch]
        ids: list[int] = []
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self._tokenizer.specials[part])
            elif text := part.replace(SENTINEL, ""):
                ids += self._plain_inside(text) if cut or at else self._tokenizer.encode_plain(text)
        return ids
