"""Speculative decoding: several tokens per step if drafts are accepted. The output is the same as without.

A draft is decoded together with the token before it. Then the job's own sampler samples after each row, as long as the
sampled token is the drafted one. Drafts come from the job's own text (`NgramDrafter`) or from a draft model
(`ModelDrafter`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import IntArray, LlamaBatch
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.estimate import require_supported
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.logits import logits_row
from modelyard.engines.llama_cpp.model_shape import HEAD_FILES, ModelShape, read_model_shape
from modelyard.engines.llama_cpp.mtp import HeadKind, head_of_file
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequences import common_prefix
from modelyard.library.model_files import locate_model_file

log = logging.getLogger(__name__)

Drafts = dict[int, list[int]]  # by sequence
MIN_LIKELY = 0.75  # a draft ends before a token that is less likely, unless the user says otherwise


class Drafter(Protocol):
    """Writes drafts. Between `begin` and `end` a job only grows."""

    is_free: bool  # drafting costs nothing, so drafts that are not tried are still compared with the output
    is_joint: bool  # all streams get drafts of one length: more than one row each is computed together only then
    is_synchronized: bool  # False if it had to read much before it could draft: such a step is not measured

    def begin(self, sequence: int, job: LlamaCppJob) -> None: ...
    def draft(self, lengths: Mapping[int, int]) -> Drafts:
        """At most so many tokens per sequence."""
        ...

    def end(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class JobSpeculation(Struct):
    """One job: how its drafts fare, and the drafted token that was not tried in this step."""

    acceptance: AcceptanceRate
    untried: int | None = None


class Speculator:
    """Decides for one cache how many tokens to draft. With `measured` it drafts only while that yields more tokens per
    second, else always."""

    def __init__(self, drafter: Drafter, max_draft: int, window: int, *, measured: bool) -> None:
        self._drafter, self._max_draft, self._window, self._measured = drafter, max_draft, window, measured
        self._cost = DraftCost()
        self._spent = self._wasted = 0.0  # seconds of drafting: in this step, and for drafts that came to nothing
        self._held = 0.0  # of them, for drafts of the next step
        self._jobs: dict[int, JobSpeculation] = {}
        self.is_idle = False  # nothing was worth drafting: the next step need not wait for drafts

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        """A job with a seed must give the same text again. Speculation changes it only by rounding, which depends on
        the rows of a decode, but measured times must not decide about that. A draft model cannot read images."""
        self.is_idle = False
        if not job.prompt.has_media and not (self._measured and job.prompt.sampling.seed is not None):
            self._jobs[sequence] = JobSpeculation(AcceptanceRate())
            self._drafter.begin(sequence, job)

    def end(self, sequence: int) -> None:
        if self._jobs.pop(sequence, None) is not None:
            self._drafter.end(sequence)

    def close(self) -> None:
        self._drafter.close()

    # --- a step -------------------------------------------------------------------------------------------------------

    def draft(self, streams: Mapping[int, LlamaCppJob]) -> Drafts:
        """Drafts for the jobs that generate, as far as they are worth trying."""
        cost = self._cost.per_row(len(streams)) if self._measured else 0.0
        lengths = {
            sequence: self._draft_length(self._jobs[sequence], job, cost)
            for sequence, job in streams.items()
            if sequence in self._jobs
        }
        if self._drafter.is_joint and lengths:
            lengths = self._joint_lengths(streams, lengths, cost)
        self.is_idle = not any(lengths.values())
        least = int(self._drafter.is_free)
        requested = {sequence: max(least, count) for sequence, count in lengths.items() if max(least, count)}
        started = time.perf_counter()
        drafts = self._drafter.draft(requested) if requested else {}
        found = {
            sequence: draft
            for sequence, tokens in drafts.items()
            if (draft := self._to_try(sequence, streams[sequence], tokens, lengths[sequence]))
        }
        seconds = time.perf_counter() - started
        self._spent += seconds
        if found:
            self._held += seconds
        else:
            self._wasted += seconds
        return found

    def _joint_lengths(
        self, streams: Mapping[int, LlamaCppJob], lengths: Mapping[int, int], cost: float
    ) -> dict[int, int]:
        """One length for all, by their acceptance together, as far as each has room."""
        if not self._measured:
            return dict.fromkeys(lengths, max(lengths.values()))
        rate = sum(self._jobs[sequence].acceptance.rate for sequence in lengths) / len(lengths)
        length = draft_length(rate, cost, self._max_draft)
        return {sequence: min(length, self._room(streams[sequence])) for sequence in lengths}

    def _draft_length(self, state: JobSpeculation, job: LlamaCppJob, cost: float) -> int:
        room = self._room(job)
        return draft_length(state.acceptance.rate, cost, room) if self._measured else room

    def _room(self, job: LlamaCppJob) -> int:
        """The last token that a job may generate needs no row."""
        return max(0, min(self._max_draft, job.prompt.max_tokens - job.n_output - 1, self._window - job.length - 1))

    def _to_try(self, sequence: int, job: LlamaCppJob, tokens: list[int], length: int) -> list[int]:
        if not length:
            self._jobs[sequence].untried = tokens[0] if tokens else None
            return []
        if not tokens and not self._drafter.is_free:
            self._jobs[sequence].untried = _NOTHING
        return allowed_prefix(job, tokens[:length])

    def observe(self, sequence: int, drafted: int, accepted: int, token: int) -> None:
        """After a step of a sequence; `token` is the first that was sampled."""
        state = self._jobs.get(sequence)
        if state is None:
            return
        if drafted:
            state.acceptance.update(drafted, accepted)
        elif state.untried is not None:
            state.acceptance.update(1, state.untried == token)
        else:
            state.acceptance.decay()
        state.untried = None

    def measure(self, streams: int, drafted: int, seconds: float) -> None:
        """The duration of a step without prompts. What drafting took counts for the step that tries the drafts, and so
        does what drafts took that came to nothing."""
        spent, self._spent = self._spent, 0.0
        if drafted:
            spent, self._held, self._wasted = spent - self._held - self._wasted, 0.0, 0.0
        if self._measured and self._drafter.is_synchronized:
            self._cost.observe(streams, drafted, max(0.0, seconds - spent))


def allowed_prefix(job: LlamaCppJob, draft: list[int]) -> list[int]:
    """Up to a token that would end the job or that its grammar forbids."""
    stop = next((at for at, token in enumerate(draft) if token in job.stop_ids), len(draft))
    return draft[:stop] if job.mask is None else draft[: job.mask.count_valid(draft[:stop])]


# --- does it pay? -----------------------------------------------------------------------------------------------------
#
# A step that moves `streams` streams on takes T seconds, and each drafted row makes it c seconds longer. A row yields
# as many tokens as its probability to be accepted; without it the same seconds would yield c · streams / T tokens. So
# that is a row's cost: the probability from which on it pays. The n-th token has acceptanceⁿ.

_NOTHING = -2  # no token: a draft that came to nothing counts as one that was rejected
_INITIAL_COST = 0.4  # below what a small model on a CPU costs, so that drafts are tried
_INITIAL_RATE, _INITIAL_WEIGHT = 0.5, 2.0  # a new job's acceptance, and how many drafts that counts for
_SMOOTHING = 0.1  # of a new measurement
_FORGETTING = 1 / 256  # per step: what made drafts expensive or useless may be over, and only trying shows it
_MEMORY = 24.0  # drafted tokens: older ones count less and less
_OUTLIER = 4.0  # times the current value: another process had the core


class DraftCost:
    """The cost of a drafted row in one cache, learned from the duration of its steps."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}  # without drafts, by the number of streams
        self._row_s: float | None = None  # of one drafted row

    def per_row(self, streams: int) -> float:
        """1: not worth trying, also while the duration of a step without drafts is unknown."""
        step = self._step_s.get(streams)
        if not step:
            return 1.0
        return _INITIAL_COST if self._row_s is None else min(1.0, self._row_s * streams / step)

    def observe(self, streams: int, drafted: int, seconds: float) -> None:
        step = self._step_s.get(streams, 0.0 if drafted else seconds)
        if not drafted:
            self._step_s[streams] = _smoothed(step, seconds, _SMOOTHING)
            if self._row_s is not None:
                self._row_s = _smoothed(self._row_s, _INITIAL_COST * step / streams, _FORGETTING)
        elif step:
            row = max(0.0, seconds - step) / drafted
            self._row_s = row if self._row_s is None else _smoothed(self._row_s, row, _SMOOTHING)


