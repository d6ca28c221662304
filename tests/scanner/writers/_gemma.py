"""Gemma's notation: bare keys, and the family's own quotes, which no text can hold."""

from __future__ import annotations

import json
from typing import Any

from tests.scanner.writers import Unwritable


def value(given: Any, quote: str) -> str:
    if isinstance(given, str):
        if quote in given:
            raise Unwritable(quote)
        return quote + given + quote
    if isinstance(given, dict):
        return f"{{{','.join(f'{value(k, quote)}:{value(v, quote)}' for k, v in given.items())}}}"
    if isinstance(given, list):
        return f"[{','.join(value(v, quote) for v in given)}]"
    return json.dumps(given)


def call(name: str, arguments: dict[str, Any], quote: str) -> str:
    return f"call:{name}{{{','.join(f'{k}:{value(v, quote)}' for k, v in arguments.items())}}}"
