"""Why a llama-server ended, out of the last lines that it wrote. Pure.

0.00.077.094 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STAMP = re.compile(r"^\d+\.\d+\.\d+\.\d+ (?P<level>[A-Z]) ")
_TROUBLE = re.compile(r"error|fail|cannot|couldn't|unable|invalid|abort|assert|out of memory|not found", re.IGNORECASE)
_SUMMARY = re.compile(r"exiting due to|to show complete usage|cleaning up before exit")
_MOST = 3


def reason(lines: Sequence[str]) -> str:
    """The first things that went wrong, each told once: what follows them is usually their consequence. May be empty:
    a program that is killed has nothing to say."""
    troubles = (_bare(line) for line in lines if _is_trouble(line))
    return "; ".join(list(dict.fromkeys(troubles))[:_MOST])


def _is_trouble(line: str) -> bool:
    if not line.strip() or _SUMMARY.search(line):
        return False
    stamp = _STAMP.match(line)
    return stamp["level"] in "EF" if stamp else bool(_TROUBLE.search(line))


def _bare(line: str) -> str:
    return re.sub(r"\s+", " ", _STAMP.sub("", line)).strip()
