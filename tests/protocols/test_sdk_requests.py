"""Requests made from the vendors' own types: whatever the SDKs can express is read, or refused with a reason. The nested
fields of what is read are those of our bodies, or listed here as without effect."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import anthropic.types as anthropic_types
import msgspec
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import openai.types.shared_params as shared_types
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from typing_extensions import NotRequired, Required, is_typeddict

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.anthropic_messages import request as messages_body
from modelyard.protocols.openai_chat import request as chat_body
from modelyard.protocols.openai_responses import request as responses_body

pytestmark = pytest.mark.compliance

HELLO = [{"role": "user", "content": "Hello"}]
PROTOCOLS: dict[str, tuple[WireProtocol, type[Any], dict[str, Any]]] = {
    "Messages": (anthropic_messages, MessageCreateParamsBase, {"model": "m", "max_tokens": 9, "messages": HELLO}),
    "Chat Completions": (openai_chat, CompletionCreateParamsBase, {"model": "m", "messages": HELLO}),
    "Responses": (openai_responses, ResponseCreateParamsBase, {"model": "m", "input": "Hello"}),
}
# Refused because ignoring them would change the answer: the codes and messages say what to send instead.
REFUSALS = ("no model reads here", "no model speaks here", "is not stored here", "cannot be", "send ", "does not read")
_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True, bytes: "eA=="}


def samples(hint: Any, depth: int = 0) -> Iterator[Any]:
    """One value for each kind that the type allows; an object with all its fields, once for each kind of each field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        yield from _objects(hint, depth)
    elif hint is type(None):
        yield None
    elif origin is Literal:
        yield from arguments
    elif hint in _PLAIN:
        yield _PLAIN[hint]
    elif origin in (Required, NotRequired) or str(origin) == "typing.Annotated":
        yield from samples(arguments[0], depth)
    elif origin is dict:
        yield {"key": next(samples(arguments[1], depth + 1), "x")}
    elif origin is not None and arguments and issubclass(_class_of(origin), list | tuple | set | Iterator):
        yield from ([value] for value in samples(arguments[0], depth))
    elif arguments:
        for one in arguments:
            yield from samples(one, depth)
    else:
        yield {}


def _class_of(origin: Any) -> type:
    """`Iterable` and `Sequence` of the SDKs are lists on the wire."""
    name = getattr(origin, "__name__", "")
    return list if name in ("Iterable", "Sequence", "list", "SequenceNotStr") else origin if isinstance(origin, type) else object


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    hints = _hints(kind)
    whole = {name: next(samples(hint, depth + 1), None) for name, hint in hints.items()}
    yield whole
    if depth > 3:
        return
    for name, hint in hints.items():
        for number, value in enumerate(samples(hint, depth + 1)):
            if number:
                yield whole | {name: value}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def bodies(protocol: str) -> Iterator[tuple[str, dict[str, Any]]]:
    _, kind, usual = PROTOCOLS[protocol]
    for field, hint in _hints(kind).items():
        for value in samples(hint, 0):
            yield field, usual | {field: value}


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_what_the_sdk_can_express_is_read_or_refused_with_a_reason(protocol: str) -> None:
    module, read, wrong = PROTOCOLS[protocol][0], 0, dict[str, Any]()
    for field, body in bodies(protocol):
        try:
            assert isinstance(module.read_request(msgspec.json.encode(body), {}), Request)
            read += 1
        except ModelyardError as error:
            if error.code == "invalid_type" or not any(reason in error.message for reason in REFUSALS):
                wrong.setdefault(f"{field}: {error.message}", body[field])
    assert not wrong
    assert read > 100


# --- nested fields ----------------------------------------------------------------------------------------------------

# The vendor's type, our struct, and the fields that we read elsewhere or that have no effect.
NESTED: list[tuple[Any, type[msgspec.Struct], set[str]]] = []
