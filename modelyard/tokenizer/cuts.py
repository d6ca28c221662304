"""Where a prompt may be cut so that its parts tokenize as the whole does, told by the tokenizer's own description.

Tokenizers look for their added tokens first and then treat each stretch between them alone: normalizer, pre-tokenizer
and model never see across one. So a cut at an added token is exact if that token is certainly found there:

- it is searched in the raw text (`normalized` false) and takes no neighbours along (`lstrip`, `rstrip`, `single_word`);
- no other added token contains it or can end inside it, for then the other one might win;
- no token asks what stands next to it (`single_word` anywhere rules all cuts out);
- the steps are ones we know to work stretch by stretch, and the model is no lottery (`dropout`).

Only the start of the text is special (a Metaspace that prepends to the first stretch): the token cache keys it apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

# fmt: off
_STEPS = frozenset({
    "BertNormalizer", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Lowercase",
    "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Punctuation", "Replace", "Sequence",
    "Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
})
# fmt: on


class Added(Struct, frozen=True):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class ModelPart(Struct, frozen=True):
    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None


class TokenizerFile(Struct, frozen=True):
    """What we read of a tokenizer.json; the vocabulary itself is left to the library."""

    added_tokens: list[Added] = field(default_factory=list)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: ModelPart = ModelPart()


def exact_cuts(file: TokenizerFile) -> frozenset[str]:
    if not _works_in_stretches(file):
        return frozenset()
    raw = [token.content for token in file.added_tokens if not token.normalized]
    everything = "\0".join(raw)
    endings = {content[at:] for content in raw for at in range(1, len(content))}
    return frozenset(
        token.content
        for token in file.added_tokens
        if _stands_alone(token) and everything.count(token.content) == 1 and not _may_overlap(token.content, endings)
    )


def _works_in_stretches(file: TokenizerFile) -> bool:
    known = all(step in _STEPS for step in _steps(file.normalizer)) and all(
        step in _STEPS for step in _steps(file.pre_tokenizer)
    )
    return known and not file.model.dropout and not any(token.single_word for token in file.added_tokens)


def _steps(part: dict[str, Any] | None) -> Iterator[str]:
    if part is None:
        return
    yield str(part.get("type"))
    inner: Sequence[dict[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or ()
    for step in inner:
        yield from _steps(step)


def _stands_alone(token: Added) -> bool:
    plain = not (token.normalized or token.lstrip or token.rstrip)
    return plain and len(token.content) > 1 and token.content == token.content.strip() and "\0" not in token.content


def _may_overlap(content: str, endings: set[str]) -> bool:
    return any(content[:length] in endings for length in range(1, len(content)))
