"""DeepSeek V4: as V3.2, but the block is called `tool_calls`. An alias: one reader reads both.

    I need the weather.</think>Let me look.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls><｜end▁of▁sentence｜>

The prompt ends with `<think>`, or with `</think>` alone where there shall be no reasoning.
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.scanner.formats import deepseek_v32
from modelyard.scanner.formats._dsml import DSML

FORMAT = replace(
    deepseek_v32.FORMAT,
    name="deepseek_v4",
    template=((DSML, "tool_calls>"),),
    names=("deepseek-v4", "deepseek_v4"),
)
