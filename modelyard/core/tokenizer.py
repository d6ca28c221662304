"""The tokenizer interface: text to token ids and back, and which tokens are control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class IdLogprob(Struct, frozen=True, gc=False):
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # 1: the most likely token; of a prompt's tokens only


class Piece(Struct, frozen=True, gc=False):
    """Detokenized text with its token, so that a marker counts only if it is the token.

    A `special` token is a control token: it is not text, except inside of a call's arguments. An `added` token is text
    unless the output format names it. `text` may be empty: a token that ends in half a character passes its bytes on
    to the next piece.
    """

    text: str
    special: bool = False
    token: int = -1
    logprob: IdLogprob | None = None
    added: bool = False


class Detokenizer(Protocol):
    """Stateful, one per stream. It never emits half a character; `finish` returns what the stream left. A character
    that a limit has cut (`truncated`) is dropped; one that the model left incomplete is U+FFFD."""

    def feed(self, ids: Sequence[int], logprobs: Sequence[IdLogprob] | None = None) -> list[Piece]: ...
    def finish(self, truncated: bool = False) -> list[Piece]: ...


class FimTokens(Struct, frozen=True):
    """The control tokens around a gap in a text that a model fills. `repository` and `file` introduce other files."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None


class Tokenizer(Protocol):
    """`encode` recognises special tokens; `encode_plain` treats their spelling as ordinary text."""

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
        """The tokens that no text may become: control tokens, and added ones that are spelled like a marker."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """The tokens that a vocabulary lists beside its words, such as runs of spaces, and that are no control tokens.
        Some are spelled like a marker and are `specials`, too."""
        ...

    @property
    def wrapping(self) -> tuple[list[int], list[int]]:
        """The tokens that belong before and after a text of its own, such as [CLS] and [SEP]."""
        ...

    @property
    def fim(self) -> FimTokens | None:
        """None: the vocabulary has no tokens to fill a gap with."""
        ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts as one input, with the separators and ends that the model was trained with."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def detokenizer(self) -> Detokenizer: ...
