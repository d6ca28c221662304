"""Reads the log of vLLM: the reason of a failure, and the progress of loading.

(EngineCore pid=812) ERROR 11-15 09:51:02 [core.py:1101] ValueError: To serve at least one request with …
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STAMP = re.compile(r"^(\([^()]*pid=\d+\) *)?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_CAUSE = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)): (?P<why>.*\S)"
    r"|^(?:Value error|Assertion failed), |^Input should be "
    r"|^(?:vllm|api_server\.py|usage: vllm).*: error: "
    r"|^Fatal Python error|^cannot start |Segfault encountered|Illegal instruction|[Oo]ut of memory"
)
_NOTE = re.compile(r"^(\([^()]*pid=\d+\) *)?(DEBUG|INFO|WARNING)[ :]|checkpoint shards:|Warning: ")
_SETTINGS_DUMP = re.compile(r" \[type=(?:value|assertion)_error,.*")  # pydantic repeats all settings
_CONSEQUENCE = re.compile(
    r"validation errors? for|See root cause above|died unexpectedly|EngineDeadError|Failed core proc"
)
_MAX_REASONS, _TAIL_LINES, _MAX_WIDTH = 3, 5, 400


def failure_reason(lines: Sequence[str]) -> str:
    """The first causes in the log, without repetitions and consequences. Without a cause, the last lines above the
    level of a warning. Empty if a signal killed the program."""
    texts = [_strip(line) for line in lines if not _NOTE.search(line)]
    causes = [text for text in texts if _CAUSE.search(text)]
    roots = [text for text in causes if not _CONSEQUENCE.search(text)] or causes
    if roots:
        return "; ".join(list(dict.fromkeys(roots))[:_MAX_REASONS])
    return " | ".join([text for text in texts if text][-_TAIL_LINES:])


def _strip(line: str) -> str:
    text = _SETTINGS_DUMP.sub("", _STAMP.sub("", line.rpartition("\r")[2]))
    return re.sub(r"\s+", " ", text).strip()[:_MAX_WIDTH]


# (text in the log, progress, description)
_STAGES = (
    ("Initializing a V1 LLM engine", 0.1, "starting the engine"),
    ("Starting to load model", 0.2, "loading the weights"),
    ("Loading weights took", 0.6, "allocating the KV cache"),
    ("Dynamo bytecode transform", 0.65, "compiling"),
    ("KV cache size", 0.7, "allocating the KV cache"),
    ("Capturing CUDA graph", 0.75, "capturing CUDA graphs"),
    ("Starting vLLM", 0.9, "starting the HTTP server"),
)
_SHARDS = re.compile(r"checkpoint shards: +(\d+)% Completed")


def startup_stage(lines: Sequence[str]) -> tuple[float, str]:
    """The progress of loading, and its description."""
    done, stage = 0.05, "starting vllm serve"
    for line in lines:
        if shards := _SHARDS.search(line.rpartition("\r")[2]):
            done, stage = max((done, stage), (0.2 + 0.4 * int(shards[1]) / 100, "loading the weights"))
        for text, at, description in _STAGES:
            if at > done and text in line:
                done, stage = at, description
    return done, stage
