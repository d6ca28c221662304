"""The memory of the token cache, bounded in bytes: what was not asked for during a whole generation is forgotten.

Reads take no lock: a dictionary look-up is atomic, and a generation that was just replaced still holds true answers.
Only what is stored takes it, to be booked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol, runtime_checkable

from modelyard.core.tokenizer import Tokenizer
from modelyard.tokenizer.shield import SENTINEL, spelling_pattern
from modelyard.tokenizer.word_cache import Words

_TOKEN_BYTES = 40  # a reference and an int


class Generations:
    """Ids by stretch. Two dictionaries instead of an ordered one: a hit in the young one changes nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self.young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._limit = limit_bytes // 2
        self._spent = 0
        self._lock = Lock()

    def __contains__(self, key: str) -> bool:
        return key in self.young or key in self._old

    def get(self, key: str) -> list[int] | None:
        return self.young.get(key) or self.revived(key)

    def revived(self, key: str) -> list[int] | None:
        """Of the old generation: what is asked for is young again."""
        if (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: str, ids: list[int]) -> None:
        with self._lock:
            if key in self.young:
                return
            self._spent += sys.getsizeof(key) + _TOKEN_BYTES * len(ids) + 100
            if self._spent > self._limit:
                self._old, self.young, self._spent = self.young, {}, 0
            self.young[key] = ids


# The token cache: a prompt is cut at control tokens and no stretch between two of them is tokenized twice.
#
# A conversation that grows by a message costs one look into a dictionary for each old stretch. The cuts must be exact
# (`tokenizer/huggingface.py`); each stretch is encoded behind its control token, so that a tokenizer that treats the start of a text
# differently sees it as it stands, and the first stretch has keys of its own. A stretch with a shield's mark is
# encoded as plain text.
#
# Called from the event loop and from worker threads at once.

_FIRST = SENTINEL * 2  # before the key of a first stretch; no stretch of text can begin like this
_LEARNED = 4  # characters: a shorter stretch, such as a line break, stands in everybody's prompts


@runtime_checkable
class Cuttable(Protocol):
    """A vocabulary that knows where text may be cut, and how plain text reads that does not start a prompt."""

    cuts: frozenset[str]

    def encode_plain_inside(self, text: str) -> list[int]: ...


class PrefixTokens:
    def __init__(self, vocab: Tokenizer, cuts: Iterable[str], *, limit_bytes: int = 32 << 20) -> None:
        self._vocab = vocab
        self.cuts = {cut: ids[0] for cut in cuts if len(ids := vocab.encode(cut)) == 1}
        self._cut_ids = frozenset(self.cuts.values())
        self._pattern = spelling_pattern(self.cuts, group=True)
        self._specials = spelling_pattern((s for s in vocab.specials if len(s) > 1), group=True)
        self._plain_inside = vocab.encode_plain_inside if isinstance(vocab, Cuttable) else vocab.encode_plain
        self._words: Words | None = getattr(vocab, "words", None)
        self._cache = Generations(limit_bytes)
        self._last: tuple[str, list[str]] = ("", [""])

    def encode(self, text: str) -> list[int]:
        parts = self._split(text)
        ids = list(self._stretch("", parts[0])) if parts[0] else []
        young, ids_of_cut = self._cache.young, self.cuts
        for cut, stretch in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(ids_of_cut[cut])
            if stretch:
                ids += young.get(stretch) or self._stretch(cut, stretch)
        return ids

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """The model's own spelling of what it said behind a prompt: models do not always cut words into tokens as their
        tokenizer would, and what the KV cache holds is what they wrote. Texts that are known already stay as they
        are, and short ones are everybody's."""
        cuts = self._cut_ids
        start = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in cuts), None)
        if start is None:
            return
        stretch = list(prompt[start:])
        for token in (*output, None):
            if token is not None and token not in cuts:
                stretch.append(token)
                continue
            self._learn(stretch)
            stretch = []

    def _learn(self, ids: list[int]) -> None:
        try:
            text = b"".join(map(self._vocab.token_bytes, ids)).decode()
        except UnicodeDecodeError:
            return  # it ends in half a character: no prompt will hold it
        # A control token's spelling in it may be one or a quotation of one: the text alone does not tell.
        quotes = self._specials is not None and self._specials.search(text) is not None
        if len(text) >= _LEARNED and not quotes and text not in self._cache:
            self._cache.put(text, ids)

    def fresh(self, text: str) -> int:
        """How many characters `encode` would have to tokenize: the caller sends long ones to a thread."""
        parts, cache = self._split(text), self._cache
        first = parts[0] if parts[0] and _FIRST + parts[0] not in cache else ""
        return len(first) + sum(len(stretch) for stretch in parts[2::2] if stretch and stretch not in cache)

    def _split(self, text: str) -> list[str]:
        """Stretches and cuts in turn. The last answer is kept: `fresh` and `encode` ask for the same text."""
        last = self._last
        if last[0] is text:
            return last[1]
        parts = self._cut_up(text)
        self._last = (text, parts)
        return parts

    def _cut_up(self, text: str) -> list[str]:
        return self._pattern.split(text) if self._pattern is not None else [text]

    def _stretch(self, cut: str, stretch: str) -> list[int]:
        key = stretch if cut else _FIRST + stretch
        ids = self._cache.get(key)
        if ids is None:
            ids = self._read(cut, stretch)
            self._cache.put(key, ids)
        return ids

    def _read(self, cut: str, stretch: str) -> list[int]:
        """Behind its control token, so that the start of the text is not taken for the start of a stretch. A vocabulary
        that goes word by word makes no difference between the two; it takes no text with a mark in it."""
        if self._words is not None and (ids := self._words.encode(stretch)) is not None:
            return ids
        if SENTINEL in stretch:
            return self._shielded(cut, stretch)
        return self._vocab.encode(cut + stretch)[1:] if cut else self._vocab.encode(stretch)

    def _shielded(self, cut: str, stretch: str) -> list[int]:
        """Plain text, but for control tokens that stand here unmarked because no cut could be made at them."""
        parts = self._specials.split(stretch) if self._specials is not None else [stretch]
        ids: list[int] = []
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self._vocab.specials[part])
            elif text := part.replace(SENTINEL, ""):
                ids += self._plain_inside(text) if cut or at else self._vocab.encode_plain(text)
        return ids
