"""The KV of a context's sequences: cut, clear, copy, and export or import as bytes.

Callers pass only verified prefixes: which tokens the KV belongs to is theirs to know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from ctypes import POINTER, c_uint8
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import Internal
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.loading import uses_gpu
from modelyard.engines.llama_cpp.media_tokens import count_positions, whole_chunks
from modelyard.engines.llama_cpp.options import Options, flash_attention_mode
from modelyard.engines.llama_cpp.sequences import CopyCosts, CopyMethod, MovedBlock, TokenIds, is_intact

if TYPE_CHECKING:
    from modelyard.engines.llama_cpp.mtp import MtpHead

KvBytes = npt.NDArray[np.uint8]

_ALL, _PARTIAL = 0, 1  # LLAMA_STATE_SEQ_FLAGS_*: the latter omits what removing tokens can restore
_MEASUREMENTS = 8
_MIN_ROWS = 8  # a decode of fewer rows costs as much as one of a single row


class KvLayout(Struct, frozen=True):
    """What two contexts must have in common to exchange KV."""

    type_k: str
    type_v: str
    flash_attn: str
    streams: int
    swa_full: bool
    heads: int = 0  # MTP layers, whose KV goes with it
    unified: bool = False  # one pool of cells for all sequences


def kv_layout(info: CacheInfo, options: Options) -> KvLayout:
    return KvLayout(
        info.type_k.lower(),
        info.type_v.lower(),
        flash_attention_mode(options.for_cache(info), gpu=uses_gpu(options)),
        info.parallel,
        options.swa_full,
        unified=options.for_cache(info).kv_unified,
    )


class KvMemory:
    """Of one context. Belongs to the engine's thread."""

    def __init__(self, context: Any, window: int, layout: KvLayout) -> None:
        self.layout, self.window = layout, window
        self._context, self._memory = context, lib.llama_get_memory(context)
        model = lib.llama_get_model(context)
        self._n_swa: int = lib.llama_model_n_swa(model)
        self._only_forward: bool = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        self._rollback: int = lib.llama_n_rs_seq(context)  # tokens of the last decode that such a model can take back
        self.costs = CopyCosts()
        # llama.cpp executes a stream copy with the next decode. Until then its target has no data yet, and writing to
        # either sequence would be copied or overwritten.
        self._copy_targets: set[int] = set()
        self._copy_sources: set[int] = set()
        self._head: MtpHead | None = None

    def attach(self, head: MtpHead, heads: int) -> None:
        """MTP layers: their KV goes wherever this one goes."""
        self._head, self.layout = head, structs.replace(self.layout, heads=heads)

    @property
    def can_rewind(self) -> bool:
        """Whether the last tokens of a sequence can be removed; else it goes back only to checkpoints. Models that keep
        one state cannot rewind, and contexts that drop the KV outside of a sliding window."""
        return not self._only_forward and (not self._n_swa or self.layout.swa_full)

    @property
    def can_take_back(self) -> bool:
        """Whether tokens of the last decode can be removed, such as drafts. A sliding window overwrites only what was
        behind it before that decode; some recurrent and hybrid models keep the states of that decode's last tokens."""
        return not self._only_forward or self._rollback > 0

    # --- in place -----------------------------------------------------------------------------------------------------

    def clear(self, index: int) -> None:
        short.memory_seq_rm(self._memory, index, -1, -1)
        if self._head is not None:
            self._head.clear(index)

    def cut(self, index: int, tokens: TokenIds, keep: int) -> bool:
        """Cuts a sequence of these tokens to the first `keep`; False if the model cannot go back so far. llama.cpp
        accepts a cut even if what a sliding window needs is gone, so the positions are checked."""
        end = count_positions(tokens[:keep])
        if self._head is not None:
            self._head.cut(index, end)
        if self._only_forward and keep < len(tokens):
            return False  # llama.cpp would take a state of an earlier decode as that of this one
        if keep <= 0 or not short.memory_seq_rm(self._memory, index, end, -1):
            return False
        newest = short.memory_seq_pos_max(self._memory, index)
        if tokens[keep - 1] < 0:  # under M-RoPE all rows of an image may have the position of its first
            first = count_positions(tokens[: whole_chunks(tokens, keep - 1)])
            newest = end - 1 if first <= newest < end else newest
        if keep == len(tokens):
            return bool(newest == end - 1)
        oldest = short.memory_seq_pos_min(self._memory, index)
        return is_intact(oldest, newest, end, n_swa=self._n_swa, only_forward=self._only_forward)

    @property
    def can_shift(self) -> bool:
        """Whether the KV of a block can get other positions. llama.cpp turns its keys with the next decode."""
        return self.can_rewind and bool(lib.llama_memory_can_shift(self._memory))

    def move(self, index: int, blocks: Sequence[MovedBlock]) -> bool:
        """Moves blocks of a sequence without images to their new positions, over what was there; False if a copy of it
        is pending."""
        if not self._is_writable(index):
            return False
        for block in blocks:
            short.memory_seq_rm(self._memory, index, block.target, block.source)
            end, distance = block.source + block.count, block.target - block.source
            short.memory_seq_add(self._memory, index, block.source, end, distance)
        if self._head is not None:
            self._head.move(index, blocks)
        return True

    # --- as bytes -----------------------------------------------------------------------------------------------------

    def size(self, index: int) -> int:
        return int(lib.llama_state_seq_get_size_ext(self._context, index, _ALL))

    def export(self, index: int, *, partial: bool = False) -> KvBytes | None:
        """A copy; None if llama.cpp cannot give it, or not before the next decode."""
        flags = _PARTIAL if partial else _ALL
        size = lib.llama_state_seq_get_size_ext(self._context, index, flags)
        if index in self._copy_targets or not size:
            return None
        data = np.empty(size, np.uint8)
        written = lib.llama_state_seq_get_data_ext(self._context, _pointer(data), size, index, flags)
        if written != size or self._head is None:
            return data if written == size else None
        position = short.memory_seq_pos_max(self._memory, index) + 1
        return np.concatenate((data, self._head.export(index, position, partial=partial)))

    def restore(self, index: int, data: KvBytes, *, partial: bool = False) -> bool:
        """Replaces the sequence's KV. After False it is undefined: clear it."""
        if not self._is_writable(index):
            return False
        flags = _PARTIAL if partial else _ALL
        if self._head is not None:
            data = data[: data.nbytes - self._head.restore(index, data, partial=partial)]
        read = lib.llama_state_seq_set_data_ext(self._context, _pointer(data), data.nbytes, index, flags)
        return bool(read == data.nbytes)

    @property
    def can_rewind_copies(self) -> bool:
        """Whether exported KV can be cut after it is restored: it lacks what is behind a sliding window."""
        return self.can_rewind and not self._n_swa

    def has_data(self, index: int) -> bool:
        """A target of stream copies is empty until llama.cpp runs them."""
        return index not in self._copy_targets

    def _is_writable(self, index: int) -> bool:
        return index not in self._copy_targets and index not in self._copy_sources

    # --- from another sequence ----------------------------------------------------------------------------------------

    def copy_methods(self, source: KvMemory, index: int, target: int) -> list[CopyMethod]:
        """How KV can be copied from sequence `index` of the source. A stream copy of a sliding window would undo a
        checkpoint that is restored on it; a state copy omits what is behind a window, so it cannot be cut."""
        methods: list[CopyMethod] = ["stream"] if source is self and self.can_rewind else []
        can_cut = not (self.can_rewind and self._n_swa)
        if source.layout == self.layout and can_cut and self._is_writable(target) and source.has_data(index):
            methods.append("state")
        return methods

    def copy(self, source: KvMemory, index: int, target: int, method: CopyMethod) -> bool:
        """Copies all of the source's sequence `index` to `target`; the source stays as it is."""
        if method == "state":
            return self._copy_state(source, index, target)
        # llama.cpp asserts that a copy between streams is not partial: copy all, then cut. In a pool no byte moves.
        self.clear(target)
        short.memory_seq_cp(self._memory, index, target, -1, -1)
        if self._head is not None:
            self._head.copy(index, target, short.memory_seq_pos_max(self._memory, index) + 1)
        if not self.layout.unified:
            self._copy_sources.add(index)
            self._copy_targets.add(target)
        return True

    @property
    def can_exchange(self) -> bool:
        """Exported KV lacks what is behind a sliding window: a sequence that could be cut could not be any more."""
        return self.can_rewind_copies or not self.can_rewind

    def exchange(self, index: int, other: int) -> bool:
        """Two sequences get each other's KV. False: nothing has changed; None of it is left if llama.cpp refuses."""
        if not (self.can_exchange and self._is_writable(index) and self._is_writable(other)):
            return False
        states = self.export(index), self.export(other)
        for target, state in zip((other, index), states, strict=True):
            self.clear(target)
            if state is not None and not self.restore(target, state):
                raise Internal("llama.cpp refused KV that it had exported")
        return True

    def _copy_state(self, source: KvMemory, index: int, target: int) -> bool:
        started = time.perf_counter()
        data = source.export(index)
        if data is None or not self.restore(target, data):
            return False
        self.costs.byte = (self.costs.byte + (time.perf_counter() - started) / (2 * data.nbytes)) / 2
        return True

    # --- with each decode ---------------------------------------------------------------------------------------------

    def after_decode(self, rows: int, started: float) -> None:
        """Call it after each decode; `rows` if it read prompts only, else 0. The fastest of the first few decodes
        counts: others may have used the machine at the same time."""
        self._copy_sources.clear()
        self._copy_targets.clear()
        if rows < _MIN_ROWS or self.costs.decodes >= _MEASUREMENTS:
            return
        lib.llama_synchronize(self._context)  # a GPU may still be computing
        per_row = (time.perf_counter() - started) / rows
        self.costs.token = min(self.costs.token, per_row) if self.costs.decodes else per_row
        self.costs.decodes += 1


def _pointer(data: KvBytes) -> Any:
    return data.ctypes.data_as(POINTER(c_uint8))
