"""Constrained output: what ExLlamaV3 asks a filter for at every token, answered by llguidance.

Of the same form as the filters that come with ExLlamaV3, and not one of them: theirs know triggers of one token only,
compile where they are made, and raise where a grammar fails while it is used, which ends the jobs of everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.exllamav3.model_folder import ExllamaModelInfo, tokenizer_text
from modelyard.engines.grammars import Grammars

log = logging.getLogger(__name__)

_NO_TOKEN = -1


class GrammarFilters:
    """Those of one model; `as_tensor` makes ExLlamaV3's tensor of a row of bits, without a copy."""

    def __init__(self, folder: Path, shape: ExllamaModelInfo, as_tensor: Callable[[Any], Any]) -> None:
        self._folder, self._shape, self._as_tensor = folder, shape, as_tensor
        self._tokenizer: LLTokenizer | None = None
        self._grammars = Grammars(self._vocabulary)

    def order(self, constraint: Constraint) -> Future[GrammarFilter | None]:
        """`make`, on the thread for it."""
        return self._grammars.submit(partial(self.make, constraint))

    def make(self, constraint: Constraint) -> GrammarFilter | None:
        """None where the constraint is dropped: a grammar that nobody asked for must not fail a request."""
        try:
            matcher = self._grammars.matcher(constraint)
        except InvalidRequest as error:
            if not constraint.trigger:
                raise
            log.warning("the calls of %s stay free: %s", ", ".join(constraint.tools) or "tools", error.message)
            return None
        return GrammarFilter(matcher, self._vocabulary(), self._as_tensor, constraint.trigger)

    def close(self) -> None:
        self._grammars.close()

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            told = tokenizer_text(self._folder)
            self._tokenizer = LLTokenizer(told, n_vocab=self._shape.vocab, eos_token=list(self._shape.ends) or None)
        return self._tokenizer


class GrammarFilter:
    """Holds one job's output to a grammar; with a trigger from there on, until it is complete, and then again.

    `is_active` and `trigger_token` are ExLlamaV3's: it makes the filter active at the job's start unless the latter is
    set. `fault` is why the grammar broke: the job is over then, and its neighbours are not.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, as_tensor: Callable[[Any], Any], trigger: str | None = None
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._trigger, self._tail = (trigger or "").encode(), b""
        self.trigger_token = _NO_TOKEN if trigger else None
        self.is_active = not trigger
        self.fault: InvalidRequest | None = None
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._mask = as_tensor(self._bits.reshape(1, -1))

    @property
    def ends_the_job(self) -> bool:
        """What is complete is all that the job says."""
        return not self._trigger

    def attach(self, job: Any) -> None:
        """It needs to know nothing of the job."""

    def reset(self) -> None:
        self._matcher.reset()
        self._tail = b""

    def use_background_worker(self) -> bool:
        """The mask is worked out while the GPU computes."""
        return True

    def get_next_logit_mask(self) -> Any:
        """A set bit allows a token. Where the grammar broke all are: the job ends before anybody hears more of it."""
        if self.fault is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
        if self.fault is not None:
            self._bits.fill(-1)
        return self._mask

    def feed(self, token: int) -> bool:
        """Hears each token; True ends the job."""
        if self.fault is not None:
            return True
        if not self.is_active:
            self._watch(token)
            return False
        self._matcher.consume_token(token)
        self._check()
        self.is_active = self.fault is None and not self._matcher.is_stopped()
        return self.fault is not None or (self.ends_the_job and not self.is_active)

    def _check(self) -> None:
        """A grammar may turn out to be too much work only while it is used."""
        if self._matcher.is_error():
            told = self._matcher.get_error().strip()
            self.fault = InvalidRequest(f"the grammar failed: {told}", code="bad_grammar")

    def _watch(self, token: int) -> None:
        """A token may end the trigger and go on with what the grammar forbids: it is said already, so this one call
        stays free."""
        written = self._tail + self._tokenizer.decode_bytes([token])
        _, found, rest = written.partition(self._trigger)
        if not found:
            self._tail = written[max(0, len(written) - len(self._trigger) + 1) :]
            return
        self._tail = b""
        self._matcher.reset()
        ids = self._tokenizer.tokenize_bytes(rest) if rest else []
        fits = self._matcher.try_consume_tokens(ids) == len(ids)
        self.is_active = fits and not self._matcher.is_stopped()
