"""JSON at the border: msgspec's verdict on odd input, told in a sentence that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from modelyard.core.errors import InvalidRequest

T = TypeVar("T")

_AT = re.compile(r" - at `(?P<path>[^`]+)`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_encoder = msgspec.json.Encoder()


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The decoded body, or InvalidRequest with the path of the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {_why(body, error)}", code="invalid_json") from None


def _why(body: bytes, error: Exception) -> str:
    """The library calls both of these truncated."""
    if not body.strip():
        return "it is empty"
    if found := _LONE_SURROGATE.search(body):
        return f"{found[0].decode()} is half of a surrogate pair (byte {found.start()})"
    return str(error)


def _invalid(message: str) -> InvalidRequest:
    found = _AT.search(message)
    if not found:
        return InvalidRequest(f"body: {message}", code="invalid_type")
    param = found["path"].removeprefix("$").lstrip(".")
    return InvalidRequest(f"{param or 'body'}: {_AT.sub('', message)}", param=param or None, code="invalid_type")


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def dumps(value: Any) -> str:
    return _encoder.encode(value).decode()
