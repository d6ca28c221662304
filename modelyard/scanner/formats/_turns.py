"""Markers that end a message: the line breaks before them are theirs, and so are those after."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.output_format import Region, SwitchRegion


def ended(regions: Mapping[str, Region], ends: tuple[str, ...]) -> dict[str, Region]:
    """The same regions; each of these markers leads out of all of them."""
    out = {end: SwitchRegion("text") for end in ends}
    return {name: Region(region.kind, {**region.marks, **out}) for name, region in regions.items()}
