"""A prompt's fixed words as ids, with places for the texts between them: only the texts are left to be tokenized.

It says what cutting the whole prompt at its control tokens would say, if no text can spell a control token that is cut
at, neither by itself (the shield sees to that) nor together with the words around it (`holds_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from modelyard.tokenizer.generations import Generations

Read = Callable[[str, str], list[int]]  # a stretch that is not among the young ones, behind its control token


# A text in its stretch: which text, the control token that the stretch stands behind, the words before and after the
# text, who reads it, and the ids of all that follows up to the next text's stretch.
Place = tuple[int, str, str, str, Read, list[int]]


class Frame:
    def __init__(self, head: list[int], places: Sequence[Place], cache: Generations) -> None:
        self._head, self._places, self._cache = head, places, cache

    def encode(self, texts: Sequence[str]) -> list[int]:
        ids, young = self._head.copy(), self._cache.young
        for text, cut, before, after, read, behind in self._places:
            stretch = before + texts[text] + after
            ids += young.get(stretch) or read(cut, stretch)
            ids += behind
        return ids


def holds_together(words: Sequence[str], cuts: Collection[str]) -> bool:
    """Whether no text between these words can make one of the cuts with them, or with the next text."""
    if any(one in other for one in cuts for other in cuts if one != other):
        return False
    halves = [(cut[:at], cut[at:]) for cut in cuts for at in range(1, len(cut))]
    opens, closes = tuple(half for half, _ in halves), tuple(half for _, half in halves)
    return not any(word.endswith(opens) for word in words[:-1]) and not any(
        word.startswith(closes) for word in words[1:]
    )
