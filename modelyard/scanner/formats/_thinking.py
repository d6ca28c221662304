"""Reasoning between tags, as most families write it."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.output_format import Region, StartReader, SwitchRegion

THINK = (("<think>", "</think>"),)
EVERY_TAG = (
    *THINK,
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)


def regions(pairs: tuple[tuple[str, str], ...], calls: Mapping[str, StartReader] | None = None) -> dict[str, Region]:
    """Visible text and one region a pair of tags; calls are honoured in all of them."""
    marks = dict(calls or {})
    found = {"text": Region("text", {**{tag: SwitchRegion(tag) for tag, _ in pairs}, **marks})}
    for tag, close in pairs:
        found[tag] = Region("thinking", {close: SwitchRegion("text"), **marks})
    return found
