"""Fill-in-the-middle prompts: the text before and after a gap, and other files of the project, as token ids.

    <repo>myproject⏎ <file>a.py⏎ text of a.py … <file>filename⏎ <prefix>before the gap<suffix>after the gap<middle>

The model continues with what belongs into the gap. The order and the names are those of llama-server. Client text is
never read as a control token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelyard.core.errors import Unsupported
from modelyard.core.request import Infill
from modelyard.core.tokenizer import FimTokens, Tokenizer

_REPOSITORY, _CURRENT_FILE = "myproject\n", "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a file, for a model that has no token for it
_PREFIX_SHARE = 3  # of 4 parts, where not everything fits: what is before the gap says more than what is after it

Encode = Callable[[str], list[int]]


def infill_prompt(
    tokenizer: Tokenizer, prefix: str, infill: Infill, *, room: int, suffix_first: bool = False
) -> list[int]:
    """At most `room` tokens: other files are cut first, then what is far from the gap."""
    fim = tokenizer.fim
    if fim is None:
        raise Unsupported("the model has no tokens to fill a gap with", code="suffix_unsupported", param="suffix")
    encode = tokenizer.encode_plain
    bos = [tokenizer.bos] if tokenizer.bos is not None else []
    start = encode(infill.start)
    before, after = _fit(encode(prefix), encode(infill.suffix), room - len(bos) - len(start) - 3)
    before, after = [fim.prefix, *before, *start], [fim.suffix, *after]
    gap = [*bos, *(after + before if suffix_first else before + after), fim.middle]
    if infill.files is None or room <= len(gap):
        return gap
    return [*_encode_files(fim, encode, infill.files)[len(gap) - room :], *gap]


def _fit(before: list[int], after: list[int], room: int) -> tuple[list[int], list[int]]:
    """The tokens next to the gap, 3 to 1. A side that is short leaves its room to the other."""
    if len(before) + len(after) <= room:
        return before, after
    room = max(0, room)
    after_room = max(room // (_PREFIX_SHARE + 1), room - len(before))
    before_room = max(room - after_room, room - len(after))
    return before[len(before) - min(len(before), before_room) :], after[: room - min(len(before), before_room)]


def _encode_files(fim: FimTokens, encode: Encode, files: Sequence[tuple[str, str]]) -> list[int]:
    ids = [fim.repository, *encode(_REPOSITORY)] if fim.repository is not None else []
    for name, text in files:
        ids += [fim.file, *encode(f"{name}\n")] if fim.file is not None else encode(_SNIPPET)
        ids += encode(text)
    return [*ids, fim.file, *encode(_CURRENT_FILE)] if fim.file is not None else ids
