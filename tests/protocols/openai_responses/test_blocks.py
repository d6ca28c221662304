from __future__ import annotations

import msgspec

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_responses.blocks import Numbering, OpenBlock
from tests.protocols.openai_responses.cases import ASKED, CODEX


def test_the_hot_path_writes_the_same_json_as_the_slow_one() -> None:
    block, numbering = OpenBlock(BlockStart(0, "text"), "k", 3, ASKED), Numbering()
    numbering.frame("response.created", {})
    (event,) = SseParser().feed(block.grow(BlockDelta(0, 'a "%d" \n\n é'), numbering))
    assert event.event == "response.output_text.delta"
    assert msgspec.json.decode(event.data) == {
        "type": "response.output_text.delta",
        "sequence_number": 1,
        "item_id": "msg_k_3",
        "output_index": 3,
        "content_index": 0,
        "delta": 'a "%d" \n\n é',
        "logprobs": [],
    }


def test_a_block_closes_with_everything_that_it_grew_by() -> None:
    block, numbering = OpenBlock(BlockStart(0, "tool_call", "call_1", "f"), "k", 0, CODEX), Numbering()
    for text in ("{", "}"):
        block.grow(BlockDelta(0, text), numbering)
    item, events = block.closing(BlockEnd(0))
    assert item["arguments"] == "{}"
    assert [name for name, _ in events] == ["response.function_call_arguments.done", "response.output_item.done"]
