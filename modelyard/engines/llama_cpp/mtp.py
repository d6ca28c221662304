"""Drafts from the model's hidden rows: by its own MTP layers (multi-token prediction), in a second context on the same
weights, or by a file that was trained for it, a Gemma 4 assistant or EAGLE-3.

The target's hidden row of position p, together with the token of position p + 1, gives the head's entry at p + 1: its
KV, and a guess of the token at p + 2. From its own hidden row the head goes on guessing.

    one layer        its KV grows with each guess
    several layers   the n-th guess is made by the n-th layer, which reads the guesses before it anew
    assistant        it has no KV: it attends to that of the target, and all its guesses have the same position
    EAGLE-3          its rows are made of the inputs of three of the target's layers, and its entry of p + 1 is at p

    target decodes ─→ `read`: its hidden rows wait with the tokens after them ─→ `draft`: the head reads what waits and
    the last token in one decode, then guesses one token after another; the KV of its guesses is removed again

Rows that nobody drafts from are read in batches (`_WAITING`); while drafts do not pay, they wait, and the oldest are
forgotten (`_MAX_BYTES`). What the target's KV does, cut, copy, export or restore,
the head's does with it (`KvMemory`), so that a reused prefix is not read again. A row that is unknown is zero: that
costs a worse guess, never a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_float, c_int32, c_uint8
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard import libllama
from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import IntArray, LlamaBatch, VectorBatch
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.logits import logits_rows
from modelyard.engines.llama_cpp.model_shape import FEATURE_ARCHITECTURES, HEAD_FILES, ModelShape
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequences import MovedBlock

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP
_WAITING = 64  # rows of all sequences that wait, at most
_IDLE = 64  # decodes of the target without a draft: reading along costs as much as a layer
_MAX_BYTES = 32 << 20  # of rows that wait while nobody drafts
_NO_TOKENS = np.zeros(0, np.int32)


class HeadKind(Struct, frozen=True):
    """`layers` guess in turn. `features`: the layers of the target whose inputs a row is made of; without any it is the
    target's last hidden row."""

    name: Literal["mtp", "eagle3"] = "mtp"
    layers: int = 1
    shares_kv: bool = False
    features: tuple[int, ...] = ()

    @property
    def mark(self) -> int:
        """In the header of saved KV."""
        return -2 if self.features else -1 if self.shares_kv else self.layers


def require_head(kind: str) -> None:
    """Raises if the library cannot do it."""
    if missing := lib.lacks(kind):
        raise InvalidRequest(
            f"drafts of the kind {kind} need another llama.cpp library: {lib.path} ({lib.version}) does not export "
            f"{', '.join(missing)}",
            code="mtp_unavailable",
        )


def own_head(model: Any) -> HeadKind:
    """The layers of the model's own file."""
    return HeadKind(layers=short.model_n_layer_nextn(model))


def head_of_file(draft: ModelShape, draft_model: Any, target: ModelShape | None, target_model: Any) -> HeadKind | None:
    """What a draft file is, if it is no model of its own. Raises if it does not fit the target."""
    if draft.architecture not in HEAD_FILES:
        return None
    kind = HEAD_FILES[draft.architecture]
    if kind not in libllama.FEATURES:
        raise _unusable(f"{kind} drafts are not run by this engine: use llama_server")
    require_head(kind)
    architecture = target.architecture if target is not None else ""
    width, own = lib.llama_model_n_embd(target_model), lib.llama_model_n_embd_out(draft_model)
    if kind == "mtp":
        if architecture != "gemma4" or own != width:
            raise _unusable(f"it drafts for a gemma4 of width {own}, not for a {architecture} of width {width}")
        return HeadKind(shares_kv=True)
    if architecture not in FEATURE_ARCHITECTURES:
        raise _unusable(f"llama.cpp does not give the inputs of the layers of {architecture}, which {kind} needs")
    count = short.model_target_layer_ids_n(draft_model)
    features = tuple((c_int32 * count).from_address(short.model_target_layer_ids(draft_model)))
    most, inputs = lib.llama_model_n_layer(target_model), draft.feature_width
    if max(features, default=most + 1) > most or min(features) < 0 or inputs != width:
        raise _unusable(f"it reads the layers {list(features)} of width {inputs}; the model has {most} of {width}")
    return HeadKind("eagle3", features=features)


