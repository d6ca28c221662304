"""JSON decoding of request bodies with errors that name the field, and JSON encoding."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest

T = TypeVar("T")
JsonObject = dict[str, Any]

_PATH = re.compile(r" - at `(?:key` in `)?(?P<path>[^`]+)`$")
_TOO_LONG = re.compile(r"Expected `(?P<type>\w+)` of length <= (?P<limit>\d+)")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
# Line breaks of `str.splitlines` that JSON allows in a string. The SDKs of Ollama and Google split streams
# with it. The others are control characters, which are always escaped.
_LINE_BREAKS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
_encode = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    """JSON on one line, whatever the client takes for the end of a line."""
    data = _encode(value)
    if not data.isascii() and (b"\xe2\x80" in data or b"\xc2\x85" in data):
        for char, escaped in _LINE_BREAKS:
            data = data.replace(char, escaped)
    return data


def dumps(value: Any) -> str:
    return _encode(value).decode()


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body. Invalid JSON or a wrong type raises InvalidRequest with the path of the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_type(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {_reason(body, error)}", code="invalid_json") from None


def _invalid_type(message: str) -> InvalidRequest:
    found = _PATH.search(message)
    if not found:
        return InvalidRequest(f"body: {message}", code="invalid_type")
    param = found["path"].removeprefix("$").lstrip(".")
    if too_long := _TOO_LONG.match(message):
        unit = "characters" if too_long["type"] == "str" else "entries"
        return limits.too_long(param, int(too_long["limit"]), unit)
    return InvalidRequest(f"{param or 'body'}: {_PATH.sub('', message)}", param=param or None, code="invalid_type")


def _reason(body: bytes, error: Exception) -> str:
    """msgspec calls an empty body and a lone surrogate «truncated»; name them instead."""
    if not body.strip():
        return "it is empty"
    if found := _LONE_SURROGATE.search(body):
        return f"{found[0].decode()} is half of a surrogate pair (byte {found.start()})"
    return str(error)


def is_json_object(text: str) -> bool:
    """Whether the text is one complete JSON object."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True
