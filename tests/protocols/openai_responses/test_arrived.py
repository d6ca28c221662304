from __future__ import annotations

import msgspec
import pytest

from modelyard.core.events import StopReason, TokenLogprob, Usage
from modelyard.protocols.openai_responses.arrived import RESPONSE, STREAM_EVENT, LogprobEntry, UsageEntry, read_logprobs


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"status":"completed"}', "end"),
        (b'{"status":"incomplete"}', "max_tokens"),
        (b'{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}', "max_tokens"),
        (b'{"status":"incomplete","incomplete_details":{"reason":"content_filter"}}', "content_filter"),
    ],
)
def test_the_status_tells_why_it_stopped(body: bytes, reason: StopReason) -> None:
    assert RESPONSE.decode(body).stop_reason(has_calls=False) == reason


def test_usage_without_details_is_read() -> None:
    assert UsageEntry(3, 4).read() == Usage(prompt=3, output=4)
    assert UsageEntry().read() == Usage()


def test_a_token_without_bytes_is_spelled_from_its_text() -> None:
    assert read_logprobs([LogprobEntry("é", -1.0)]) == (TokenLogprob("é", -1.0, "é".encode()),)


def test_bytes_that_are_none_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        STREAM_EVENT.decode(b'{"type":"x","logprobs":[{"token":"a","bytes":[300]}]}')
