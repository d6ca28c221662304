"""Constrained output: llguidance compiles a grammar against the model's vocabulary, and each step masks the logits.

The mask is applied right before sampling, so every sampler works with it; logprobs are taken before. Tokens that are
not text (control tokens, a family's markers) never match a grammar's strings: grammars name them by id. On SmolLM2-135M
with one thread a mask takes 0.1 ms of a step's 13 ms.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.grammars import Grammars
from modelyard.engines.llama_cpp.binding import lib
from modelyard.tokenizer.detokenize import is_markup

Logits = npt.NDArray[np.float32]

_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 1, 1 << 3, 1 << 4
_NOT_TEXT = b"\xff"  # llguidance's prefix of such a token: no text has this byte
_PADDING = re.compile(rb"\[PAD\d+\]")
_MAX_PIECE = 16 * 1024  # longer than any token


class GrammarMasks(Grammars):
    """Creates the masks of one model. Its tokenizer points into the model: close it before the model is freed."""

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        super().__init__(lambda: self._vocabulary.tokenizer)
        self._vocab, self._n_vocab = vocab, n_vocab

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._vocab, self._n_vocab)

    def create(self, constraint: Constraint) -> GrammarMask | TriggeredMask | None:
        """None if the constraint is dropped."""
        matcher = self.matcher_if_valid(constraint)
        if matcher is None:
            return None
        mask = GrammarMask(matcher, self._n_vocab)
        return TriggeredMask(mask, constraint.trigger, self._vocabulary) if constraint.trigger else mask


class GrammarMask:
    """Constrains one job's output to a grammar, token by token, until `is_complete`."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-n_vocab // 32) * 4, np.uint8)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def sample(self, logits: Logits, choose: Callable[[], int]) -> int:
        """Masks the logits in place, then samples with `choose`."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits, count=len(logits), bitorder="little").view(np.bool_)
        np.copyto(logits, -np.inf, where=~allowed)
        token = choose()
        if not allowed[token]:  # a sampler whose sums became NaN because so much is impossible
            token = int(logits.argmax())
        self._matcher.consume_token(token)
        self._check()
        return token

    def count_valid(self, ids: list[int]) -> int:
        """How many of these tokens the grammar allows from here."""
        return self._matcher.validate_tokens(ids)

    def restart(self, ids: list[int]) -> bool:
        """Starts the grammar again, after these tokens; False if it does not allow them."""
        self._matcher.reset()
        return self._matcher.try_consume_tokens(ids) == len(ids)

    def _check(self) -> None:
        """A grammar may turn out to be too expensive only while it is used."""
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar failed: {self._matcher.get_error().strip()}", code="bad_grammar")


class TriggeredMask:
    """Leaves the output free until the trigger was generated, and again once the grammar behind it is complete."""

    is_complete = False

    def __init__(self, mask: GrammarMask, trigger: str, vocabulary: GrammarVocabulary) -> None:
        self._mask, self._trigger, self._vocabulary = mask, trigger.encode(), vocabulary
        self._tail = b""  # the end of the output, in which the trigger may have begun
        self._active = False

    def sample(self, logits: Logits, choose: Callable[[], int]) -> int:
        if not self._active:
            return self._sample_free(logits, choose)
        token = self._mask.sample(logits, choose)
        self._active = not self._mask.is_complete
        return token

    def count_valid(self, ids: list[int]) -> int:
        return self._mask.count_valid(ids) if self._active else len(ids)

    def _sample_free(self, logits: Logits, choose: Callable[[], int]) -> int:
        """A token may complete the trigger and continue with text that the grammar forbids: then sample again."""
        while True:
            token = choose()
            if logits[token] == -np.inf:
                token = int(logits.argmax())
            if self._accept(token):
                return token
            logits[token] = -np.inf

    def _accept(self, token: int) -> bool:
        output = self._tail + self._vocabulary.pieces[token]
        _, found, rest = output.partition(self._trigger)
        if not found:
            self._tail = output[max(0, len(output) - len(self._trigger) + 1) :]
            return True
        if not self._mask.restart(self._vocabulary.encode(rest)):
            return False
        self._tail, self._active = b"", not self._mask.is_complete
        return True


class GrammarVocabulary:
    """The model's vocabulary for llguidance: the bytes of each token, and which tokens are not text.

    It points into the model's vocabulary and must not outlive it.
    """

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        buffer = ctypes.create_string_buffer(_MAX_PIECE)
        self.pieces = [token_piece(vocab, token, buffer) for token in range(n_vocab)]
        marked = [_NOT_TEXT * _is_not_text(vocab, token, piece) + piece for token, piece in enumerate(self.pieces)]
        eos = lib.llama_vocab_eos(vocab)
        others = [token for token in range(n_vocab) if token != eos and lib.llama_vocab_is_eog(vocab, token)]
        create: Any = LLTokenizer
        # With llama.cpp's own tokenizer, text that a grammar forces is tokenized as the model would.
        self.tokenizer: LLTokenizer = create.from_llamacpp(
            tokens=marked,
            vocab_ptr=vocab,
            tokenize_fptr=ctypes.cast(lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=[eos, *others] if eos >= 0 else others,
            slices=None,
        )

    def encode(self, text: bytes) -> list[int]:
        return self.tokenizer.tokenize_bytes(text) if text else []


def token_piece(vocab: Any, token: int, buffer: Any = None) -> bytes:
    """The text of a token, also of a control token. `buffer` is reused if many tokens are read."""
    buffer = buffer or ctypes.create_string_buffer(_MAX_PIECE)
    count = lib.llama_token_to_piece(vocab, token, buffer, _MAX_PIECE, 0, True)
    return bytes(ctypes.string_at(buffer, max(0, count)))


def _is_not_text(vocab: Any, token: int, piece: bytes) -> bool:
    """Added tokens are text, such as white space, HTML tags and accented letters, unless they are a family's markup, or
    padding of the vocabulary, which older conversions did not flag as unused."""
    attributes = lib.llama_vocab_get_attr(vocab, token)
    if attributes & (_CONTROL | _UNKNOWN | _UNUSED):
        return True
    if not attributes & _USER_DEFINED:
        return False
    return _PADDING.fullmatch(piece) is not None or is_markup(piece.decode(errors="replace"))
