"""Pydantic's findings as sentences."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

_LONGEST = 60


def sentence(fault: ErrorDetails, *, secret: bool = False) -> str:
    """What is wrong with a value. A `secret` value is not quoted."""
    match fault["type"]:
        case "missing":
            return "is missing; it has no default."
        case "extra_forbidden":
            return "unknown key."
        case "value_error" | "assertion_error":
            return fault["msg"].split(", ", 1)[-1] + "."
        case _:
            said = fault["msg"].removeprefix("Input should be ")
            got = "" if secret else f", got {_quote(fault['input'])}"
            return f"must be {said}{got}." if said != fault["msg"] else f"{said}{got}."


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
