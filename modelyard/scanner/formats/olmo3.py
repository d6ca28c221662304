"""Calls as Python, one a line, between tags: Olmo 3.

    <think>I need the weather.</think>
    I will look.
    <function_calls>
    get_weather(city="Paris", days=3)
    get_time()
    </function_calls>

Values are Python's literals or JSON's (`true`, `null`).
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.pythonic_calls import pythonic_calls

FORMAT = OutputFormat(
    name="olmo3",
    regions=regions(THINK, {"<function_calls>": StartReader(pythonic_calls, ("</function_calls>",))}),
    hidden=("</function_calls>", "<|im_end|>"),
    stops=("<|im_end|>", "<|endoftext|>"),
    turn=("<|im_start|>assistant",),
    template=(("<function_calls>", "<functions>"),),
    names=("olmo-3", "olmo3"),
)
