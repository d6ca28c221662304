"""Olmo 3: calls as Python, one per line, between tags.

    <think>I need the weather.</think>
    I will look.
    <function_calls>
    get_weather(city="Paris", days=3)
    get_time()
    </function_calls>

Values are literals of Python or JSON (`true`, `null`).
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.formats._common import regions
from modelyard.scanner.grammar import CallSyntax, PythonBody
from modelyard.scanner.pythonic_calls import pythonic_calls

FORMATS = (
    OutputFormat(
        name="olmo3",
        regions=regions({"<function_calls>": StartReader(pythonic_calls, ("</function_calls>",))}),
        hidden_markers=("</function_calls>", "<|im_end|>"),
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        turn_starts=("<|im_start|>assistant",),
        template_hints=(("<function_calls>", "<functions>"),),
        name_hints=("olmo-3", "olmo3"),
        calls=CallSyntax(PythonBody(), "<function_calls>\n", "\n</function_calls>"),
    ),
)
