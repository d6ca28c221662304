"""The model's vocabulary as llguidance wants it: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

import ctypes
from typing import Any

from llguidance import LLTokenizer

from modelyard.engines.llama_cpp.binding import lib

_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 1, 1 << 3, 1 << 4
_NO_TEXT = b"\xff"  # what llguidance marks such a token with: no text has this byte
_ROOM = 16 * 1024  # more than the longest token


class Tokens:
    """Points into the model's vocabulary, and must not outlive it."""

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        buffer = ctypes.create_string_buffer(_ROOM)
        self.pieces = [_piece(vocab, token, buffer) for token in range(n_vocab)]
        marked = [_NO_TEXT * _is_no_text(vocab, token, piece) + piece for token, piece in enumerate(self.pieces)]
        make: Any = LLTokenizer
        # llama.cpp's own tokenizer comes along: text that a grammar forces is then spelled as the model would.
        self.tokenizer: LLTokenizer = make.from_llamacpp(
            tokens=marked,
            vocab_ptr=vocab,
            tokenize_fptr=ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=_ends(vocab, n_vocab),
            slices=None,
        )

    def of(self, text: bytes) -> list[int]:
        return self.tokenizer.tokenize_bytes(text) if text else []


def _piece(vocab: Any, token: int, buffer: Any) -> bytes:
    count = lib.llama_token_to_piece(vocab, token, buffer, _ROOM, 0, True)
    return bytes(ctypes.string_at(buffer, max(0, count)))


def _is_no_text(vocab: Any, token: int, piece: bytes) -> bool:
    """Users' own tokens are markers too, but for runs of white space, which some families have among them."""
    kind = lib.llama_vocab_get_attr(vocab, token)
    return bool(kind & (_CONTROL | _UNKNOWN | _UNUSED) or (kind & _USER_DEFINED and piece.strip()))


def _ends(vocab: Any, n_vocab: int) -> list[int]:
    """All that end an answer, the vocabulary's own end first."""
    own = lib.llama_vocab_eos(vocab)
    others = [token for token in range(n_vocab) if token != own and lib.llama_vocab_is_eog(vocab, token)]
    return [own, *others] if own >= 0 else others
