from __future__ import annotations

import json

from tests.scanner.writers import Calls


def fenced(calls: Calls) -> str:
    given = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool.name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for tool, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{given}<｜tool▁calls▁end｜>" if given else ""


def dsml(calls: Calls, block: str) -> str:
    given = "".join(
        f'<｜DSML｜invoke name="{tool.name}">\n{"".join(map(_parameter, arguments.items()))}</｜DSML｜invoke>\n'
        for tool, arguments in calls
    )
    return f"\n\n<｜DSML｜{block}>\n{given}</｜DSML｜{block}>" if given else ""


def _parameter(given: tuple[str, object]) -> str:
    name, value = given
    is_text = isinstance(value, str)
    raw = value if is_text else json.dumps(value)
    return f'<｜DSML｜parameter name="{name}" string="{json.dumps(is_text)}">{raw}</｜DSML｜parameter>\n'
