"""Nemotron 3: the calls of Qwen 3 Coder, after reasoning that the prompt has opened.

I need the weather.
</think>
<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from msgspec.structs import replace

from modelyard.scanner.formats import qwen3_coder

FORMAT = replace(
    qwen3_coder.FORMAT,
    name="nemotron_v3",
    template=(("<function=", "<parameter=", "truncate_history_thinking"),),
    names=("nemotron-3", "nemotron3", "nemotron_3"),
)
