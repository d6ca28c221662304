"""Llama 4: a list of Python calls, between tokens or with nothing around it.

    [get_weather(city="Paris", days=3), now()]
    Let me look.<|python_start|>[get_weather(city="Paris")]<|python_end|>

After the token the brackets may be missing, and some of the models write JSON there.
"""

from __future__ import annotations

from functools import partial

from modelyard.core.output_format import OutputFormat, StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._thinking import THINK, regions
from modelyard.scanner.json_calls import json_calls
from modelyard.scanner.lexer import Steps, Tape
from modelyard.scanner.pythonic_calls import listed_calls

_START, _END = "<|python_start|>", "<|python_end|>"


def _between(tape: Tape, calls: Calls) -> Steps[str | None]:
    """After `<|python_start|>`."""
    yield from tape.space()
    if (yield from tape.peek()) == "[":
        tape.skip(1)
        yield from tape.space()
    if (yield from tape.peek()) == "{":
        return (yield from json_calls(tape, calls))
    return (yield from listed_calls(tape, calls))


FORMAT = OutputFormat(
    name="llama4_pythonic",
    regions=regions(
        THINK,
        {_START: StartReader(_between, (_END,)), "[": StartReader(partial(listed_calls, strict=True), naked=True)},
    ),
    hidden=(_END, "</think>", "<|eot|>", "<|eom|>"),
    stops=("<|eot|>", "<|eom|>"),
    turn=("<|header_start|>assistant<|header_end|>",),
    template=(("<|header_start|>", "<|header_end|>"), (_START,)),
    names=("llama-4", "llama4"),
)
