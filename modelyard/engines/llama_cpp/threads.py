"""One pool of CPU threads for all contexts of a model: made once, not for every step, and never two sets at a time.

llama.cpp makes and ends its threads with each graph where nobody gives it a pool. The engine's one thread computes one
context at a time, so all of them can share one.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_bool, c_int, c_uint32, c_void_p
from typing import Any

from modelyard.engines.llama_cpp.binding import lib

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


class Pool:
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
