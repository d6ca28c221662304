"""Which parsers fit a model's template."""

from __future__ import annotations

import pytest

from modelyard.engines.vllm_serve.parsers import reasoning_parser, tool_parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("<tool_call>{…}</tool_call>", "hermes"),
        ("<tool_call><function=name>", "qwen3_coder"),
        ("<|python_tag|>", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>name<arg_key>", "glm45"),
    ],
)
def test_calls_are_read_by_the_marks_of_the_template(template: str | None, parser: str | None) -> None:
    assert tool_parser(None, template) == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, None),
        ("<think>", "deepseek_r1"),
        ("{% if enable_thinking %}<think>", "qwen3"),
        ("<|channel|>analysis", "openai_gptoss"),
    ],
)
def test_reasoning_too(template: str | None, parser: str | None) -> None:
    assert reasoning_parser(None, template) == parser


def test_what_is_told_goes_before_and_none_means_none() -> None:
    assert tool_parser("xlam", "<tool_call>") == "xlam"
    assert tool_parser("none", "<tool_call>") is None
    assert reasoning_parser("none", "<think>") is None