def _unusable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the draft model cannot be used: {reason}", code="draft_model_unusable")


# --- the order of rows ------------------------------------------------------------------------------------------------


def computed_order(
    counts: Sequence[tuple[int, int]], outputs: Sequence[bool], tail: int, *, swapped: bool = True
) -> IntArray | None:
    """The row of the batch that each hidden row belongs to, in early releases of llama.cpp; None if they have the order
    of the batch. Pure.

    `counts`: each sequence and its rows, in the order of the batch. llama.cpp computes neighbouring sequences together,
    as many rows of each as all of them have. A sequence that can take back `tail` - 1 tokens is not divided within its
    last `tail` rows. Hidden rows stay in the order in which they were computed; those of the last layer are `swapped`,
    as the rows with logits are when those are sorted.
    """
    if len({count for _, count in counts}) <= 1:
        return None
    starts = np.cumsum([0, *(count for _, count in counts)])
    done = [0] * len(counts)
    order: list[int] = []
    while len(order) < starts[-1]:
        run = list(_run(counts, done))
        rows = min(counts[at][1] - done[at] for at in run)
        whole = 0
        while whole < len(run) and not 0 < counts[run[whole]][1] - done[run[whole]] - rows < tail:
            whole += 1
        if not whole:
            run, rows = run[:1], counts[run[0]][1] - done[run[0]]
        else:
            run = run[:whole]
        for at in run:
            order += range(starts[at] + done[at], starts[at] + done[at] + rows)
            done[at] += rows
    if swapped:
        _sort_outputs(order, [row for row in order if outputs[row]])
    return np.asarray(order, np.int32)


def _run(counts: Sequence[tuple[int, int]], done: Sequence[int]) -> Iterator[int]:
    """The first sequence with rows left, and those after it with the next number each."""
    last = None
    for at, (sequence, count) in enumerate(counts):
        if done[at] < count and (last is None or sequence == last + 1):
            last = sequence
            yield at


def _sort_outputs(order: list[int], output_rows: list[int]) -> None:
    """llama.cpp sorts the rows with logits by selection, and swaps hidden rows of the same numbers with them."""
    for at in range(len(output_rows) - 1):
        least = min(range(at, len(output_rows)), key=output_rows.__getitem__)
        if least != at:
            output_rows[at], output_rows[least] = output_rows[least], output_rows[at]
            order[at], order[least] = order[least], order[at]


_sorts: dict[Path, bool] = {}  # by library


def sorts_rows(target: Any, rows: Callable[[int], Rows], tail: int) -> bool:
    """Whether the library gives hidden rows in the order of the batch. No version tells, so two sequences are decoded
    together in the empty target, and one of them alone."""
    if lib.path in _sorts:
        return _sorts[lib.path]
    first, second = 3 + tail, 2
    order = computed_order([(0, first), (1, second)], [False] * (first + second), tail, swapped=False)
    batch, memory = LlamaBatch(first + second), lib.llama_get_memory(target)
    tokens, found = np.arange(first + second, dtype=np.int32), []
    for alone in (True, False):
        lib.llama_memory_clear(memory, False)
        batch.clear()
        if not alone:
            batch.add(tokens[:first], 0, 0, last=False)
        batch.add(tokens[first:], 0, 1, last=False)
        if order is None or lib.llama_decode(target, batch.raw) != 0:
            return True
        found.append(rows(batch.size).copy())
    lib.llama_memory_clear(memory, False)
    sorted_row, computed_row = found[1][-1], found[1][int(np.flatnonzero(order == first + second - 1)[0])]
    distances = [float(np.abs(row - found[0][-1]).sum()) for row in (sorted_row, computed_row)]
    return _sorts.setdefault(lib.path, distances[0] <= distances[1])


# --- the head ---------------------------------------------------------------------------------------------------------


class _Waiting(Struct):
    """A sequence: the head's KV ends before position `end`. `rows` are the target's hidden rows from `end` - 1 on, and
    `tokens` those after each of them but the last."""

    end: int
    rows: Rows
    tokens: IntArray


