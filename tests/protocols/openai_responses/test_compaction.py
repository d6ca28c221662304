"""The request for a summary; tests/e2e/test_openai_sdk.py compacts a conversation with the SDK."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Finished, Reply, Started, Usage
from modelyard.core.request import Text
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses import compaction


@pytest.mark.parametrize(("sent", "limit"), [({}, 4096), ({"max_output_tokens": 100}, 100)])
def test_a_summary_has_a_limit_even_if_the_client_sets_none(sent: dict[str, int], limit: int) -> None:
    body = encode({"model": "m", "input": "Hello", "stream": True, **sent})
    request = compaction.read_request(body, {})
    assert (request.max_tokens, request.stream, request.store) == (limit, False, False)
    assert isinstance(asked := request.messages[-1].parts[0], Text)
    assert asked.text.startswith("Summarize")


def test_a_model_that_writes_no_summary_is_not_asked_again() -> None:
    request = compaction.read_request(encode({"model": "m", "input": "Hello"}), {})
    empty = Reply(Started("t", "m", 1), (), Finished("max_tokens", Usage()))
    with pytest.raises(InvalidRequest, match="wrote no summary"):
        compaction.write_reply([empty], request)
