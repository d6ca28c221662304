"""What several families share: how a function may be called, and reasoning that a bare closing tag may end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelyard.core.output_format import Region, StartReader, SwitchRegion
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.lexer import Unreadable

_NAME = re.compile(r"\w[\w-]*(?:[.:/][\w-]+)*")
NAME_LIMIT = 128
DEEPSEEK_TURN_END = "<｜end▁of▁sentence｜>"
DEEPSEEK_ROLES = ("<｜User｜>", "<｜Assistant｜>")


def function_name(raw: str) -> str:
    """Prose that stands where a name should is unreadable."""
    name = raw.strip().strip("\"'")
    if not _NAME.fullmatch(name):
        raise Unreadable(f"{name[:20]!r} is no name")
    return name


def closable(calls: Mapping[str, StartReader], pairs: tuple[tuple[str, str], ...] = THINK) -> dict[str, Region]:
    """Regions of families that write the closing tag alone where there is nothing to think about."""
    found = regions(pairs, calls)
    bare = {close: SwitchRegion("text") for _, close in pairs}
    return found | {"text": Region("text", {**found["text"].marks, **bare})}
