"""The loaded libllama for the engine's modules, and the thread pool that all contexts of a model share.

`lib` releases the GIL, `short` and `waiting` are explained in `modelyard/libllama.py`.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_void_p
from typing import Any

from modelyard import libllama
from modelyard.libllama import ggml_threadpool_params

log = logging.getLogger(__name__)

lib: Any = libllama.load()
short: Any = lib.short
waiting: Any = lib.waiting
LogitBias = libllama.llama_logit_bias

# How long threads spin for the next graph before they sleep, of 100. Not at all: between two steps the gateway needs
# the core, and waking a thread takes microseconds. On two busy cores 10 and more made steps several times as long.
_POLL = 0


class ThreadPool:
    """One pool of CPU threads for all contexts of a model. Close it after them.

    Without a pool llama.cpp starts and ends threads with each graph. The engine computes one context at a time, so all
    contexts share one pool. If the CPU backend has no such functions, this does nothing.
    """

    def __init__(self, threads: int) -> None:
        self._raw: int | None = None
        self._free: Any = None
        if threads <= 1:
            return
        create = lib.cpu_function("ggml_threadpool_new", c_void_p, POINTER(ggml_threadpool_params))
        self._free = lib.cpu_function("ggml_threadpool_free", None, c_void_p)
        if create is None or self._free is None:
            log.info("llama.cpp starts its own threads for each step: its CPU backend has no thread pools")
            return
        params = ggml_threadpool_params()
        lib.ggml_threadpool_params_init(ctypes.byref(params), threads)
        params.poll = _POLL
        self._raw = create(ctypes.byref(params))

    @property
    def is_shared(self) -> bool:
        return self._raw is not None

    def attach(self, context: Any) -> None:
        if self._raw is not None:
            lib.llama_attach_threadpool(context, self._raw, self._raw)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            self._free(raw)
