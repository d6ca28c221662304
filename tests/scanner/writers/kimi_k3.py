from __future__ import annotations

from typing import Any

from tests.scanner.writers import Calls, raw

_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def write(reasoning: str, text: str, calls: Calls) -> str:
    thought, answer = _tag("think", reasoning), _tag("response", text)
    given = "".join(
        _tag("call", "".join(_argument(k, v) for k, v in arguments.items()), f' tool="{tool.name}" index="{i}"')
        for i, (tool, arguments) in enumerate(calls, 1)
    )
    return thought + answer + (_tag("tools", given) if given else "") + "<|close|>message<|sep|><|end_of_msg|>"


def _argument(key: str, value: Any) -> str:
    return _tag("argument", raw(value), f' key="{key}" type="{_KINDS[type(value)]}"')


def _tag(name: str, inside: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{inside}<|close|>{name}<|sep|>"
