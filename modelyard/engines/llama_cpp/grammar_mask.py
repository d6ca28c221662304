"""The model's vocabulary as llguidance wants it: the bytes of each token, and which tokens are no text."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.grammars import Grammars
from modelyard.engines.llama_cpp.binding import lib

_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 1, 1 << 3, 1 << 4
_NO_TEXT = b"\xff"  # what llguidance marks such a token with: no text has this byte
_ROOM = 16 * 1024  # more than the longest token


class GrammarVocabulary:
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


# Constrained output: a grammar that llguidance compiles against the model's own vocabulary, and each step's mask.
#
# A mask is laid over a row's logits right before the samplers see them, so every sampler works under it; log
# probabilities are taken before. Tokens that are no text (control tokens and a family's markers) are never matched by a
# grammar's strings: grammars name them by id. On SmolLM2-135M with one thread a mask takes 0.1 ms of a step's 13 ms.

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]


class GrammarCompiler:
    """Compiles constraints for one model. That may take long, so it has a thread of its own, which is not the engine's.

    Its tokenizer points into the model: close it before the model is freed.
    """

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        self._vocab, self._n_vocab = vocab, n_vocab
        self._tokens: GrammarVocabulary | None = None
        self._grammars = Grammars(lambda: self._all().tokenizer)

    def order(self, constraint: Constraint) -> Future[GrammarMask | TriggeredMask | None]:
        """`make`, on the thread for it."""
        return self._grammars.submit(partial(self.make, constraint))

    def close(self) -> None:
        """Waits for what is being compiled; what has not begun is cancelled."""
        self._grammars.close()

    def make(self, constraint: Constraint) -> GrammarMask | TriggeredMask | None:
        """None where the constraint is dropped: a grammar that nobody asked for must not fail a request."""
        try:
            mask = GrammarMask(self._grammars.matcher(constraint), self._n_vocab)
        except InvalidRequest as error:
            if not constraint.trigger:
                raise
            log.warning("the calls of %s stay free: %s", ", ".join(constraint.tools) or "tools", error.message)
            return None
        return TriggeredMask(mask, constraint.trigger, self._all()) if constraint.trigger else mask

    def _all(self) -> GrammarVocabulary:
        if self._tokens is None:  # a second for a large vocabulary: only where somebody asks for it
            self._tokens = GrammarVocabulary(self._vocab, self._n_vocab)
        return self._tokens


class GrammarMask:
    """Holds one job's output to a grammar, token by token, until `is_complete`."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-n_vocab // 32) * 4, np.uint8)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def pick(self, logits: Logits, choose: Callable[[], int]) -> int:
        """The token that `choose` samples from the logits, which are changed in place."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits, count=len(logits), bitorder="little").view(np.bool_)
        np.copyto(logits, -np.inf, where=~allowed)
        token = choose()
        if not allowed[token]:  # a sampler whose sums became no numbers where so much is impossible
            token = int(logits.argmax())
        self._matcher.consume_token(token)
        self._check()
        return token

    def fitting(self, ids: list[int]) -> int:
        """How many of these the grammar would let through from here."""
        return self._matcher.validate_tokens(ids)

    def _check(self) -> None:
        """A grammar may turn out to be too much work only while it is used."""
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar failed: {self._matcher.get_error().strip()}", code="bad_grammar")

    def begin(self, ids: list[int]) -> bool:
        """Start anew, after these; False where they do not fit."""
        self._matcher.reset()
        return self._matcher.try_consume_tokens(ids) == len(ids)


class TriggeredMask:
    """Leaves the output free until the trigger was written, and again once what must follow it is complete."""

    is_complete = False

    def __init__(self, mask: GrammarMask, trigger: str, tokens: GrammarVocabulary) -> None:
        self._mask, self._trigger, self._tokens = mask, trigger.encode(), tokens
        self._tail = b""  # of what was written: where the trigger may have begun
        self._holds = False

    def pick(self, logits: Logits, choose: Callable[[], int]) -> int:
        if not self._holds:
            return self._free(logits, choose)
        token = self._mask.pick(logits, choose)
        self._holds = not self._mask.is_complete
        return token

    def fitting(self, ids: list[int]) -> int:
        return self._mask.fitting(ids) if self._holds else len(ids)

    def _free(self, logits: Logits, choose: Callable[[], int]) -> int:
        """A token may end the trigger and go on, but not with what the grammar forbids: then another one is taken."""
        while True:
            token = choose()
            if logits[token] == -np.inf:
                token = int(logits.argmax())
            if self._fits(token):
                return token
            logits[token] = -np.inf

    def _fits(self, token: int) -> bool:
        written = self._tail + self._tokens.pieces[token]
        _, found, rest = written.partition(self._trigger)
        if not found:
            self._tail = written[max(0, len(written) - len(self._trigger) + 1) :]
            return True
        if not self._mask.begin(self._tokens.of(rest)):
            return False
        self._tail, self._holds = b"", not self._mask.is_complete
        return True
