"""The output format `aside`: reasoning stands between double brackets.

((The user greets me.)) Hello!
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, SwitchRegion

FORMAT = OutputFormat(
    name="aside",
    regions={
        "text": Region("text", {"((": SwitchRegion("aside")}),
        "aside": Region("thinking", {"))": SwitchRegion("text")}),
    },
    name_hints=("aside",),
)
