from __future__ import annotations

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart
from modelyard.scanner.blocks import Blocks


def test_another_kind_closes_the_open_block() -> None:
    blocks = Blocks()
    blocks.say("thinking", "a")
    blocks.say("text", "b")
    assert blocks.take() == [
        BlockStart(0, "thinking"),
        BlockDelta(0, "a"),
        BlockEnd(0),
        BlockStart(1, "text"),
        BlockDelta(1, "b"),
    ]


def test_what_was_taken_does_not_come_again() -> None:
    blocks = Blocks()
    blocks.say("text", "a")
    blocks.take()
    assert blocks.take() == []


def test_closing_nothing_says_nothing() -> None:
    blocks = Blocks()
    blocks.close()
    assert blocks.take() == []


def test_forgotten_text_leaves_the_first_index_free() -> None:
    blocks = Blocks()
    blocks.say("text", "of the prompt")
    blocks.forget()
    blocks.say("text", "a")
    assert blocks.take() == [BlockStart(0, "text"), BlockDelta(0, "a")]


def test_a_call_that_the_prompt_left_open_is_remembered_from_its_start() -> None:
    blocks = Blocks()
    blocks.say("text", "of the prompt")
    blocks.start_call("c", "f", None, False)
    blocks.parts.append('{"a"')
    blocks.forget()
    assert blocks.take() == [BlockStart(0, "tool_call", "c", "f"), BlockDelta(0, '{"a"')]
