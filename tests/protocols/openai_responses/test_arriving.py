from __future__ import annotations

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart
from modelyard.protocols.openai_responses.arrived import OutputItem, OutputPart
from modelyard.protocols.openai_responses.arriving import Arrivals


def message(text: str | None = None) -> OutputItem:
    return OutputItem("message", content=None if text is None else [OutputPart("output_text", text)])


def test_a_later_item_waits_until_the_earlier_one_has_ended() -> None:
    arrivals = Arrivals()
    arrivals.open(message(), 0)
    arrivals.done(message("second"), 1)
    assert list(arrivals.tell()) == [BlockStart(0, "text")]
    arrivals.done(message("first"), 0)
    assert list(arrivals.tell()) == [
        BlockDelta(0, "first"),
        BlockEnd(0),
        BlockStart(1, "text"),
        BlockDelta(1, "second"),
        BlockEnd(1),
    ]


def test_the_last_word_is_heard_only_for_what_is_open() -> None:
    arrivals = Arrivals()
    arrivals.done(message("told"), 0)
    arrivals.settle([message("told"), message("never announced")])
    assert list(arrivals.tell()) == [BlockStart(0, "text"), BlockDelta(0, "told"), BlockEnd(0)]


def test_a_call_counts_only_when_it_is_complete() -> None:
    arrivals = Arrivals()
    arrivals.done(OutputItem("function_call", "incomplete", call_id="a", name="f", arguments="{"), 0)
    assert list(arrivals.tell())[-1] == BlockEnd(0, complete=False)
    assert not arrivals.has_calls


def test_an_unknown_item_keeps_its_place_and_is_not_told() -> None:
    arrivals = Arrivals()
    arrivals.done(OutputItem("hologram"), None)
    arrivals.done(message("hi"), None)
    assert list(arrivals.tell()) == [BlockStart(0, "text"), BlockDelta(0, "hi"), BlockEnd(0)]
