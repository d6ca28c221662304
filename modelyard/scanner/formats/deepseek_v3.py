"""DeepSeek V3 and V3-0324: text, then calls with fenced JSON; no reasoning of its own.

Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>
"""

from __future__ import annotations

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.formats._common import closable
from modelyard.scanner.formats._deepseek import BEGIN, CALLS, HIDDEN, SEPARATOR, STOPS, TURN

FORMAT = OutputFormat(
    name="deepseek_v3",
    regions=closable(CALLS),
    hidden=HIDDEN,
    stops=STOPS,
    turn=TURN,
    template=((BEGIN, SEPARATOR, "```json"),),
    names=("deepseek-v3", "deepseek_v3", "deepseek-chat"),
)
