"""Constrained output: llguidance behind the filter interface that ExLlamaV3 calls at every token.

ExLlamaV3's own filters are not used: they know one-token triggers only, compile where they are created, and raise when
a grammar fails during generation, which ends the jobs of all clients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.exllamav3.model_folder import ExllamaModelInfo, read_tokenizer
from modelyard.engines.grammars import Grammars

_NO_TOKEN = -1


class GrammarFilters(Grammars):
    """Creates the filters of one model. `as_tensor` turns a row of bits into a tensor without a copy."""

    def __init__(self, folder: Path, info: ExllamaModelInfo, as_tensor: Callable[[Any], Any]) -> None:
        super().__init__(partial(_load_tokenizer, folder, info))
        self._as_tensor = as_tensor

    def create(self, constraint: Constraint) -> GrammarFilter | None:
        """None if the constraint is dropped."""
        matcher = self.matcher_if_valid(constraint)
        if matcher is None:
            return None
        return GrammarFilter(matcher, self.tokenizer, self._as_tensor, constraint.trigger)


def _load_tokenizer(folder: Path, info: ExllamaModelInfo) -> LLTokenizer:
    return LLTokenizer(read_tokenizer(folder), n_vocab=info.n_vocab, eos_token=list(info.eos_ids) or None)


class GrammarFilter:
    """Constrains one job's output to a grammar; with a trigger only what follows it, each time until it is complete.

    `is_active` and `trigger_token` are ExLlamaV3's: it activates the filter at the start of the job unless
    `trigger_token` is set. `error` is set when the grammar fails; that ends this job only.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, as_tensor: Callable[[Any], Any], trigger: str | None = None
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._trigger, self._tail = (trigger or "").encode(), b""
        self.trigger_token = _NO_TOKEN if trigger else None
        self.is_active = not trigger
        self.error: InvalidRequest | None = None
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._mask = as_tensor(self._bits.reshape(1, -1))

    @property
    def ends_job(self) -> bool:
        """The job ends when the grammar is complete."""
        return not self._trigger

    def attach(self, job: Any) -> None:
        """Part of ExLlamaV3's interface."""

    def reset(self) -> None:
        self._matcher.reset()
        self._tail = b""

    def use_background_worker(self) -> bool:
        """The mask is computed while the GPU computes."""
        return True

    def get_next_logit_mask(self) -> Any:
        """A set bit allows a token. After an error all are allowed: the job ends before the token is sent."""
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check_matcher()
        if self.error is not None:
            self._bits.fill(-1)
        return self._mask

    def feed(self, token: int) -> bool:
        """Takes each generated token; True ends the job."""
        if self.error is not None:
            return True
        if not self.is_active:
            self._look_for_trigger(token)
            return False
        self._matcher.consume_token(token)
        self._check_matcher()
        self.is_active = self.error is None and not self._matcher.is_stopped()
        return self.error is not None or (self.ends_job and not self.is_active)

    def _check_matcher(self) -> None:
        """Some grammars exceed llguidance's limits only while they are used."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip()
            self.error = InvalidRequest(f"the grammar failed: {reason}", code="bad_grammar")

    def _look_for_trigger(self, token: int) -> None:
        """A token may end the trigger and continue with text that the grammar forbids. It has been generated already,
        so this one call stays unconstrained."""
        text = self._tail + self._tokenizer.decode_bytes([token])
        _, found, rest = text.partition(self._trigger)
        if not found:
            self._tail = text[max(0, len(text) - len(self._trigger) + 1) :]
            return
        self._tail = b""
        self._matcher.reset()
        ids = self._tokenizer.tokenize_bytes(rest) if rest else []
        matches = self._matcher.try_consume_tokens(ids) == len(ids)
        self.is_active = matches and not self._matcher.is_stopped()
