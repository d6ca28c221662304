"""Ordinary text to ids with the added tokens out of play: their spellings are letters like any others.

The library's own switch (`encode_special_tokens`) spares added tokens that are not flagged special, such as a family's
`<tool_call>`, and would need a second copy of the vocabulary. So the steps of the pipeline are run one by one here,
without the step that looks for added tokens. Slower, but only text that spells a control token comes this way.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import PreTokenizedString
from tokenizers import Tokenizer as HfTokenizer

from modelyard.tokenizer.spellings import spelling_pattern

_BEFORE = "x"  # stands before a text that is not the start of the prompt; its own tokens are dropped


class PlainEncoder:
    def __init__(self, tokenizer: HfTokenizer, controls: Mapping[str, int], unknown: str | None) -> None:
        self._tokenizer = tokenizer
        self._controls = frozenset(id for text, id in controls.items() if text != unknown)
        self._pattern = spelling_pattern(text for text in controls if len(text) > 1)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """`start` is False for text that goes on from something: some tokenizers put a space before the start."""
        if not text:
            return []
        ids = self._run(text, start)
        if self._controls.isdisjoint(ids):
            return ids
        return self._apart(text, ids, start)

    def _run(self, text: str, start: bool) -> list[int]:
        tokenizer = self._tokenizer
        run = PreTokenizedString(text if start else _BEFORE + text)
        if not start:
            run.split(lambda _, whole: [whole[:1], whole[1:]])
        if tokenizer.normalizer is not None:
            run.normalize(tokenizer.normalizer.normalize)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize(run)
        run.tokenize(tokenizer.model.tokenize)
        encoding = run.to_encoding()
        if start:
            return list(encoding.ids)
        return [id for id, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True) if begin > 0]

    def _apart(self, text: str, ids: list[int], start: bool) -> list[int]:
        """A model that holds control tokens among its words (Unigram does) must not see the spelling in one piece."""
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return [id for id in ids if id not in self._controls]
        middle = found.start() + 1
        return self.encode(text[:middle], start=start) + self.encode(text[middle:], start=False)
