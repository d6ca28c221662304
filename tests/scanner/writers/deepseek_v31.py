from __future__ import annotations

import json

from tests.scanner.writers import Calls


def write(reasoning: str, text: str, calls: Calls) -> str:
    given = "".join(
        f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for tool, arguments in calls
    )
    block = f"<｜tool▁calls▁begin｜>{given}<｜tool▁calls▁end｜>" if given else ""
    return f"<think>{reasoning}</think>{text}{block}<｜end▁of▁sentence｜>"
