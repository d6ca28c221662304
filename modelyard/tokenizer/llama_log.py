"""llama.cpp's log: nothing reaches the terminal, and errors are kept for the caller.

llama.cpp reports why a file is bad only through its log callback, of which a process has one. The callback runs on the
calling thread, so errors are kept per thread and concurrent loads do not mix theirs.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from typing import Any

from modelyard import libllama

log = logging.getLogger("modelyard.llama_cpp")
lib = libllama.load()

_WARNING, _ERROR, _CONTINUED = 3, 4, 5  # GGML_LOG_LEVEL_…
_FUNCTION = re.compile(r"^\w+: (error loading model: )?")  # the C function that logs


class _ThreadErrors(threading.local):
    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=50)


_errors = _ThreadErrors()


def _on_log(level: int, text: bytes | None, _: Any) -> None:
    if level < _WARNING or level == _CONTINUED or not text:
        return
    line = text.decode("utf-8", "replace").strip()
    log.debug("%s", line)
    if level == _ERROR:
        _errors.lines.append(line)


callback: Any = lib.llama_log_callback(_on_log)  # C keeps its address


def clear() -> None:
    """Forget this thread's errors. The callback is set each time: whoever shares the process may have set another."""
    lib.llama_log_set(callback, None)
    _errors.lines.clear()


def first_error() -> str:
    """This thread's first error since `clear`. It names the cause; the later ones only report that a caller failed."""
    first = _errors.lines[0] if _errors.lines else "llama.cpp gave no reason"
    return _FUNCTION.sub("", first)


clear()