class _HeadBatch(LlamaBatch):
    """A batch with tokens and hidden rows."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__(capacity)
        self.hidden: Rows = np.zeros((capacity, width), np.float32)
        self.raw.embd = self.hidden.ctypes.data_as(POINTER(c_float))

    def add_pairs(self, tokens: Any, rows: Rows, position: int, sequence: int, *, output: bool) -> int:
        """Returns the last row. All are outputs or none: some of llama.cpp's graphs give the hidden rows of the first
        ones."""
        at = self.size
        self.hidden[at : at + len(rows)] = rows
        self.add(np.asarray(tokens, np.int32), position, sequence, last=output, drafted=len(rows) - 1)
        return self.size - 1


class MtpHead:
    """What drafts from the hidden rows of one context. Belongs to the engine's thread."""

    def __init__(
        self, target: Any, model: Any, name: str, info: CacheInfo, options: Options, kind: HeadKind = HeadKind()
    ) -> None:
        self._target, self.kind = target, kind
        self.width: int = lib.llama_model_n_embd_out(model)
        self.most = info.parallel * (2 + options.max_draft)  # rows of a decode that begins drafts
        self._merged = 1 + options.max_draft  # rows of a sequence that are read together with its last token
        context_type = 0 if kind.features else MTP_CONTEXT
        shares = kind.shares_kv
        self.context = loading.create_head_context(
            model, name, info, options, target, self.most, context_type, shares_kv=shares
        )
        self._memory = lib.llama_get_memory(self.context)
        self.n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._tail = 1 + rollback if (rollback := lib.llama_n_rs_seq(target)) else 0
        self._n_ubatch = options.for_cache(info).n_ubatch
        self.batch = _HeadBatch(max(self._n_ubatch, self.most), self.width)
        self._waiting: dict[int, _Waiting] = {}
        self.works = True
        self._idle = 0  # decodes since the last draft
        self._back = int(bool(kind.features))  # how far before the target's its positions are
        self._target_width: int = lib.llama_model_n_embd(lib.llama_get_model(target))
        self._layers: int = lib.llama_model_n_layer(lib.llama_get_model(target))
        for layer in kind.features:
            if layer < self._layers:
                short.set_embeddings_layer_inp(target, layer, True)
        if self._layers in kind.features or not kind.features:
            short.set_embeddings_nextn(target, True, False)
        short.set_embeddings_nextn(self.context, True, True)
        self._is_sorted = info.parallel == 1 or shares or sorts_rows(target, self._target_rows, self._tail)

    def close(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            lib.llama_free(context)

    # --- after a decode of the target ---------------------------------------------------------------------------------

    def _target_rows(self, count: int) -> Rows:
        """Of the last decode: those of the last layer, or the inputs of several, side by side."""
        if not self.kind.features:
            return logits_rows(short.get_embeddings_nextn(self._target), count, self.width)
        parts = []
        for layer in self.kind.features:
            if layer < self._layers:
                address = short.get_embeddings_layer_inp(self._target, layer)
            else:
                address = short.get_embeddings_nextn(self._target)
            parts.append(logits_rows(address, count, self._target_width))
        return np.concatenate(parts, 1)

    def _encode(self, features: Rows) -> Rows:
        """The rows that EAGLE-3 makes of the inputs of layers."""
        rows = np.empty((len(features), self.width), np.float32)
        next_position = short.memory_seq_pos_max(self._memory, 0) + 1  # it is not used, but llama.cpp checks it
        for at in range(0, len(features), self._n_ubatch):
            part = features[at : at + self._n_ubatch]
            batch = VectorBatch(part, np.arange(next_position, next_position + len(part), dtype=np.int32), 0)
            if lib.llama_encode(self.context, batch.raw) != 0:
                self._fail("llama_encode", 0)
                return rows
            rows[at : at + len(part)] = logits_rows(short.get_embeddings_nextn(self.context), len(part), self.width)
        return rows

    def read(self, batch: LlamaBatch, ahead: int = 0) -> None:
        """Takes the hidden rows of the target's last decode. `ahead`: how far the batch's positions are further by
        now."""
        if not self.works:
            return
        size, sequences = batch.size, batch.seq[: batch.size]
        firsts = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist()]
        ends = [*firsts[1:], size]
        rows = self._target_rows(size)
        if not self._is_sorted:
            counts = [(int(sequences[at]), end - at) for at, end in zip(firsts, ends, strict=True)]
            swapped = not self.kind.features
            order = computed_order(counts, batch.output[:size].tolist(), self._tail, swapped=swapped)
            if order is not None:
                sorted_rows = np.empty_like(rows)
                sorted_rows[order] = rows
                rows = sorted_rows
        if self.kind.features:
            rows = self._encode(rows)
        for at, end in zip(firsts, ends, strict=True):
            self._append(int(sequences[at]), int(batch.pos[at]) - ahead, batch.token[at:end], rows[at:end])
        self._idle += 1
        waiting = sum(len(state.rows) for state in self._waiting.values())
        if self.kind.shares_kv:
            self._forget(self._merged)
        elif self._idle <= _IDLE and waiting > _WAITING + len(self._waiting):
            self.catch_up(list(self._waiting))
        elif waiting > (most := _MAX_BYTES // (4 * self.width)):
            self._forget(most // (2 * len(self._waiting)))

    def _forget(self, keep: int) -> None:
        """Leaves each sequence its last rows."""
        for sequence, state in list(self._waiting.items()):
            if (dropped := len(state.rows) - keep) > 0:
                self.clear(sequence)
                state.end, state.rows, state.tokens = state.end + dropped, state.rows[dropped:], state.tokens[dropped:]
                self._waiting[sequence] = state

    def _append(self, sequence: int, position: int, tokens: IntArray, rows: Rows) -> None:
        self.cut(sequence, position)
        state = self._waiting.get(sequence)
        if state is None or position != state.end - 1 + len(state.rows):  # nothing is known of what is before it
            self.clear(sequence)
            self._waiting[sequence] = _Waiting(position + 1, rows.copy(), tokens[1:].copy())
            return
        state.tokens = np.concatenate((state.tokens, tokens if len(state.rows) else tokens[1:]))
        state.rows = np.concatenate((state.rows, rows))

    def catch_up(self, sequences: Sequence[int]) -> None:
        """Reads what waits, without logits."""
        if self.kind.shares_kv:
            return
        self.batch.clear()
        for sequence in sorted(sequences):
            state = self._waiting.get(sequence)
            while state is not None and len(state.tokens) and self.works:
                count = min(len(state.tokens), self._n_ubatch - self.batch.size)
                if count:
                    self.add(state.tokens[:count], state.rows[:count], state.end, sequence, output=False)
                    state.end, state.tokens, state.rows = state.end + count, state.tokens[count:], state.rows[count:]
                if self.batch.size == self._n_ubatch:
                    self._decode_layers()
                    self.batch.clear()
        if self.batch.size:
            self._decode_layers()

    def _decode_layers(self) -> None:
        """Each layer reads the batch: it has its own part of the same cells."""
        sequences = self.batch.seq[: self.batch.size]
        for layer in range(self.kind.layers):
            if layer:
                for at in (0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist()):
                    short.memory_seq_rm(self._memory, int(sequences[at]), int(self.batch.pos[at]), -1)
            self.select(layer)
            self.decode()
        self.select(0)

    def select(self, layer: int) -> None:
        """The layer of the next decodes."""
        if self.kind.layers > 1:
            short.set_nextn_layer_offset(self.context, layer)

    def decode(self) -> bool:
        """A failure costs speed, not an answer."""
        code = lib.llama_decode(self.context, self.batch.raw) if self.works else 0
        if code != 0:
            self._fail("llama_decode", code)
        return self.works

    def _fail(self, function: str, code: int) -> None:
        self.works = False
        log.error("%s of the layers that draft failed with code %d: drafts are off from now on", function, code)

    def _remove(self, sequence: int, position: int) -> None:
        if not self.kind.shares_kv:
            short.memory_seq_rm(self._memory, sequence, max(0, position - self._back), -1)

    def add(self, tokens: Any, rows: Rows, position: int, sequence: int, *, output: bool) -> int:
        """Adds tokens, the first of which is at this position, with the hidden rows before them."""
        return self.batch.add_pairs(tokens, rows, position - self._back, sequence, output=output)

    # --- what a draft begins with -------------------------------------------------------------------------------------

    def begin_draft(self, sequence: int, position: int, token: int) -> int | None:
        """Adds what waits and the last token, at this position, to the batch. Returns the row of that token; None if
        its hidden row is not known."""
        self.cut(sequence, position)
        self._idle = 0
        state = self._waiting.get(sequence)
        if state is None or not len(state.rows) or position != state.end - 1 + len(state.rows):
            return None
        if self.kind.shares_kv:
            return self.add([token], state.rows[-1:], position, sequence, output=True)
        tokens = np.append(state.tokens, np.int32(token))
        row = self.add(tokens, state.rows, state.end, sequence, output=True)
        state.end, state.rows, state.tokens = position + 1, state.rows[:0], _NO_TOKENS
        return row

    def begin_chain(self, sequence: int, position: int) -> Rows | None:
        """The hidden row before this position, when all layers have read what is before it."""
        self.cut(sequence, position)
        self._idle = 0
        state = self._waiting.get(sequence)
        return state.rows if state is not None and state.end == position and len(state.rows) == 1 else None

    def lags(self, sequence: int) -> bool:
        """Whether too much waits to be read with the last token."""
        state = self._waiting.get(sequence)
        return state is not None and len(state.rows) > self._merged

    def end_draft(self, sequence: int) -> None:
        """Removes the KV of the guesses."""
        self._remove(sequence, self._waiting[sequence].end)

    # --- with the target's KV -----------------------------------------------------------------------------------------

    def clear(self, sequence: int) -> None:
        if self._waiting.pop(sequence, None) is not None:
            self._remove(sequence, 0)

    def cut(self, sequence: int, position: int) -> None:
        """The target holds only what is before this position."""
        state = self._waiting.get(sequence)
        if state is None:
            return
        if state.end > position and not (state.end == position + 1 and not len(state.rows)):
            self._remove(sequence, position)
            self._waiting[sequence] = _Waiting(position, np.zeros((1, self.width), np.float32), _NO_TOKENS)
        elif len(state.rows) > (known := position - state.end + 1):
            state.rows, state.tokens = state.rows[:known], state.tokens[: max(0, known - 1)]

    def move(self, sequence: int, blocks: Sequence[MovedBlock]) -> None:
        """As `KvMemory.move`."""
        self.catch_up([sequence])
        for block in () if self.kind.shares_kv else blocks:
            short.memory_seq_rm(self._memory, sequence, block.target, block.source)
            end, distance = block.source + block.count, block.target - block.source
            short.memory_seq_add(self._memory, sequence, block.source, end, distance)
        if (state := self._waiting.get(sequence)) is not None:
            state.end += blocks[-1].target - blocks[-1].source
            self.cut(sequence, blocks[-1].target + blocks[-1].count)

    def copy(self, source: int, target: int, position: int) -> None:
        self.restore(target, self.export(source, position))

    def export(self, sequence: int, position: int, *, partial: bool = False) -> Bytes:
        """The sequence's KV before this position, its last hidden row, and how long both are. `partial`: without the
        KV, which can be cut."""
        self.cut(sequence, position)
        self.catch_up([sequence])
        state = self._waiting.get(sequence)
        if state is None:
            return np.zeros(2, np.int64).view(np.uint8)
        has_kv = not (partial or self.kind.shares_kv)
        kv = np.zeros(lib.llama_state_seq_get_size_ext(self.context, sequence, 0) if has_kv else 0, np.uint8)
        if len(kv) and lib.llama_state_seq_get_data_ext(self.context, _pointer(kv), len(kv), sequence, 0) != len(kv):
            return np.zeros(2, np.int64).view(np.uint8)
        if self.kind.shares_kv:  # nothing was read of what waits
            state.end, state.rows, state.tokens = position, state.rows[-1:], _NO_TOKENS
        row = state.rows[:1] if len(state.rows) else np.zeros((1, self.width), np.float32)
        lengths = np.asarray([kv.nbytes + row.nbytes, state.end], np.int64)
        return np.concatenate((kv, row.view(np.uint8).ravel(), lengths.view(np.uint8)))

    def restore(self, sequence: int, data: Bytes, *, partial: bool = False) -> int:
        """Takes what `export` has put at the end of the data. Returns its size."""
        size, end = data[-16:].copy().view(np.int64).tolist()
        if not 0 <= size <= data.nbytes - 16:
            return 16
        kept = data[data.nbytes - 16 - size : data.nbytes - 16]
        if partial:
            self.cut(sequence, end)
        else:
            self.clear(sequence)
        state = self._waiting.get(sequence)
        row = kept[len(kept) - 4 * self.width :].copy().view(np.float32).reshape(-1, self.width)
        if partial and state is not None and state.end == end and len(row):
            state.rows, state.tokens = row, _NO_TOKENS
        elif not partial and size:
            kv = np.ascontiguousarray(kept[: size - row.nbytes])
            done = lib.llama_state_seq_set_data_ext(self.context, _pointer(kv), len(kv), sequence, 0) if len(kv) else 0
            if done == len(kv):
                self._waiting[sequence] = _Waiting(end, row, _NO_TOKENS)
        return int(size) + 16


def _pointer(data: Bytes) -> Any:
    return data.ctypes.data_as(POINTER(c_uint8))


# --- drafts -----------------------------------------------------------------------------------------------------------


class MtpDrafter:
    """Guesses for all sequences at once, one token of each per decode."""

    is_free, is_joint = False, True

    def __init__(self, head: MtpHead, min_probability: float) -> None:
        self._head, self._min_probability = head, min_probability
        self._jobs: dict[int, LlamaCppJob] = {}
        self.is_synchronized = True

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        self._jobs[sequence] = job

    def end(self, sequence: int) -> None:
        del self._jobs[sequence]

    def close(self) -> None:
        self._head.close()

    def draft(self, lengths: Mapping[int, int]) -> dict[int, list[int]]:
        head, drafts = self._head, {sequence: list[int]() for sequence in lengths}
        behind = [sequence for sequence in lengths if head.lags(sequence)]
        self.is_synchronized = not behind
        if head.kind.layers > 1:
            self._draft_in_turn(lengths, drafts)
            return drafts
        head.catch_up(behind)
        head.batch.clear()
        ends: dict[int, int] = {}
        rows: dict[int, int] = {}
        for sequence in sorted(lengths):
            job = self._jobs[sequence]
            position = job.n_past - job.shift
            if (row := head.begin_draft(sequence, position, job.last_token)) is not None:
                rows[sequence], ends[sequence] = row, position + 1
        while rows and head.decode():
            hidden = self._extend(rows, lengths, drafts)
            head.batch.clear()
            rows = {}
            for sequence, last in hidden.items():
                position = ends[sequence] - 1 if head.kind.shares_kv else ends[sequence] + len(drafts[sequence]) - 1
                rows[sequence] = head.add(drafts[sequence][-1:], last, position, sequence, output=True)
        for sequence in ends:
            head.end_draft(sequence)
        return drafts

    def _draft_in_turn(self, lengths: Mapping[int, int], drafts: dict[int, list[int]]) -> None:
        """Each layer reads the last token and all guesses before its own: it has no KV of them."""
        head, hidden, positions = self._head, dict[int, Rows](), dict[int, int]()
        head.catch_up(list(lengths))
        for sequence in sorted(lengths):
            job = self._jobs[sequence]
            position = job.n_past - job.shift
            if (row := head.begin_chain(sequence, position)) is not None:
                hidden[sequence], positions[sequence] = row, position
        going = dict(hidden)
        for layer in range(min(head.kind.layers, max(lengths.values(), default=0))):
            head.batch.clear()
            rows: dict[int, int] = {}
            for sequence in going:
                head.end_draft(sequence)
                tokens = [self._jobs[sequence].last_token, *drafts[sequence]]
                rows[sequence] = head.add(tokens, hidden[sequence], positions[sequence], sequence, output=True)
            head.select(layer)
            if not rows or not head.decode():
                break
            going = self._extend(rows, lengths, drafts)
            for sequence, row in going.items():
                hidden[sequence] = np.concatenate((hidden[sequence], row))
        head.select(0)
        for sequence in positions:
            head.end_draft(sequence)

    def _extend(
        self, rows: Mapping[int, int], lengths: Mapping[int, int], drafts: dict[int, list[int]]
    ) -> dict[int, Rows]:
        """Appends the best token of each row, unless most are not likely enough: drafts of one length are computed
        together. Returns the hidden rows of the sequences that continue."""
        head, going = self._head, {}
        logits = logits_rows(short.get_logits(head.context), head.batch.size, head.n_vocab)[list(rows.values())]
        tokens = logits.argmax(1)
        if self._min_probability:
            best = logits[np.arange(len(tokens)), tokens]
            likely = np.exp(logits - best[:, None]).sum(1) * self._min_probability <= 1
            if 2 * int(likely.sum()) < len(tokens):
                return {}
        for (sequence, row), token in zip(rows.items(), tokens.tolist(), strict=True):
            drafts[sequence].append(token)
            if len(drafts[sequence]) < lengths[sequence]:
                address = short.get_embeddings_nextn_ith(head.context, row)
                going[sequence] = logits_rows(address, 1, head.width).copy()
        return going
