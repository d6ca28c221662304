"""The KV of a context's sequences: cut, cleared, copied, and as bytes taken out and put in.

Only whole, verified prefixes come here: which tokens they are is the caller's to know.
"""

from __future__ import annotations

import time
from ctypes import POINTER, c_uint8
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.engine import CacheInfo
from modelyard.engines.llama_cpp import loading, sequences
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.loading import uses_gpu
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequences import CopyCosts, CopyMethod

KvBytes = npt.NDArray[np.uint8]

_ALL, _PARTIAL = 0, 1  # LLAMA_STATE_SEQ_FLAGS_*: the latter leaves out what a cut can restore
_ENOUGH = 8  # measurements of a decode's speed
_ROWS = 8  # fewer are read at the price of one


class KvLayout(Struct, frozen=True):
    """What two contexts must have in common for KV of one to mean the same in the other."""

    type_k: str
    type_v: str
    flash_attn: str
    streams: int
    swa_full: bool


def kv_layout(info: CacheInfo, options: Options) -> KvLayout:
    return KvLayout(
        info.type_k.lower(),
        info.type_v.lower(),
        loading.flash_attention_mode(options.of(info), gpu=uses_gpu(options)),
        info.parallel,
        options.swa_full,
    )


class KvMemory:
    """Of one context. Belongs to the engine's thread."""

    def __init__(self, raw: Any, window: int, layout: KvLayout) -> None:
        self.layout, self.window = layout, window
        self._raw, self._memory = raw, lib.llama_get_memory(raw)
        model = lib.llama_get_model(raw)
        self._n_swa: int = lib.llama_model_n_swa(model)
        self._only_forward: bool = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        self.costs = CopyCosts()
        self._measured = 0
        # llama.cpp makes a stream copy with the next decode: until then the one has no data yet, and what is put into
        # either would be copied or written over.
        self._targets: set[int] = set()
        self._sources: set[int] = set()

    @property
    def can_cut(self) -> bool:
        """False where a sequence goes back only by checkpoints."""
        return not self._only_forward and (not self._n_swa or self.layout.swa_full)

    # --- in place ---------------------------------------------------------------------------------------------------

    def clear(self, index: int) -> None:
        short.memory_seq_rm(self._memory, index, -1, -1)

    def cut(self, index: int, keep: int, held: int) -> bool:
        """From `held` tokens to the first `keep`; False where the model cannot go back so far. llama.cpp says yes to a
        cut although what a sliding window needs is gone: look at what is really there."""
        if keep <= 0 or not short.memory_seq_rm(self._memory, index, keep, -1):
            return False
        newest = short.memory_seq_pos_max(self._memory, index)
        if keep == held:
            return bool(newest == keep - 1)
        oldest = short.memory_seq_pos_min(self._memory, index)
        return sequences.is_intact(oldest, newest, keep, n_swa=self._n_swa, only_forward=self._only_forward)

    # --- as bytes ---------------------------------------------------------------------------------------------------

    def size(self, index: int) -> int:
        return int(lib.llama_state_seq_get_size_ext(self._raw, index, _ALL))

    def take(self, index: int, *, partial: bool = False) -> KvBytes | None:
        """A copy; None where llama.cpp cannot give it, or not before the next decode."""
        flags = _PARTIAL if partial else _ALL
        size = lib.llama_state_seq_get_size_ext(self._raw, index, flags)
        if index in self._targets or not size:
            return None
        data = np.empty(size, np.uint8)
        return data if lib.llama_state_seq_get_data_ext(self._raw, _bytes(data), size, index, flags) == size else None

    def put(self, index: int, data: KvBytes, *, partial: bool = False) -> bool:
        """Instead of what the sequence holds; after a False that is undefined, so clear it."""
        if not self._can_put(index):
            return False
        flags = _PARTIAL if partial else _ALL
        return bool(lib.llama_state_seq_set_data_ext(self._raw, _bytes(data), data.nbytes, index, flags) == data.nbytes)

    @property
    def can_cut_copies(self) -> bool:
        """Whether what was taken out can be cut after it was put in: it lacks what lies behind a sliding window."""
        return self.can_cut and not self._n_swa

    def _can_put(self, index: int) -> bool:
        return index not in self._targets and index not in self._sources

    # --- from another sequence --------------------------------------------------------------------------------------

    def ways(self, source: KvMemory, index: int, target: int) -> list[CopyMethod]:
        """By which KV can come from a sequence there. A stream copy of a window would undo a checkpoint put on it; a
        state copy leaves out what lies behind a window, so it cannot be cut afterwards."""
        found: list[CopyMethod] = ["stream"] if source is self and self.can_cut else []
        cuts = not (self.can_cut and self._n_swa)
        if source.layout == self.layout and cuts and self._can_put(target) and index not in source._targets:
            found.append("state")
        return found

    def copy(self, source: KvMemory, index: int, target: int, way: CopyMethod) -> bool:
        """All that sequence `index` there holds into `target` here; the source stays as it is."""
        if way == "state":
            return self._copy_state(source, index, target)
        # A partial copy between streams is an assertion in llama.cpp: copy all, then cut.
        self.clear(target)
        short.memory_seq_cp(self._memory, index, target, -1, -1)
        self._sources.add(index)
        self._targets.add(target)
        return True

    def _copy_state(self, source: KvMemory, index: int, target: int) -> bool:
        began = time.perf_counter()
        data = source.take(index)
        if data is None or not self.put(target, data):
            return False
        self.costs.byte = (self.costs.byte + (time.perf_counter() - began) / (2 * data.nbytes)) / 2
        return True

    # --- with each decode -------------------------------------------------------------------------------------------

    def decoded(self, rows: int, began: float) -> None:
        """A decode ran that read `rows` rows of prompts, and no others. The fastest of the first few counts: others
        may have wanted the machine at the same time."""
        self._sources.clear()
        self._targets.clear()
        if rows < _ROWS or self._measured >= _ENOUGH:
            return
        lib.llama_synchronize(self._raw)  # a GPU may still be at it
        took = (time.perf_counter() - began) / rows
        self.costs.token = min(self.costs.token, took) if self._measured else took
        self._measured += 1


def _bytes(data: KvBytes) -> Any:
    return data.ctypes.data_as(POINTER(c_uint8))
