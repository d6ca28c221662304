"""DeepSeek V3.2: calls in a `function_calls` block of DeepSeek's own markup, reasoning where it was switched on.

    I need the weather.</think>Let me look.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    <｜DSML｜invoke name="now">
    </｜DSML｜invoke>
    </｜DSML｜function_calls><｜end▁of▁sentence｜>

The prompt ends with `<think>`, or with `<think></think>` where there shall be no reasoning.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._dsml import DSML, HIDDEN, INNER, REGIONS, STOPS, TURN

FORMAT = OutputFormat(
    name="deepseek_v32",
    regions=REGIONS,
    hidden=HIDDEN,
    inner=INNER,
    stops=STOPS,
    turn=TURN,
    template=((DSML, "function_calls>"),),
    names=("deepseek-v3.2", "deepseek-v32", "deepseek_v32"),
)
