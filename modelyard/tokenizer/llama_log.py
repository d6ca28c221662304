"""What llama.cpp says while it works: never to the terminal, and its complaints to whoever asked for the work.

llama.cpp tells why a file is bad only through its log callback, which it has one of a process. The callback runs on the
thread that called in, so each thread hears its own complaints and two loads at a time do not mix theirs.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from typing import Any

from llama_cpp import llama_cpp as lib

log = logging.getLogger("modelyard.llama_cpp")

_WARNING, _ERROR, _CONTINUED = 3, 4, 5  # GGML_LOG_LEVEL_…
_SPEAKER = re.compile(r"^\w+: (error loading model: )?")  # the C function that complains


class _Heard(threading.local):
    """A thread's own complaints, oldest first."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=50)


_heard = _Heard()


def _listen(level: int, text: bytes | None, _: Any) -> None:
    if level < _WARNING or level == _CONTINUED or not text:
        return
    line = text.decode("utf-8", "replace").strip()
    log.debug("%s", line)
    if level == _ERROR:
        _heard.lines.append(line)


_listener: Any = lib.llama_log_callback(_listen)  # held for good: C keeps its address


def forget() -> None:
    """Before a piece of work: what is heard from now on is about it. The binding brings a callback of its own that
    prints, so ours is set each time."""
    lib.llama_log_set(_listener, None)
    _heard.lines.clear()


def reason() -> str:
    """Why what this thread did last went wrong, in llama.cpp's own words: the first complaint names the cause, those
    after it only say that somebody above failed, too."""
    first = _heard.lines[0] if _heard.lines else "llama.cpp gave no reason"
    return _SPEAKER.sub("", first)


forget()
