"""One answer heard event by event."""

from __future__ import annotations

import pytest

from modelyard.benchmark.hearing import Hearing, words
from modelyard.core.errors import Incomplete, Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, Usage

START: list[Event] = [Started("1", "m", 0), BlockStart(0, "text")]


def test_what_is_said_aloud_is_remembered_and_reasoning_is_only_counted() -> None:
    hearing = Hearing(0.0)
    hearing.hear([Started("1", "m", 0), BlockStart(0, "thinking"), BlockDelta(0, "hm")], 1.0)
    hearing.hear([BlockEnd(0), BlockStart(1, "text"), BlockDelta(1, "for"), BlockDelta(1, "ty")], 2.0)
    hearing.hear([BlockEnd(1), Finished("end", Usage(prompt=9, cached=2, output=3))], 3.0)
    sample = hearing.sample(3.0)
    assert hearing.text == "forty"
    assert (sample.ttft_s, sample.gaps_s) == (1.0, (0.5, 0.5))
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens, sample.error) == (9, 2, 3, None)


def test_a_server_that_tells_no_numbers_has_its_pieces_counted() -> None:
    hearing = Hearing(0.0)
    hearing.hear([*START, BlockDelta(0, "a"), BlockDelta(0, "b"), BlockEnd(0), Finished("end", Usage())], 1.0)
    sample = hearing.sample(1.0)
    assert (sample.output_tokens, sample.prompt_tokens, sample.is_counted) == (2, 0, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ([Failed(Unavailable("lost the engine"))], "lost the engine"),
        ([], "the answer broke off"),
        ([Finished("end", Usage(1, 0, 1))], None),
    ],
)
def test_an_answer_has_an_error_unless_it_was_finished(end: list[Event], error: str | None) -> None:
    hearing = Hearing(0.0)
    hearing.hear([*START, BlockDelta(0, "a"), *end], 1.0)
    assert hearing.sample(1.0).error == error


def test_errors_of_one_kind_read_alike() -> None:
    assert words(Incomplete("cut")) == words(Incomplete("cut")) == "cut"
