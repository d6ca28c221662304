"""A draft model: a small model with the same vocabulary that guesses what the large one will say.

It has a context for each cache, with the same sequences, and reads what their jobs hold, a slice a step where it is far
behind. Then it goes on by itself for as long as it is sure of its best token. What comes of its guesses shows in the
next step: KV of those that were wrong is cut away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import files, loading
from modelyard.engines.llama_cpp.binding import IntArray, LlamaBatch, lib, short
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sampler import logits_row
from modelyard.engines.llama_cpp.sequences import common_prefix
from modelyard.engines.llama_cpp.speculation import Drafts

log = logging.getLogger(__name__)

_EMPTY = np.zeros(0, np.int32)
_PADDING = 128  # tokens that one of two sizes of a model may have more than the other, to fill its last row
_ABREAST = 32  # tokens that a draft may be behind and still be called in step


class DraftModel:
    """The weights. They outlive the drafters that are made of them."""

    def __init__(
        self, options: Options, target: Any, attach: Callable[[Any], None], go_on: Callable[[float], bool]
    ) -> None:
        path = files.find(options.draft_model_path or "")
        self._options, self._attach = options, attach
        self._raw = loading.load_model(path, options, go_on)
        try:
            check_draft_model(self._raw, target, str(path))
        except InvalidRequest:
            self.close()
            raise

    def drafter(self, name: str, info: CacheInfo) -> ModelDrafter:
        raw = loading.create_context(self._raw, f"{name} of the draft model", info, self._options)
        self._attach(raw)
        return ModelDrafter(raw, self._options.for_cache(info).n_ubatch, info.parallel, self._options.draft_p_min)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            lib.llama_model_free(raw)


class _Held(Struct):
    """A sequence: the first `known` tokens of its job are in the KV, and behind them what was `guessed`."""

    tokens: IntArray  # of the job before this one, for what it shares with the next
    known: int = 0
    guessed: list[int] = []


class ModelDrafter:
    """The draft model's context of one cache. Belongs to the engine's thread."""

    is_free = False

    def __init__(self, raw: Any, rows: int, parallel: int, sure: float) -> None:
        self.raw, self._rows, self._sure = raw, rows, sure
        self._memory = lib.llama_get_memory(raw)
        self._n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(lib.llama_get_model(raw)))
        self._batch = LlamaBatch(max(rows, parallel))
        self._held = [_Held(_EMPTY) for _ in range(parallel)]
        self._jobs: dict[int, LlamaCppJob] = {}
        self.is_abreast = True
        self._works = True

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        """What the job before it left stays as far as the two are alike, token by token."""
        held = self._held[sequence]
        held.known, held.guessed = common_prefix(held.tokens, job.ids), []
        self._jobs[sequence] = job

    def end(self, sequence: int) -> None:
        held, job = self._held[sequence], self._jobs.pop(sequence)
        self._settle(held, job)
        held.tokens = job.ids[: held.known]

    def close(self) -> None:
        raw, self.raw = self.raw, None
        if raw is not None:
            lib.llama_free(raw)

    # --- guessing ---------------------------------------------------------------------------------------------------

    def guess(self, counts: Mapping[int, int]) -> Drafts:
        live = self._read(counts) if self._works else {}
        guesses: Drafts = {sequence: [] for sequence in live}
        while live:
            live = self._said(live, counts, guesses)
            if live:
                live = self._go_on(live)
        return guesses

    def _read(self, counts: Mapping[int, int]) -> dict[int, int]:
        """What the jobs hold by now; the row of each sequence that has read all of its own."""
        self._batch.clear()
        rows: dict[int, int] = {}
        self.is_abreast = True
        for sequence in sorted(counts):
            held, job = self._held[sequence], self._jobs[sequence]
            self._settle(held, job)
            short.memory_seq_rm(self._memory, sequence, held.known, -1)
            behind = job.length - held.known
            self.is_abreast = self.is_abreast and behind <= _ABREAST
            if count := min(behind, self._rows - self._batch.size):
                row = self._batch.add(self._known(job, held.known, count), held.known, sequence, last=count == behind)
                held.known += count
                if count == behind:
                    rows[sequence] = row
        return rows if self._decode() else {}

    def _known(self, job: LlamaCppJob, start: int, count: int) -> IntArray:
        """A token that only the large model has is read as the last that both have: the guess gets worse, no more."""
        ids: IntArray = np.minimum(job.ids[start : start + count], self._n_vocab - 1)
        return ids

    def _settle(self, held: _Held, job: LlamaCppJob) -> None:
        """Which of the guesses came true is known now. One token is always read anew: what follows it is asked for."""
        said = job.ids[held.known : held.known + len(held.guessed)]
        held.known += common_prefix(np.asarray(held.guessed, np.int32), said)
        held.known, held.guessed = min(held.known, job.length - 1), []

    def _said(self, live: Mapping[int, int], counts: Mapping[int, int], guesses: Drafts) -> dict[int, int]:
        """Write down the best tokens; the sequences that are to go on, with their tokens."""
        on = {}
        for sequence, row in live.items():
            token, chance = most_likely_token(logits_row(self.raw, row, self._n_vocab))
            if chance < self._sure:
                continue
            guesses[sequence].append(token)
            if len(guesses[sequence]) < counts[sequence]:
                on[sequence] = token
        return on

    def _go_on(self, live: Mapping[int, int]) -> dict[int, int]:
        self._batch.clear()
        rows = {}
        for sequence, token in live.items():
            held = self._held[sequence]
            at = held.known + len(held.guessed)
            held.guessed.append(token)
            rows[sequence] = self._batch.add(np.asarray([token], np.int32), at, sequence, last=True)
        return rows if self._decode() else {}

    def _decode(self) -> bool:
        """A draft that fails costs speed and nobody's answer."""
        code = lib.llama_decode(self.raw, self._batch.raw) if self._batch.size else 0
        if code != 0:
            self._works = False
            log.error("llama_decode answered %d to the draft model: nothing is guessed any more", code)
        return self._works


