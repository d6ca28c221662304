"""libllama through ctypes, in two views: calls that may take long give the GIL up, short ones keep it.

A call that gives up the GIL waits up to a switch interval to get it back, so only `decode`, loading and state copies
are worth it; sampling, logits and memory operations go through `PyDLL`, which keeps it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

lib: Any = llama_cpp

IntArray = npt.NDArray[np.int32]

# name → (result, arguments) of the short calls
_SHORT: dict[str, tuple[Any, list[Any]]] = {
    "llama_get_logits": (c_void_p, [c_void_p]),
    "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_free": (None, [c_void_p]),
    "llama_sampler_chain_add": (None, [c_void_p, c_void_p]),
    "llama_sampler_init_greedy": (c_void_p, []),
    "llama_sampler_init_dist": (c_void_p, [c_uint32]),
    "llama_sampler_init_top_k": (c_void_p, [c_int32]),
    "llama_sampler_init_top_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_min_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_typical": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_temp": (c_void_p, [c_float]),
    "llama_sampler_init_xtc": (c_void_p, [c_float, c_float, c_size_t, c_uint32]),
    "llama_sampler_init_mirostat": (c_void_p, [c_int32, c_uint32, c_float, c_float, c_int32]),
    "llama_sampler_init_mirostat_v2": (c_void_p, [c_uint32, c_float, c_float]),
    "llama_sampler_init_penalties": (c_void_p, [c_int32, c_int32, c_float, c_float, c_float]),
    "llama_sampler_init_dry": (
        c_void_p,
        [c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t],
    ),
    "llama_sampler_init_logit_bias": (c_void_p, [c_int32, c_int32, c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [c_void_p, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
}


class _Short:
    """The short calls, by their names in llama.h."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)
        for name, (result, arguments) in _SHORT.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is none of the short calls")


short: Any = _Short(lib._lib._name)


class _Waiting:
    """The wait for a GPU, without the GIL. To ask for its logits is to wait for them: one call instead of two."""

    def __init__(self, path: str) -> None:
        self.get_logits = ctypes.CDLL(path).llama_get_logits
        self.get_logits.restype, self.get_logits.argtypes = _SHORT["llama_get_logits"]


waiting = _Waiting(lib._lib._name)


class LogitBias(ctypes.Structure):
    _fields_ = (("token", c_int32), ("bias", c_float))


class DecodingJob(Protocol):
    """A job that says one token a step."""

    done: int

    @property
    def newest(self) -> int: ...


class LlamaBatch:
    """A `llama_batch` whose arrays are numpy's: filled by slices, never row by row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token: IntArray = np.zeros(capacity, np.int32)
        self.pos: IntArray = np.zeros(capacity, np.int32)
        self.seq: IntArray = np.zeros(capacity, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._ones: IntArray = np.ones(capacity, np.int32)
        address = self.seq.ctypes.data
        self._pointers = np.arange(address, address + 4 * capacity, 4, dtype=np.uint64)
        self.raw = lib.llama_batch()
        self.raw.token = self.token.ctypes.data_as(POINTER(c_int32))
        self.raw.pos = self.pos.ctypes.data_as(POINTER(c_int32))
        self.raw.n_seq_id = self._ones.ctypes.data_as(POINTER(c_int32))
        self.raw.seq_id = self._pointers.ctypes.data_as(POINTER(POINTER(c_int32)))
        self.raw.logits = self.output.ctypes.data_as(POINTER(ctypes.c_int8))

        self._speakers: object = None  # whose rows stand in it
        self._newest: Any = None  # their tokens: ctypes takes a short list in a fifth of numpy's time
        self._at = self.pos[:0]

    def clear(self) -> None:
        self.raw.n_tokens = 0
        self._speakers = None

    def speak(self, jobs: Mapping[int, DecodingJob]) -> None:
        """One row a sequence, in order; of the same jobs as before only what has changed is written."""
        count = len(jobs)
        if jobs is not self._speakers:
            self.seq[:count], self.output[:count] = list(jobs), 1
            self.raw.n_tokens, self._speakers = count, jobs
            self._newest, self._at = (c_int32 * count).from_address(self.token.ctypes.data), self.pos[:count]
        self._newest[:] = [job.newest for job in jobs.values()]
        self._at[:] = [job.done for job in jobs.values()]

    def go_on(self, tokens: Sequence[int]) -> None:
        """Those that stand in it speak again, a token each, where they have been moved on to."""
        self._newest[:] = tokens

    def move_on(self) -> None:
        """A decode has taken what stands in it: all that a next one like it can know before its tokens."""
        self._at += 1

    @property
    def size(self) -> int:
        return int(self.raw.n_tokens)

    def add_one(self, token: int, position: int, sequence: int) -> int:
        """A stream's row: what `add` does, without the slices that cost ten times as much as the numbers."""
        at = self.raw.n_tokens
        self.token[at], self.pos[at], self.seq[at], self.output[at] = token, position, sequence, 1
        self.raw.n_tokens = at + 1
        return int(at)

    def add(self, ids: IntArray, start: int, sequence: int, *, last: bool, guessed: int = 0) -> int:
        """Rows of one sequence; `last` asks for logits after the last of them, and before each that is only guessed.
        The first row that has them."""
        at, end = self.size, self.size + len(ids)
        self.token[at:end] = ids
        self.pos[at:end] = np.arange(start, start + len(ids), dtype=np.int32)
        self.seq[at:end] = sequence
        self.output[at:end] = 0
        first = end - 1 - guessed
        self.output[first:end] = last
        self.raw.n_tokens = end
        return first


