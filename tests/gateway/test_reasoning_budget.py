"""How every output format closes its reasoning."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.core.engine import ReasoningBudget
from modelyard.core.events import BlockDelta, BlockStart
from modelyard.core.output_format import OutputFormat, ReasoningBlock
from modelyard.core.request import Reasoning
from modelyard.core.tokenizer import Piece
from modelyard.scanner import formats
from modelyard.scanner.scanner import Scanner
from tests.gateway.harness import make_request, model

CASES = [
    (output_format, block)
    for output_format in map(formats.load, formats.names())
    for block in output_format.reasoning_blocks
    if Scanner(output_format, new_id=str).reasoning_end in (None, *block.ends)  # some begin in one kind of reasoning
]


@pytest.mark.parametrize(("output_format", "block"), CASES, ids=[f"{f.name} {b.start}" for f, b in CASES])
def test_what_closes_the_reasoning_begins_the_answer(output_format: OutputFormat, block: ReasoningBlock) -> None:
    scanner = Scanner(output_format, new_id=str)
    output = [Piece(block.start), Piece("Hm, "), Piece(block.closing), Piece("It rains.")]
    events = [*scanner.feed(output), *scanner.finish()]
    kinds = {event.index: event.kind for event in events if isinstance(event, BlockStart)}
    texts = dict.fromkeys(kinds, "")
    for event in events:
        if isinstance(event, BlockDelta):
            texts[event.index] += event.text
    shown = [(kinds[index], text.strip()) for index, text in texts.items()]
    assert shown == [("thinking", "Hm,"), ("text", "It rains.")]


def test_every_format_with_reasoning_can_close_it() -> None:
    loaded = map(formats.load, formats.names())
    reasoning = [f for f in loaded if any(region.kind == "thinking" for region in f.regions.values())]
    assert {f.name for f in reasoning if not f.reasoning_blocks} == set()


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("inkling", "<|message_model|><|content_thinking|>"),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'),
        ("muse_glimmer", "<|start|>assistant to=self<|message|>"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>"),
        ("think", "<think>\n"),
    ],
)
def test_reasoning_that_the_prompt_opens_is_known(name: str, prompt: str) -> None:
    output_format = formats.load(name)
    begin = Scanner(output_format, prefill=prompt, new_id=str)
    assert begin.is_thinking
    assert any(begin.reasoning_end in block.ends for block in output_format.reasoning_blocks)


def test_a_budget_of_any_size_fits_into_a_message_to_an_engine_process() -> None:
    request = make_request(reasoning=Reasoning(budget=10**40))
    budget = model().pipeline.reasoning_budget(request, "<|im_start|>assistant\n")
    assert budget is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(budget), type=ReasoningBudget) == budget
