from __future__ import annotations

from tests.scanner.writers import Calls
from tests.scanner.writers._objects import objects, thought


def write(reasoning: str, text: str, calls: Calls) -> str:
    actions = (f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects(calls, arguments="parameters"))
    return thought(reasoning) + text + "\n".join(actions)
