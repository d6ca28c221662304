"""The raw output of scripted answers: formats and compilation to token ids."""

from typing import Any

import pytest

from modelyard.engines.fake.output import PlanCompiler, Repeat, filler_tokens, find_filler, format_writer, iterate
from modelyard.engines.fake.script import ScriptCall, ScriptStep
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


def test_broken_arguments_are_written_verbatim() -> None:
    call = ScriptCall(name="f", arguments='{"a": ')
    assert ('\n{"name": "f", "arguments": {"a": }\n', False) in format_writer("hermes").calls([call])
    assert ('\n<function=f>\n{"a": \n</function>\n', False) in format_writer("qwen3_coder").calls([call])


def test_format_without_a_writer_uses_hermes() -> None:
    assert format_writer("plain").think("a") == format_writer("hermes").think("a")


# --- compilation ------------------------------------------------------------------------------------------------------


def compile_steps(*steps: ScriptStep) -> tuple[Any, ...]:
    return PlanCompiler(tokenizer()).compile(steps, format_writer("hermes"))


def test_neighbouring_output_steps_are_one_action() -> None:
    (action,) = compile_steps(ScriptStep(text="a"), ScriptStep(think="b"), ScriptStep(tokens=3))
    assert isinstance(action, list)


def test_steps_that_wait_keep_their_position() -> None:
    prefill, delay, hang = ScriptStep(prefill=1, progress=2), ScriptStep(delay=1), ScriptStep(hang=True)
    first, _, third, fourth = compile_steps(prefill, ScriptStep(text="a"), delay, hang, ScriptStep(hang=False))
    assert (first, third, fourth) == (prefill, delay, hang)


def test_repeats_are_unrolled_lazily() -> None:
    plan = compile_steps(ScriptStep(repeat=10**12, steps=(ScriptStep(text="a"),)))
    assert [type(action) for action in plan] == [list, Repeat]
    actions = iterate(plan)
    assert [next(actions) for _ in range(5)] == [plan[0]] * 5
    assert compile_steps(ScriptStep(repeat=10**12, steps=(ScriptStep(text=""),))) == ()


def test_filler_words_are_one_token_each() -> None:
    tokens = filler_tokens(find_filler(tokenizer()), 500)
    assert len(tokens) == 500
    assert len(tokenizer().decode(tokens).split()) == 500