def _smoothed(current: float, measured: float, share: float) -> float:
    return current + share * (min(measured, _OUTLIER * current) - current)


class AcceptanceRate:
    """How often the drafted tokens of one job were accepted of late."""

    def __init__(self) -> None:
        self._accepted, self._tried = _INITIAL_RATE * _INITIAL_WEIGHT, _INITIAL_WEIGHT

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def update(self, drafted: int, accepted: int) -> None:
        """Tokens after the first rejected one were not tried."""
        fade = 1 - 1 / _MEMORY
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self._accepted, self._tried = self._accepted * fade + hit, self._tried * fade + 1

    def decay(self) -> None:
        """A step without evidence."""
        self._accepted += _FORGETTING * (_INITIAL_RATE * _INITIAL_WEIGHT - self._accepted)
        self._tried += _FORGETTING * (_INITIAL_WEIGHT - self._tried)


def draft_length(acceptance: float, cost: float, limit: int) -> int:
    """As many tokens as each pay for themselves."""
    if cost >= 1 or acceptance <= cost:
        return 0
    if acceptance >= 1 or cost <= 0:
        return limit
    return min(limit, int(math.log(cost) / math.log(acceptance)))


# --- drafts from the text ---------------------------------------------------------------------------------------------

_GRAM = 3  # tokens that must match: two are found everywhere, four too late
_BITS = 21  # of a token id: three of them fit into one integer without collisions
_CHUNK = 4096  # tokens indexed per step: a cached prompt of 100,000 must not delay it
_MIN_VECTORIZED = 32  # below it numpy costs more than it saves


