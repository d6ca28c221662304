"""OpenAI's own SDK reads what we write."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx2
import openai
import pytest

from modelyard.core.events import collect_reply
from modelyard.protocols import openai_responses
from tests.protocols.openai_responses.helpers import CASES, TRACE, stream

INCOMPLETE = {"length", "cut_call", "cut_custom_call", "content_filter"}

Answer = Callable[[bytes, str], openai.OpenAI]


@pytest.fixture(scope="module")
def answering() -> Iterator[Answer]:
    """A client that receives the given body and content type as the answer to its next request."""
    answer: list[httpx2.Response] = []
    transport = httpx2.MockTransport(lambda request: answer.pop())
    with openai.OpenAI(
        api_key="x", base_url="http://test/v1", http_client=httpx2.Client(transport=transport)
    ) as client:

        def answer_with(body: bytes, content_type: str) -> openai.OpenAI:
            answer[:] = [httpx2.Response(200, content=body, headers={"content-type": content_type})]
            return client

        yield answer_with


@pytest.mark.parametrize("name", sorted(CASES.keys() - INCOMPLETE - {"failed"}))
def test_the_stream_helper_builds_the_final_response(answering: Answer, name: str) -> None:
    request, events = CASES[name]
    sdk = answering(stream(request, events), "text/event-stream")
    with sdk.responses.stream(model="tiny", input="hello") as response:
        final = response.get_final_response()
    assert (final.id, final.output_text) == (f"resp_{TRACE}", collect_reply(events).text)
    assert len(final.output) == max(1, len(collect_reply(events).blocks))
    assert final.usage is not None
    assert final.usage.total_tokens == 27


def test_every_stream_is_read_to_its_end(answering: Answer) -> None:
    for case in CASES.values():
        sdk = answering(stream(*case), "text/event-stream")
        kinds = [event.type for event in sdk.responses.create(model="tiny", input="hello", stream=True)]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete", "response.failed")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_a_whole_reply_is_read_as_a_response(answering: Answer, name: str) -> None:
    request, events = CASES[name]
    sdk = answering(openai_responses.write_reply([collect_reply(events)], request), "application/json")
    response = sdk.responses.create(model="tiny", input="hello")
    assert response.output_text == collect_reply(events).text
    assert response.status == ("incomplete" if name in INCOMPLETE else "completed")
