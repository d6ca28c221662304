"""Detection by setting, template and name, and formats with the calls of Hermes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from modelyard.plugins import UnknownPlugin
from modelyard.scanner.detect import DetectedFormat, detect, with_hermes_calls
from modelyard.scanner.formats import load, names
from tests.scanner import record_templates
from tests.scanner.helpers import ScannedBlock, scan

QWEN3 = "{%- if tools %}<tool_call>{{ x }}</tool_call>{% endif %}<think>\n"
CODER = "<tool_call>\n<function=a>\n<parameter=b>\n</tool_call><think>"
FUNCTIONARY = "{{ '<|start_header_id|>' }}{{ '<function=' + name + '>' }}"
FIREFUNCTION = "{{ '<|start_header_id|>' }}{{ ' functools[' + calls + ']' }}"
HARMONY = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("setting", "template", "name", "format"),
    [
        ("plain", QWEN3, "qwen3-8b", "plain"),
        ("auto", QWEN3, "", "hermes"),
        (None, QWEN3, "", "hermes"),
        (None, CODER, "", "qwen3_coder"),
        (None, HARMONY, "qwen3", "harmony"),
        (None, FUNCTIONARY, "", "llama3_json"),
        (None, FIREFUNCTION, "", "firefunction_v2"),
        (None, "{{ m }}<think>", "", "think"),
        (None, "{{ m }}[THINK]", "", "think"),
        (None, "", "openai/gpt-oss-20b-GGUF", "harmony"),
        (None, "", "Qwen3-Coder-30B-A3B", "qwen3_coder"),
        (None, "", "Qwen2.5-7B-Instruct", "hermes"),
        (None, "", "DeepSeek-R1-Distill-Llama-8B", "think"),
        (None, "<|im_start|>", "SmolLM2-135M-Instruct", "plain"),
        (None, "", "", "plain"),
    ],
)
def test_the_setting_wins_over_the_template_and_the_template_over_the_name(
    setting: str | None, template: str, name: str, format: str
) -> None:
    assert detect(setting, template, name).format == format


def test_the_reason_is_given() -> None:
    assert detect("think", "", "") == DetectedFormat("think", "set in the configuration")
    assert detect(None, CODER, "").why == "the chat template contains <function= and <parameter="
    assert detect(None, "", "gpt-oss-20b").why == "the model name contains 'gpt-oss'"
    assert detect(None, "", "x").why == "nothing else fits"


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match=r"'hermez' is not one of .*hermes, .*plain, .*Did you mean 'hermes'"):
        detect("hermez", "", "")


# --- the templates that llama.cpp is tested with ----------------------------------------------------------------------

TEMPLATES: dict[str, dict[str, Any]] = tomllib.loads(record_templates.TABLE.read_text())


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_every_template_of_llama_cpp_is_detected(name: str) -> None:
    template = "\n".join(TEMPLATES[name]["markers"])
    assert detect(None, template, "").format == TEMPLATES[name]["format"]


def test_the_templates_of_llama_cpp_are_recorded_by_what_they_contain() -> None:
    assert len(TEMPLATES) >= 70
    for recorded in TEMPLATES.values():
        template = "\n".join(recorded["markers"])
        assert set(record_templates.markers(template)) >= set(recorded["markers"])


# --- the calls of Hermes in other formats -----------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_every_format_can_read_the_calls_of_hermes() -> None:
    for name in names():
        blocks = scan([f"I look.\n{CALL}\nDone."], with_hermes_calls(load(name)))
        assert [block.name for block in blocks if block.kind == "tool_call"] == ["now"], name
        assert not any("tool_call" in block.text for block in blocks), name


def test_a_format_with_hermes_calls_keeps_its_own_markers() -> None:
    form = with_hermes_calls(load("think"))
    assert scan([f"<reasoning>hm</reasoning>{CALL}"], form) == [
        ScannedBlock("thinking", "hm"),
        ScannedBlock("tool_call", "{}", "now"),
    ]
    assert scan(["<text>a\n\n</text>"], with_hermes_calls(load("plain"))) == [ScannedBlock("text", "a\n\n")]


def test_a_marker_with_two_meanings_is_read_in_both() -> None:
    own = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert scan([own, CALL], with_hermes_calls(load("qwen3_coder"))) == [ScannedBlock("tool_call", "{}", "now")] * 2


def test_a_format_with_hermes_calls_is_built_once() -> None:
    assert with_hermes_calls(load("hermes")) is load("hermes")
    assert with_hermes_calls(load("plain")) is with_hermes_calls(load("plain"))
