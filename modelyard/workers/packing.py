"""Token ids, vectors, prompts and errors in the forms in which they travel. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from modelyard.core import errors
from modelyard.core.engine import Media, Prompt, TokenRun
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError

_SWAPPED = sys.byteorder == "big"  # the wire is little-endian
_ERRORS: dict[str, type[ModelyardError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ModelyardError)
}
# What an error may carry beside its words; a field of another name or kind is not taken from a wire.
_CARRIED: dict[str, tuple[type, ...]] = {
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


# The fields of some kinds alone, as they are where the other side did not send them.
_FIELDS: dict[type[ModelyardError], tuple[tuple[str, Any], ...]] = {
    errors.Internal: (("id", ""),),
    errors.Overloaded: (("position", None),),
    errors.ContextOverflow: (("prompt_tokens", 0), ("window", 0)),
    errors.OutputOverflow: (("prompt_tokens", 0), ("max_tokens", 0), ("window", 0)),
}


class MalformedMessage(ValueError):
    """Bytes that are no message of ours."""


# --- numbers --------------------------------------------------------------------------------------------------------


def pack_ids(ids: Iterable[int]) -> bytes:
    try:
        return _bytes(array("I", ids))
    except (OverflowError, TypeError):
        raise InvalidRequest("the prompt holds token ids outside 0…4294967295") from None


def unpack_ids(data: bytes) -> list[int]:
    return _numbers("I", data).tolist()


def pack_vector(vector: Iterable[float]) -> bytes:
    return _bytes(array("d", vector))


def unpack_vector(data: bytes) -> list[float]:
    return _numbers("d", data).tolist()


def _bytes(numbers: array[Any]) -> bytes:
    if _SWAPPED:
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(code: str, data: bytes) -> array[Any]:
    numbers = array(code)
    if len(data) % numbers.itemsize:
        raise MalformedMessage(f"{len(data)} bytes are no list of numbers of {numbers.itemsize} bytes each")
    numbers.frombytes(data)
    if _SWAPPED:
        numbers.byteswap()
    return numbers


# --- prompts --------------------------------------------------------------------------------------------------------


def flatten_prompt(prompt: Prompt) -> tuple[bytes, list[tuple[int, Media]]]:
    """All tokens of a prompt as one run, and its media with the number of tokens that stand before each."""
    media: list[tuple[int, Media]] = []
    before = 0
    for part in prompt.parts:
        if isinstance(part, Media):
            media.append((before, part))
        else:
            before += len(part.ids)
    return pack_ids(prompt.ids), media


def unflatten_prompt(tokens: bytes, media: Sequence[tuple[int, Media]]) -> tuple[TokenRun | Media, ...]:
    ids, at = unpack_ids(tokens), 0
    built: list[TokenRun | Media] = []
    for place, one in media:
        if not at <= place <= len(ids):
            raise MalformedMessage("a picture stands outside its prompt")
        if place > at:
            built.append(TokenRun(ids[at:place]))
        built.append(one)
        at = place
    if at < len(ids) or not built:
        built.append(TokenRun(ids[at:]))
    return tuple(built)


# --- errors ---------------------------------------------------------------------------------------------------------


def pack_error(error: ModelyardError) -> list[Any]:
    kind = next(name for name in (base.__name__ for base in type(error).__mro__) if name in _ERRORS)
    carried = {name: value for name, value in vars(error).items() if name in _CARRIED and value is not None}
    return [kind, carried]


def unpack_error(packed: Any) -> ModelyardError:
    """An error of a kind that this version does not know is still an error, with the same words."""
    match packed:
        case [str(kind), dict(carried), *_] if isinstance(carried.get("message"), str):
            return _revived(_ERRORS.get(kind, Internal), carried)
    raise MalformedMessage("an error without words")


def _revived(kind: type[ModelyardError], carried: dict[str, Any]) -> ModelyardError:
    """Past its own constructor, whose words are made of numbers: the words have been made already."""
    error = kind.__new__(kind)
    ModelyardError.__init__(error, carried["message"])
    vars(error).update(
        {name: value for own, fields in _FIELDS.items() if issubclass(kind, own) for name, value in fields}
    )
    for name, kinds in _CARRIED.items():
        if isinstance(value := carried.get(name), kinds):
            setattr(error, name, value)
    return error
