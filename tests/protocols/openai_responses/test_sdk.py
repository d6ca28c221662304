"""OpenAI's own SDK reads what we write."""

from __future__ import annotations

import httpx2
import openai
import pytest

from modelyard.core.events import collect_reply
from modelyard.protocols import openai_responses
from tests.protocols.openai_responses.helpers import CASES, TRACE, stream

COMPLETED_CASES = sorted(CASES.keys() - {"failed", "length", "cut_call", "cut_custom_call", "content_filter"})


def client(body: bytes, content_type: str) -> openai.OpenAI:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body, headers={"content-type": content_type})

    return openai.OpenAI(
        api_key="x", base_url="http://test/v1", http_client=httpx2.Client(transport=httpx2.MockTransport(answer))
    )


@pytest.mark.parametrize("name", COMPLETED_CASES)
def test_the_stream_helper_builds_the_final_response(name: str) -> None:
    request, events = CASES[name]
    with (
        client(stream(request, events), "text/event-stream") as sdk,
        sdk.responses.stream(model="tiny", input="hello") as response,
    ):
        final = response.get_final_response()
    assert (final.id, final.output_text) == (f"resp_{TRACE}", collect_reply(events).text)
    assert len(final.output) == max(1, len(collect_reply(events).blocks))
    assert final.usage is not None
    assert final.usage.total_tokens == 27


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_stream_is_read_to_its_end(name: str) -> None:
    with client(stream(*CASES[name]), "text/event-stream") as sdk:
        kinds = [event.type for event in sdk.responses.create(model="tiny", input="hello", stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete", "response.failed")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_a_whole_reply_is_read_as_a_response(name: str) -> None:
    request, events = CASES[name]
    with client(openai_responses.write_reply([collect_reply(events)], request), "application/json") as sdk:
        response = sdk.responses.create(model="tiny", input="hello")
    assert response.output_text == collect_reply(events).text
    assert response.status == (
        "incomplete" if name in ("length", "cut_call", "cut_custom_call", "content_filter") else "completed"
    )
