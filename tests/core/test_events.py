"""A reply and its event stream convert into each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.errors import Incomplete, Unavailable
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    ReplyBuilder,
    Started,
    TokenLogprob,
    Usage,
    collect_reply,
    reply_events,
)
from modelyard.core.request import Text, Thinking, ToolCall

STARTED = Started("1", "m", 7)
FINISHED = Finished("end", Usage(3, 1, 2))

texts = st.text(max_size=8)
parts = st.one_of(
    st.builds(Text, texts),
    st.builds(Thinking, texts, texts),
    st.builds(ToolCall, texts, texts, texts, st.none() | texts, st.booleans()),
)
logprobs = st.lists(st.builds(TokenLogprob, texts, st.floats(-9, 0)), max_size=2).map(tuple)


def _block(part: Text | Thinking | ToolCall, token_logprobs: tuple[TokenLogprob, ...], complete: bool) -> Block:
    """Only a call can be incomplete."""
    return Block(part, token_logprobs, complete or not isinstance(part, ToolCall))


blocks = st.builds(_block, parts, logprobs, st.booleans())
replies = st.builds(Reply, st.just(STARTED), st.lists(blocks, max_size=4).map(tuple), st.just(FINISHED))


@given(replies)
def test_a_reply_survives_the_round_trip_through_events(reply: Reply):
    assert collect_reply(reply_events(reply)) == reply


@given(replies, st.integers(1, 5))
def test_chunking_makes_no_difference(reply: Reply, size: int):
    events, folding = list(reply_events(reply)), ReplyBuilder()
    for at in range(0, len(events), size):
        assert not folding.finished
        folding.feed(events[at : at + size])
    assert folding.finished
    assert folding.reply() == reply


@given(replies)
def test_the_events_of_a_reply_fulfil_the_contract(reply: Reply):
    events = list(reply_events(reply))
    indexes = [event.index for event in events if isinstance(event, BlockStart)]
    opened = [event.index for event in events if isinstance(event, BlockStart | BlockEnd)]
    assert indexes == list(range(len(reply.blocks)))
    assert opened == [index for index in indexes for _ in (0, 1)]
    assert (events[0], events[-1]) == (STARTED, FINISHED)


def test_deltas_add_up_with_their_logprobs():
    one, two = TokenLogprob("a", -0.5), TokenLogprob("b", -1.0)
    reply = collect_reply(
        [
            STARTED,
            BlockStart(0, "text"),
            BlockDelta(0, "a", (one,)),
            BlockDelta(0, "b", (two,)),
            BlockEnd(0),
            FINISHED,
        ]
    )
    assert reply.blocks == (Block(Text("ab"), (one, two)),)


def test_text_thinking_and_calls_are_properties_of_a_reply():
    cut = ToolCall("c2", "cut", '{"a')
    reply = Reply(
        STARTED,
        (
            Block(Thinking("hm", "sig")),
            Block(Text("a")),
            Block(ToolCall("c1", "look", "{}")),
            Block(cut, complete=False),
            Block(Text("b")),
        ),
        FINISHED,
    )
    assert reply.text == "ab"
    assert reply.thinking == "hm"
    assert [call.name for call in reply.calls] == ["look"], "a call that was cut off is none to run"


def test_a_failure_is_raised_unchanged():
    error = Unavailable("lost")
    with pytest.raises(Unavailable) as caught:
        collect_reply([STARTED, BlockStart(0, "text"), BlockDelta(0, "half"), Failed(error)])
    assert caught.value is error


@pytest.mark.parametrize("events", [[], [STARTED], [FINISHED], [STARTED, BlockStart(0, "text"), BlockDelta(0, "half")]])
def test_a_stream_without_start_or_end_is_incomplete(events: list[Event]):
    with pytest.raises(Incomplete):
        collect_reply(events)


def test_a_block_cannot_end_before_its_start():
    with pytest.raises(Incomplete, match="not open"):
        collect_reply([STARTED, BlockEnd(0), FINISHED])
