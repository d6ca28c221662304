"""Which of vLLM's parsers of tool calls and of reasoning fit a model, by the marks in its chat template. Pure."""

from __future__ import annotations

NONE = "none"

# the first mark that a template has decides: those that contain another one come before it
_TOOLS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_call>", "gemma4"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|channel|>", "openai"),
)
_REASONING = (
    ("<|channel|>", "openai_gptoss"),
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("<arg_key>", "glm45"),
    ("enable_thinking", "qwen3"),
    ("<think>", "deepseek_r1"),
)


def tool_parser(told: str | None, template: str | None) -> str | None:
    return _chosen(told, template, _TOOLS)


def reasoning_parser(told: str | None, template: str | None) -> str | None:
    return _chosen(told, template, _REASONING)


def _chosen(told: str | None, template: str | None, marks: tuple[tuple[str, str], ...]) -> str | None:
    if told is not None:
        return None if told == NONE else told
    return next((parser for mark, parser in marks if mark in (template or "")), None)
