"""The wire forms of token ids, vectors, prompts and errors. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from modelyard.core import errors
from modelyard.core.engine import Media, Prompt, TokenRun
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError

_BIG_ENDIAN = sys.byteorder == "big"  # the wire is little-endian
_ERRORS: dict[str, type[ModelyardError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ModelyardError)
}
# The attributes that an error may carry. Others, and values of other types, are not accepted from the wire.
_ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "message": (str,),
    "code": (str,),
    "param": (str,),
    "retry_after": (int, float),
    "id": (str,),
    "prompt_tokens": (int,),
    "max_tokens": (int,),
    "window": (int,),
    "position": (int,),
}
# Defaults of the attributes that only some classes have.
_DEFAULTS: dict[type[ModelyardError], dict[str, Any]] = {
    errors.Internal: {"id": ""},
    errors.Overloaded: {"position": None},
    errors.ContextOverflow: {"prompt_tokens": 0, "window": 0},
    errors.OutputOverflow: {"prompt_tokens": 0, "max_tokens": 0, "window": 0},
}


class MalformedMessage(ValueError):
    """Bytes that are not a message of the protocol, or a message that is not allowed here."""


# --- numbers --------------------------------------------------------------------------------------------------------


def pack_ids(ids: Iterable[int]) -> bytes:
    try:
        return _pack(array("I", ids))
    except (OverflowError, TypeError):
        raise InvalidRequest("the prompt holds token ids outside 0…4294967295") from None


def unpack_ids(data: bytes) -> list[int]:
    return _unpack("I", data).tolist()


def pack_vector(vector: Iterable[float]) -> bytes:
    return _pack(array("d", vector))


def unpack_vector(data: bytes) -> list[float]:
    return _unpack("d", data).tolist()


def _pack(numbers: array[Any]) -> bytes:
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(code: str, data: bytes) -> array[Any]:
    numbers = array(code)
    if len(data) % numbers.itemsize:
        raise MalformedMessage(f"{len(data)} bytes are not a list of {numbers.itemsize}-byte numbers")
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


# --- prompts --------------------------------------------------------------------------------------------------------


def flatten_prompt(prompt: Prompt) -> tuple[bytes, list[tuple[int, Media]]]:
    """All tokens of a prompt as one run, and its media with the number of tokens before each."""
    media: list[tuple[int, Media]] = []
    before = 0
    for part in prompt.parts:
        if isinstance(part, Media):
            media.append((before, part))
        else:
            before += len(part.ids)
    return pack_ids(prompt.ids), media


def unflatten_prompt(tokens: bytes, media: Sequence[tuple[int, Media]]) -> tuple[TokenRun | Media, ...]:
    ids, position = unpack_ids(tokens), 0
    parts: list[TokenRun | Media] = []
    for offset, item in media:
        if not position <= offset <= len(ids):
            raise MalformedMessage("a media offset is outside the prompt")
        if offset > position:
            parts.append(TokenRun(ids[position:offset]))
        parts.append(item)
        position = offset
    if position < len(ids) or not parts:
        parts.append(TokenRun(ids[position:]))
    return tuple(parts)


# --- errors ---------------------------------------------------------------------------------------------------------


def pack_error(error: ModelyardError) -> list[Any]:
    kind = next(name for name in (base.__name__ for base in type(error).__mro__) if name in _ERRORS)
    attributes = {name: value for name, value in vars(error).items() if name in _ATTRIBUTES and value is not None}
    return [kind, attributes]


def unpack_error(packed: Any) -> ModelyardError:
    """An error class that this version does not know becomes `Internal` with the same message."""
    match packed:
        case [str(name), dict(attributes), *_] if isinstance(attributes.get("message"), str):
            kind = _ERRORS.get(name, Internal)
        case _:
            raise MalformedMessage("an error without a message")
    # Bypass the constructor, which composes the message from numbers: the message is complete already.
    error = kind.__new__(kind)
    ModelyardError.__init__(error, attributes["message"])
    for base, defaults in _DEFAULTS.items():
        if issubclass(kind, base):
            vars(error).update(defaults)
    for name, types in _ATTRIBUTES.items():
        if isinstance(value := attributes.get(name), types):
            setattr(error, name, value)
    return error
