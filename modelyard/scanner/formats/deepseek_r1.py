"""DeepSeek R1 and its distillations: it always reasons first, then answers or calls with fenced JSON.

    <think>
    I need the weather.
    </think>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>now
    ```json
    {}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>

The template opens the reasoning, or the model does; only after tool results does neither, and the answer comes at
once. Distillations have no tokens for the markers and misspell the first one in several ways.
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat, Region, SwitchRegion
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._deepseek import BEGIN, CALLS, HIDDEN, OUTPUTS, SEPARATOR, STOPS

_MISSPELLED = ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>")
_START = "<think>"  # also without a prompt that says so
_REGIONS = closable(CALLS | dict.fromkeys(_MISSPELLED, CALLS[BEGIN]))
_THOUGHT = {**_REGIONS[_START].marks, _START: SwitchRegion(_START), OUTPUTS[-1]: SwitchRegion("text")}

FORMAT = OutputFormat(
    name="deepseek_r1",
    regions=_REGIONS | {_START: Region("thinking", _THOUGHT)},
    start=_START,
    hidden=HIDDEN,
    stops=STOPS,
    turn=("<｜Assistant｜>",),
    template=((BEGIN, SEPARATOR, "```json", "</think>"),),
    names=("deepseek-r1-0", "deepseek-r1-671b", "deepseek-r1-ud"),
)
