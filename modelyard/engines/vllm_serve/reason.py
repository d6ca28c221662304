"""Why a `vllm serve` ended, and how far it has come, out of the last lines that it wrote. Pure.

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
_VALIDATED = re.compile(r" \[type=(?:value|assertion)_error,.*")  # all settings once more
_CONSEQUENCE = re.compile(
    r"validation errors? for|See root cause above|died unexpectedly|EngineDeadError|Failed core proc"
)
_MOST, _TAIL = 3, 5
_WIDTH = 400

# what a line says of the way to readiness: (how far, in our words)
_STAGES = (
    ("Initializing a V1 LLM engine", 0.1, "starting the engine"),
    ("Starting to load model", 0.2, "loading the weights"),
    ("Loading weights took", 0.6, "making room for the KV cache"),
    ("Dynamo bytecode transform", 0.65, "compiling"),
    ("KV cache size", 0.7, "making room for the KV cache"),
    ("Capturing CUDA graph", 0.75, "capturing CUDA graphs"),
    ("Starting vLLM", 0.9, "starting its HTTP side"),
)
_SHARDS = re.compile(r"checkpoint shards: +(\d+)% Completed")


def reason(lines: Sequence[str]) -> str:
    """The first things that went wrong, each told once: what follows them is usually their consequence. Where nothing
    looks like a cause, the last lines that are no mere notes. May be empty: who is killed has nothing to say."""
    bare = [_bare(line) for line in lines if not _NOTE.search(line)]
    causes = [line for line in bare if _CAUSE.search(line)]
    roots = [line for line in causes if not _CONSEQUENCE.search(line)] or causes
    if roots:
        return "; ".join(list(dict.fromkeys(roots))[:_MOST])
    return " | ".join([line for line in bare if line][-_TAIL:])


def _bare(line: str) -> str:
    told = _VALIDATED.sub("", _STAMP.sub("", line.rpartition("\r")[2]))
    return re.sub(r"\s+", " ", told).strip()[:_WIDTH]


def stage(lines: Sequence[str]) -> tuple[float, str]:
    """How far it has come, and what it does."""
    far, what = 0.05, "starting vllm serve"
    for line in lines:
        if shards := _SHARDS.search(line.rpartition("\r")[2]):
            far, what = max((far, what), (0.2 + 0.4 * int(shards[1]) / 100, "loading the weights"))
        for mark, at, words in _STAGES:
            if at > far and mark in line:
                far, what = at, words
    return far, what
