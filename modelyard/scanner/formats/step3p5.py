"""Step 3.5: the calls of Qwen 3 Coder, after reasoning that the prompt has opened.

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
    name="step3p5",
    template=(("<function=", "<parameter=", "<|im_start|>tool_response"),),
    names=("step-3.5", "step3.5", "step3p5", "step-3p5"),
)