# One pool of CPU threads for all contexts of a model: made once, not for every step, and never two sets at a time.
#
# llama.cpp makes and ends its threads with each graph where nobody gives it a pool. The engine's one thread computes one
# context at a time, so all of them can share one.

log = logging.getLogger(__name__)

_MAX_THREADS = 512  # GGML_MAX_N_THREADS
# How long threads spin for the next graph before they sleep, of 100. Not at all: between two steps the gateway wants
# the core, and to wake a thread takes microseconds. On two busy cores 10 and more made steps several times as long.
_POLL = 0


class _Params(Structure):
    """ggml_threadpool_params, as ggml.h has it."""

    _fields_ = (
        ("cpumask", c_bool * _MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class ThreadPool:
    """Attach it to contexts; close it when they are gone. Where the library has no such thing it does nothing."""

    def __init__(self, threads: int, poll: int = _POLL) -> None:
        self._calls = _calls() if threads > 1 else None
        self._raw: int | None = None
        if self._calls is not None:
            params = _Params()
            self._calls.init(ctypes.byref(params), threads)
            params.poll = poll
            self._raw = self._calls.new(ctypes.byref(params))

    @property
    def is_shared(self) -> bool:
        return self._raw is not None

    def attach(self, context: Any) -> None:
        if self._calls is not None and self._raw is not None:
            self._calls.attach(context, self._raw, self._raw)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if self._calls is not None and raw is not None:
            self._calls.free(raw)


class _Calls:
    """What llama-cpp-python leaves out. It raises where a name is missing.

    Asked of libllama, which finds them in the libraries that it was linked to. Opening those by their file names would
    load a second copy of each, whose threads know nothing of the first one's tables and buffers.
    """

    def __init__(self) -> None:
        library = lib._lib
        self.init, self.new = library.ggml_threadpool_params_init, library.ggml_threadpool_new
        self.free, self.attach = library.ggml_threadpool_free, library.llama_attach_threadpool
        self.init.restype, self.init.argtypes = None, [POINTER(_Params), c_int]
        self.new.restype, self.new.argtypes = c_void_p, [POINTER(_Params)]
        self.free.restype, self.free.argtypes = None, [c_void_p]
        self.attach.restype, self.attach.argtypes = None, [c_void_p, c_void_p, c_void_p]


def _calls() -> _Calls | None:
    try:
        return _Calls()
    except AttributeError as error:  # a build whose CPU part is a plug-in of its own
        log.info("llama.cpp makes its own threads for each step: %s", error)
        return None
