"""libllama through ctypes: one view whose calls release the GIL, and one whose calls keep it.

A call that releases the GIL waits up to a switch interval to get it back. That is worth it only for long calls: decode,
loading, state copies (`lib`). Sampling, logits and memory operations go through `PyDLL` (`short`).
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

from llama_cpp import llama_cpp

log = logging.getLogger(__name__)

lib: Any = llama_cpp

# name → (result, arguments) of the short calls
_SHORT: dict[str, tuple[Any, list[Any]]] = {
    "llama_get_logits": (c_void_p, [c_void_p]),
    "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_clone": (c_void_p, [c_void_p]),
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
    "llama_sampler_init_dry": (c_void_p, [c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t]),
    "llama_sampler_init_logit_bias": (c_void_p, [c_int32, c_int32, c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [c_void_p, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
}


class _ShortCalls:
    """The short calls by their names in llama.h, without `llama_`."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)
        for name, (result, arguments) in _SHORT.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not one of the short calls")


class _WaitingCalls:
    """Short calls that may take long. `llama_get_logits` waits for the GPU; `llama_sampler_init_dry` compares each
    sequence breaker with the whole vocabulary, 2 to 25 ms for each."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.get_logits, self.sampler_init_dry = library.llama_get_logits, library.llama_sampler_init_dry
        self.get_logits.restype, self.get_logits.argtypes = _SHORT["llama_get_logits"]
        self.sampler_init_dry.restype, self.sampler_init_dry.argtypes = _SHORT["llama_sampler_init_dry"]


short: Any = _ShortCalls(lib._lib._name)
waiting = _WaitingCalls(lib._lib._name)


class LogitBias(Structure):
    _fields_ = (("token", c_int32), ("bias", c_float))


# --- the thread pool --------------------------------------------------------------------------------------------------

_MAX_THREADS = 512  # GGML_MAX_N_THREADS
# How long threads spin for the next graph before they sleep, of 100. Not at all: between two steps the gateway needs
# the core, and waking a thread takes microseconds. On two busy cores 10 and more made steps several times as long.
_POLL = 0


class _ThreadPoolParams(Structure):
    """ggml_threadpool_params of ggml.h."""

    _fields_ = (
        ("cpumask", c_bool * _MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


# Functions that llama-cpp-python does not bind: name → (result, arguments). They are looked up in libllama, which finds
# them in the libraries that it is linked to. Opening those by their file names would load a second copy of each, with
# its own tables and buffers.
_POOL_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_threadpool_params_init": (None, [POINTER(_ThreadPoolParams), c_int]),
    "ggml_threadpool_new": (c_void_p, [POINTER(_ThreadPoolParams)]),
    "ggml_threadpool_free": (None, [c_void_p]),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
}


class ThreadPool:
    """One pool of CPU threads for all contexts of a model. Close it after them.

    Without a pool llama.cpp starts and ends threads with each graph. The engine computes one context at a time, so all
    contexts share one pool. If the library has no such functions, this does nothing.
    """

    def __init__(self, threads: int) -> None:
        self._raw: int | None = None
        if threads <= 1:
            return
        try:
            for name, (result, arguments) in _POOL_CALLS.items():
                function = getattr(lib._lib, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:  # a build whose CPU backend is a plug-in
            log.info("llama.cpp starts its own threads for each step: %s", error)
            return
        params = _ThreadPoolParams()
        lib._lib.ggml_threadpool_params_init(ctypes.byref(params), threads)
        params.poll = _POLL
        self._raw = lib._lib.ggml_threadpool_new(ctypes.byref(params))

    @property
    def is_shared(self) -> bool:
        return self._raw is not None

    def attach(self, context: Any) -> None:
        if self._raw is not None:
            lib._lib.llama_attach_threadpool(context, self._raw, self._raw)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            lib._lib.ggml_threadpool_free(raw)