def most_likely_token(logits: Any) -> tuple[int, float]:
    """The likeliest token, and how likely it is."""
    token = int(logits.argmax())
    return token, float(1 / np.exp(logits - logits[token]).sum())


# --- the same vocabulary ----------------------------------------------------------------------------------------------


def check_draft_model(draft: Any, target: Any, path: str) -> None:
    """Raise where a token id does not mean the same to both, or where the draft model cannot take guesses back."""
    if lib.llama_model_is_recurrent(draft) or lib.llama_model_is_hybrid(draft):
        raise _unusable(path, "it cannot go back in its text (it is recurrent or hybrid)")
    ours, theirs = lib.llama_model_get_vocab(target), lib.llama_model_get_vocab(draft)
    sizes = lib.llama_vocab_n_tokens(ours), lib.llama_vocab_n_tokens(theirs)
    kinds = lib.llama_vocab_type(ours), lib.llama_vocab_type(theirs)
    if kinds[0] != kinds[1] or abs(sizes[0] - sizes[1]) > _PADDING:
        raise _unusable(
            path, f"it has {sizes[1]} tokens of kind {kinds[1]} and the model {sizes[0]} of kind {kinds[0]}"
        )
    if kinds[0] == 0:  # none: ids only
        return
    for token in range(min(sizes)):
        one, other = lib.llama_vocab_get_text(ours, token), lib.llama_vocab_get_text(theirs, token)
        if one != other:
            raise _unusable(path, f"token {token} is {_text(other)} to it and {_text(one)} to the model")


def _text(raw: bytes | None) -> str:
    return repr((raw or b"").decode("utf-8", "replace"))


def _unusable(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be the draft model: {why}", code="draft_model_unusable")
