from __future__ import annotations

import pytest

from modelyard.plugins import UnknownPlugin
from modelyard.scanner.detect import Detected, detect, taught
from modelyard.scanner.formats import load, names
from tests.scanner.reading import Heard, scan

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
        (None, FIREFUNCTION, "", "phi4mini"),
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


def test_it_says_why() -> None:
    assert detect("think", "", "") == Detected("think", "set in the configuration")
    assert detect(None, CODER, "").why == "the chat template holds <function= and <parameter="
    assert detect(None, "", "gpt-oss-20b").why == "the model's name holds 'gpt-oss'"
    assert detect(None, "", "x").why == "no sign of any other"


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match=r"'hermez' is not one of .*hermes, .*plain, .*Did you mean 'hermes'"):
        detect("hermez", "", "")


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("name", names())
def test_a_model_that_was_told_how_to_call_is_understood(name: str) -> None:
    heard = scan([f"I look.\n{CALL}\nDone."], taught(load(name)))
    assert [(block.kind, block.name) for block in heard if block.kind == "tool_call"] == [("tool_call", "now")]
    assert not any("tool_call" in block.text for block in heard)


def test_a_taught_format_keeps_its_own_markers() -> None:
    form = taught(load("think"))
    assert scan([f"<reasoning>hm</reasoning>{CALL}"], form) == [
        Heard("thinking", "hm"),
        Heard("tool_call", "{}", "now"),
    ]
    assert scan(["<text>a\n\n</text>"], taught(load("plain"))) == [Heard("text", "a\n\n")]


def test_a_family_that_uses_the_same_marker_otherwise_is_still_read() -> None:
    own = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert scan([own, CALL], taught(load("qwen3_coder"))) == [Heard("tool_call", "{}", "now")] * 2


def test_a_format_is_taught_once() -> None:
    assert taught(load("hermes")) is load("hermes")
    assert taught(load("plain")) is taught(load("plain"))