class NgramDrafter:
    """Drafts from each job's own text."""

    is_free = is_synchronized = True
    is_joint = False

    def __init__(self) -> None:
        self._texts: dict[int, tuple[LlamaCppJob, NgramIndex]] = {}

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        self._texts[sequence] = job, NgramIndex()

    def draft(self, lengths: Mapping[int, int]) -> Drafts:
        drafts = {}
        for sequence, length in lengths.items():
            job, index = self._texts[sequence]
            index.extend(job.ids[len(index) :].tolist())
            drafts[sequence] = index.draft(length)
        return drafts

    def end(self, sequence: int) -> None:
        del self._texts[sequence]

    def close(self) -> None:
        self._texts.clear()


class NgramIndex:
    """The tokens of a job, and where each run of three occurred last. Pure."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._positions: dict[int, int] = {}  # of the token after the run
        self._indexed = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        self._ids += ids

    def draft(self, length: int) -> list[int]:
        """What followed the last three tokens before, or nothing. Call it with every token: it indexes a long text
        chunk by chunk."""
        self._index_chunk()
        if self._indexed < len(self._ids) or len(self._ids) < _GRAM:
            return []
        position = self._positions.get(_key(self._ids[-_GRAM:]))
        if position is None:
            return []
        found = self._ids[position : position + length]
        while len(found) < length:  # the text repeats itself: continue from its beginning
            found += found[: length - len(found)]
        return found

    def _index_chunk(self) -> None:
        """The last run has no successor yet: it must not find itself."""
        ids, first = self._ids, max(self._indexed, _GRAM)
        end = min(len(ids), first + _CHUNK)
        if end - first < _MIN_VECTORIZED:
            for at in range(first, end):
                self._positions[_key(ids[at - _GRAM : at])] = at
        else:
            self._positions.update(zip(_keys(ids[first - _GRAM : end - 1]), range(first, end), strict=True))
        self._indexed = max(self._indexed, end)


def _key(run: Sequence[int]) -> int:
    a, b, c = run
    return a << 2 * _BITS | b << _BITS | c


def _keys(ids: Sequence[int]) -> list[int]:
    """Of each run of three."""
    array = np.asarray(ids, np.int64)
    keys: list[int] = (array[:-2] << 2 * _BITS | array[1:-1] << _BITS | array[2:]).tolist()
    return keys


# --- drafts from a draft model ----------------------------------------------------------------------------------------
#
# A small model with the same vocabulary drafts for the large one. It has a context for each cache, with the same
# sequences, and reads what their jobs hold, one slice per step if it is far behind. Then it continues as long as its
# best token is likely enough. The next step shows which drafts were accepted; the KV of the others is removed.

_EMPTY = np.zeros(0, np.int32)
_MAX_VOCAB_DIFFERENCE = 128  # sizes of one family pad their vocabularies differently
_MAX_LAG = 32  # tokens that a draft may be behind and still count as synchronized


class DraftModel:
    """The weights. Close it after the drafters that use them."""

    def __init__(
        self,
        options: Options,
        target: Any,
        shape: ModelShape | None,
        attach: Callable[[Any], None],
        report: Callable[[float], bool],
    ) -> None:
        path = locate_model_file(options.draft_model_path or "")
        self._options, self._attach = options, attach
        self._shape = _check_draft_shape(read_model_shape(path), path)
        self.head: HeadKind | None = None  # of a file that is no model of its own
        self.raw = loading.load_model(path, options, report)
        try:
            self.head = head_of_file(self._shape, self.raw, shape, target)
            if options.speculation == "mtp" and self.head is None:
                raise _unusable(str(path), "speculation = mtp takes the assistant of a Gemma 4 model")
            check_draft_model(self.raw, target, str(path))
        except InvalidRequest:
            self.close()
            raise

    def create_drafter(self, cache: str, info: CacheInfo) -> ModelDrafter:
        if self._shape.positions is not None and self._shape.positions < info.window:
            raise InvalidRequest(
                f"the draft model has {self._shape.positions} positions and the cache {cache!r} a window of "
                f"{info.window}: use a smaller n_ctx or another draft model",
                code="draft_model_unusable",
            )
        context = loading.create_context(self.raw, f"{cache} of the draft model", info, self._options)
        self._attach(context)
        n_ubatch = self._options.for_cache(info).n_ubatch
        least = MIN_LIKELY if self._options.draft_p_min is None else self._options.draft_p_min
        return ModelDrafter(context, n_ubatch, info.parallel, least)

    def close(self) -> None:
        raw, self.raw = self.raw, None
        if raw is not None:
            lib.llama_model_free(raw)


class _DraftSequence(Struct):
    """The first `n_past` tokens of its job are in the KV, and after them the `drafted` ones."""

    tokens: IntArray  # of the previous job, for the prefix that it shares with the next
    scope: tuple[str, str] = ("", "")  # cache and scope of the previous job
    n_past: int = 0
    drafted: list[int] = []


class ModelDrafter:
    """The draft model's context of one cache. Belongs to the engine's thread."""

    is_free = is_joint = False

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
        """The prefix that the previous job shares with this one stays, if it has the same cache and scope."""
        state, scope = self._sequences[sequence], (job.cache, job.prompt.scope)
        state.n_past, state.drafted = common_prefix(state.tokens, job.ids) if state.scope == scope else 0, []
        state.scope = scope
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
                # A token that only the large model has becomes the draft's last one: only drafts get worse.
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


def _check_draft_shape(shape: ModelShape, path: Path) -> ModelShape:
    if shape.architecture in HEAD_FILES:
        return shape
    require_supported(path, shape.architecture)
    if shape.purpose.task != "chat" or not shape.purpose.causal:
        raise _unusable(str(path), "it does not generate")
    return shape


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
