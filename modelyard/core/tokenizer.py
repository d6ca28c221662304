"""The seam to a tokenizer: ids of text, text of ids, and which tokens are control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class IdLogprob(Struct, frozen=True, gc=False):
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Piece(Struct, frozen=True, gc=False):
    """A bit of detokenized text with its token, so that a marker counts only where the special token stands.

    `text` may be empty: a token that ends in half a character hands its bytes on to the next piece.
    """

    text: str
    special: bool = False
    token: int = -1
    logprob: IdLogprob | None = None


class Detokenizer(Protocol):
    """Stateful: one a stream. It never emits half a character; `finish` gives what a cut-off stream left behind."""

    def feed(self, ids: Sequence[int], logprobs: Sequence[IdLogprob] | None = None) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


class Tokenizer(Protocol):
    """`encode` takes special tokens for what they are; `encode_plain` reads their spelling as ordinary text."""

    @property
    def size(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> frozenset[int]:
        """Every token that ends a turn."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Control tokens by their text."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def detokenizer(self) -> Detokenizer: ...
