"""The raw output of scripted answers: formats and compilation to token ids."""

from typing import Any

import pytest

from modelyard.engines.fake.answers import OutputEncoder
from modelyard.engines.fake.script import ScriptStep
from tests.engines.fake.helpers import answer, chatml, prompt, text_engine, tokenizer
from tests.engines.reading import ids, read

STEPS: list[dict[str, Any]] = [
    {"think": "hm"},
    {"text": "Look: "},
    {"call": [{"name": "f", "arguments": {"a": 1, "b": "x"}}, {"name": "g"}]},
]


async def test_hermes() -> None:
    assert await answer(script=[{"steps": STEPS}]) == (
        "<think>\nhm\n</think>\n\nLook: "
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )


async def test_qwen3_coder() -> None:
    assert (await answer(script=[{"steps": STEPS}], format="qwen3_coder")).endswith(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )


async def test_harmony() -> None:
    assert await answer(script=[{"steps": STEPS}], format="harmony") == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Look: <|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>"
    )


async def test_harmony_continues_an_open_message_and_closes_it() -> None:
    steps: list[dict[str, Any]] = [{"repeat": 3, "steps": [{"text": "a "}]}]
    assert await answer(script=[{"steps": steps}], format="harmony") == ("<|channel|>final<|message|>a a a <|return|>")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([{"think": "hm"}, {"text": "Yes"}], "hm\n</think>\n\nYes"),
        ([{"text": "Yes"}], "\n</think>\n\nYes"),
        ([{"raw": "as it is"}], "as it is\n</think>\n\n"),
    ],
)
async def test_reasoning_opened_by_the_template_is_closed_once(steps: list[dict[str, Any]], expected: str) -> None:
    opened = chatml(("user", "x"), opening="<think>\n")
    assert await answer(opened, script=[{"steps": steps}]) == expected


async def test_only_raw_steps_produce_control_tokens() -> None:
    marker = tokenizer().specials["<tool_call>"]
    for step, special in (({"text": "<tool_call>"}, False), ({"raw": "<tool_call>"}, True)):
        engine = await text_engine(script=[{"steps": [step]}])
        assert (marker in ids(await read(engine.generate(prompt())))) is special


async def test_broken_arguments_are_written_verbatim() -> None:
    script = [{"steps": [{"call": {"name": "f", "arguments": '{"a": '}}]}]
    assert '\n{"name": "f", "arguments": {"a": }\n' in await answer(script=script)
    assert '\n<function=f>\n{"a": \n</function>\n' in await answer(script=script, format="qwen3_coder")


async def test_format_without_a_writer_uses_hermes() -> None:
    assert await answer(script=[{"steps": STEPS}], format="plain") == await answer(script=[{"steps": STEPS}])


async def test_reasoning_of_several_steps_is_one_block() -> None:
    steps: list[dict[str, Any]] = [{"repeat": 2, "steps": [{"think": "hm "}]}, {"text": "Yes"}]
    assert await answer(script=[{"steps": steps}]) == "<think>\nhm hm \n</think>\n\nYes"


# --- token ids --------------------------------------------------------------------------------------------------------


def test_steps_without_output_stay_steps() -> None:
    delay, failure = ScriptStep(delay=1), ScriptStep(fail="x")
    encoded = OutputEncoder(tokenizer()).encode([delay, ScriptStep(text="a"), failure], in_reasoning=False)
    assert list(encoded) == [delay, tokenizer().encode("a"), failure]


def test_filler_words_are_one_token_each() -> None:
    tokens = OutputEncoder(tokenizer()).filler(500)
    assert len(tokens) == 500
    assert len(tokenizer().decode(tokens).split()) == 500
