from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.request import Message, Part, Reasoning, Request, Text, Thinking, ToolReference, ToolResult
from modelyard.protocols import openai_responses as wire
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.openai_responses.items import join_turns
from tests.strategies import names, requests

EVERYTHING = requests(
    custom=True, server=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True,
    broken=True, details=True, errors=True, references=True, images_in_results=True, developer=True,
)  # fmt: skip
CARRIED = requests(
    custom=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True, broken=True,
    details=True, images_in_results=True, developer=True, reasoning=False,
)  # fmt: skip


def expressible(request: Request) -> Request:
    """Neighbours that the wire cannot tell apart joined, and no signature without the text it signs."""
    turns = ((message.role, tuple(map(_expressible_part, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(join_turns(turns)))


def _expressible_part(part: Part) -> Part:
    if isinstance(part, Thinking) and part.signature and not part.text:
        return replace(part, redacted=True)
    return part


@settings(deadline=None, max_examples=100)
@given(CARRIED.map(expressible), st.booleans(), st.none() | names())
def test_what_the_wire_can_express_comes_back_equal(request: Request, encrypted: bool, session: str | None) -> None:
    asked = replace(request, encrypted_reasoning=encrypted, session=session, previous=session, store=encrypted)
    assert wire.read_request(wire.write_request(asked), {}) == asked


@settings(deadline=None, max_examples=100)
@given(EVERYTHING, st.booleans())
def test_a_second_round_trip_changes_nothing(request: Request, instructions: bool) -> None:
    written = wire.write_request(replace(request, instructions=instructions))
    assert wire.write_request(wire.read_request(written, {})) == written


def round_trip(request: Request) -> Request:
    return wire.read_request(wire.write_request(request), {})


def test_instructions_come_back_as_instructions() -> None:
    lead, rest = Message("system", (Text("Be brief."),)), Message("user", (Text("hi"),))
    request = Request(model="m", messages=(lead, rest), instructions=True, reasoning=Reasoning(summary="auto"))
    assert msgspec.json.decode(wire.write_request(request))["instructions"] == "Be brief."
    assert round_trip(request) == request


def test_a_seal_of_ours_outweighs_the_text_beside_it() -> None:
    said = Message("assistant", (Thinking("shortened", pack_reasoning("whole")),))
    request = Request(model="m", messages=(said,))
    assert round_trip(request).messages == (Message("assistant", (Thinking("whole", pack_reasoning("whole")),)),)


def test_a_switched_off_model_is_asked_for_no_effort() -> None:
    request = Request(model="m", messages=(Message("user", (Text("x"),)),), reasoning=Reasoning(enabled=False))
    assert round_trip(request).reasoning == Reasoning(enabled=False, effort="none")


def test_a_tool_reference_is_told_by_its_name() -> None:
    result = Message("tool", (ToolResult("call_1", (ToolReference("grep"),)),))
    again = round_trip(Request(model="m", messages=(result,)))
    assert again.messages == (Message("tool", (ToolResult("call_1", (Text("grep"),)),)),)
