"""A draft model: a small model with the same vocabulary that drafts for the large one.

It has a context for each cache, with the same sequences, and reads what their jobs hold, one slice per step if it is
far behind. Then it continues as long as its best token is likely enough. The next step shows which drafts were
accepted; the KV of the others is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import IntArray, LlamaBatch
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sampler import logits_row
from modelyard.engines.llama_cpp.sequences import common_prefix
from modelyard.engines.llama_cpp.speculation import Drafts
from modelyard.library.model_files import locate_model_file

log = logging.getLogger(__name__)

_EMPTY = np.zeros(0, np.int32)
_MAX_VOCAB_DIFFERENCE = 128  # sizes of one family pad their vocabularies differently
_MAX_LAG = 32  # tokens that a draft may be behind and still count as synchronized


class DraftModel:
    """The weights. Close it after the drafters that use them."""

    def __init__(
        self, options: Options, target: Any, attach: Callable[[Any], None], report: Callable[[float], bool]
    ) -> None:
        path = locate_model_file(options.draft_model_path or "")
        self._options, self._attach = options, attach
        self._raw = loading.load_model(path, options, report)
        try:
            check_draft_model(self._raw, target, str(path))
        except InvalidRequest:
            self.close()
            raise

    def create_drafter(self, cache: str, info: CacheInfo) -> ModelDrafter:
        context = loading.create_context(self._raw, f"{cache} of the draft model", info, self._options)
        self._attach(context)
        n_ubatch = self._options.for_cache(info).n_ubatch
        return ModelDrafter(context, n_ubatch, info.parallel, self._options.draft_p_min)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            lib.llama_model_free(raw)


class _DraftSequence(Struct):
    """The first `n_past` tokens of its job are in the KV, and after them the `drafted` ones."""

    tokens: IntArray  # of the previous job, for the prefix that it shares with the next
    n_past: int = 0
    drafted: list[int] = []


class ModelDrafter:
    """The draft model's context of one cache. Belongs to the engine's thread."""

    is_free = False

    def __init__(self, context: Any, n_ubatch: int, parallel: int, min_probability: float) -> None:
        self._context, self._n_ubatch, self._min_probability = context, n_ubatch, min_probability
        self._memory = lib.llama_get_memory(context)
        self._n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(lib.llama_get_model(context)))
        self._batch = LlamaBatch(max(n_ubatch, parallel))
        self._sequences = [_DraftSequence(_EMPTY) for _ in range(parallel)]
        self._jobs: dict[int, LlamaCppJob] = {}
        self.is_synchronized = True
        self._works = True

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        """The prefix that the previous job shares with this one stays."""
        state = self._sequences[sequence]
        state.n_past, state.drafted = common_prefix(state.tokens, job.ids), []
        self._jobs[sequence] = job

    def end(self, sequence: int) -> None:
        state, job = self._sequences[sequence], self._jobs.pop(sequence)
        self._settle(state, job)
        state.tokens = job.ids[: state.n_past]

    def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            lib.llama_free(context)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def draft(self, lengths: Mapping[int, int]) -> Drafts:
        rows = self._read_jobs(lengths) if self._works else {}
        drafts: Drafts = {sequence: [] for sequence in rows}
        while rows:
            tokens = self._extend_drafts(rows, lengths, drafts)
            rows = self._decode_tokens(tokens) if tokens else {}
        return drafts

    def _read_jobs(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Reads what the jobs have generated. Returns the row of each sequence that is up to date."""
        self._batch.clear()
        rows: dict[int, int] = {}
        self.is_synchronized = True
        for sequence in sorted(lengths):
            state, job = self._sequences[sequence], self._jobs[sequence]
            self._settle(state, job)
            short.memory_seq_rm(self._memory, sequence, state.n_past, -1)
            lag = job.length - state.n_past
            self.is_synchronized = self.is_synchronized and lag <= _MAX_LAG
            if count := min(lag, self._n_ubatch - self._batch.size):
                ids = job.ids[state.n_past : state.n_past + count]
                # A token that only the large model has becomes the last of the draft's vocabulary: only drafts get
                # worse.
                ids = np.minimum(ids, self._n_vocab - 1)
                row = self._batch.add(ids, state.n_past, sequence, last=count == lag)
                state.n_past += count
                if count == lag:
                    rows[sequence] = row
        return rows if self._decode() else {}

    def _settle(self, state: _DraftSequence, job: LlamaCppJob) -> None:
        """Keeps the accepted part of the draft. The last token is always evaluated again for its logits."""
        generated = job.ids[state.n_past : state.n_past + len(state.drafted)]
        state.n_past += common_prefix(np.asarray(state.drafted, np.int32), generated)
        state.n_past, state.drafted = min(state.n_past, job.length - 1), []

    def _extend_drafts(self, rows: Mapping[int, int], lengths: Mapping[int, int], drafts: Drafts) -> dict[int, int]:
        """Appends the best token of each row. Returns the tokens of the sequences that continue."""
        tokens = {}
        for sequence, row in rows.items():
            token, probability = most_likely_token(logits_row(self._context, row, self._n_vocab))
            if probability < self._min_probability:
                continue
            drafts[sequence].append(token)
            if len(drafts[sequence]) < lengths[sequence]:
                tokens[sequence] = token
        return tokens

    def _decode_tokens(self, tokens: Mapping[int, int]) -> dict[int, int]:
        self._batch.clear()
        rows = {}
        for sequence, token in tokens.items():
            state = self._sequences[sequence]
            position = state.n_past + len(state.drafted)
            state.drafted.append(token)
            rows[sequence] = self._batch.add(np.asarray([token], np.int32), position, sequence, last=True)
        return rows if self._decode() else {}

    def _decode(self) -> bool:
        """A failure costs speed, not an answer."""
        code = lib.llama_decode(self._context, self._batch.raw) if self._batch.size else 0
        if code != 0:
            self._works = False
            log.error("llama_decode of the draft model failed with code %d: drafts are off from now on", code)
        return self._works


def most_likely_token(logits: Any) -> tuple[int, float]:
    """With its probability."""
    token = int(logits.argmax())
    return token, float(1 / np.exp(logits - logits[token]).sum())


def check_draft_model(draft: Any, target: Any, path: str) -> None:
    """Raises if token ids mean different tokens, or if the draft model cannot rewind."""
    if lib.llama_model_is_recurrent(draft) or lib.llama_model_is_hybrid(draft):
        raise _unusable(path, "it cannot rewind (it is recurrent or hybrid)")
    vocab, draft_vocab = lib.llama_model_get_vocab(target), lib.llama_model_get_vocab(draft)
    size, draft_size = lib.llama_vocab_n_tokens(vocab), lib.llama_vocab_n_tokens(draft_vocab)
    kind, draft_kind = lib.llama_vocab_type(vocab), lib.llama_vocab_type(draft_vocab)
    if kind != draft_kind or abs(size - draft_size) > _MAX_VOCAB_DIFFERENCE:
        raise _unusable(path, f"it has {draft_size} tokens of type {draft_kind} and the model {size} of type {kind}")
    if kind == 0:  # no vocabulary, ids only
        return
    for token in range(min(size, draft_size)):
        text, draft_text = lib.llama_vocab_get_text(vocab, token), lib.llama_vocab_get_text(draft_vocab, token)
        if text != draft_text:
            raise _unusable(path, f"token {token} is {_quoted(draft_text)} there and {_quoted(text)} in the model")


def _quoted(raw: bytes | None) -> str:
    return repr((raw or b"").decode("utf-8", "replace"))


def _unusable(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be the draft model: {reason}", code="draft_model_unusable")
