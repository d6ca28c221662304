"""How scripted reasoning and calls are spelled."""

from typing import Any

import pytest

from modelyard.engines.fake.dialects import format_writer
from modelyard.engines.fake.script import ScriptCall
from tests.engines.fake.stage import answer, chatml, ids, prompt, read, text_engine, vocabulary

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


async def test_harmony_goes_on_in_an_open_message_and_closes_it() -> None:
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
async def test_reasoning_that_the_template_opened_is_closed_once(steps: list[dict[str, Any]], expected: str) -> None:
    opened = chatml(("user", "x"), opening="<think>\n")
    assert await answer(opened, script=[{"steps": steps}]) == expected


async def test_text_that_quotes_a_marker_stays_text_and_raw_does_not() -> None:
    marker = vocabulary().specials["<tool_call>"]
    for step, special in (({"text": "<tool_call>"}, False), ({"raw": "<tool_call>"}, True)):
        engine = await text_engine(script=[{"steps": [step]}])
        assert (marker in ids(await read(engine.generate(prompt())))) is special


def test_broken_arguments_are_written_as_they_are() -> None:
    call = ScriptCall(name="f", arguments='{"a": ')
    assert ('\n{"name": "f", "arguments": {"a": }\n', False) in format_writer("hermes").calls([call])
    assert ('\n<function=f>\n{"a": \n</function>\n', False) in format_writer("qwen3_coder").calls([call])


def test_dialect_without_a_writer_is_spelled_as_hermes() -> None:
    assert format_writer("plain").think("a") == format_writer("hermes").think("a")
