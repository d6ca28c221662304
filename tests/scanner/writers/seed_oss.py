from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._functions import function

_LINE = "\n"


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"\n<seed:think>{reasoning}</seed:think>" if reasoning else ""
    given = (f"\n<seed:tool_call>\n{function(t.name, arguments, '')}\n</seed:tool_call>" for t, arguments in calls)
    return f"{thought}\n{text}{_LINE if calls else ''}{''.join(given)}<seed:eos>"
