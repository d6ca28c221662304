from __future__ import annotations

import pytest

from modelyard.plugins import UnknownPlugin
from modelyard.scanner.detect import Detected, detect

QWEN3 = "{%- if tools %}<tool_call>{{ x }}</tool_call>{% endif %}<think>\n"
CODER = "<tool_call>\n<function=a>\n<parameter=b>\n</tool_call><think>"
HARMONY = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("setting", "template", "name", "format"),
    [
        ("plain", QWEN3, "qwen3-8b", "plain"),
        ("auto", QWEN3, "", "hermes"),
        (None, QWEN3, "", "hermes"),
        (None, CODER, "", "qwen3_coder"),
        (None, HARMONY, "qwen3", "harmony"),
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
    with pytest.raises(UnknownPlugin, match=r"'hermez' is none of .*hermes, plain, .*Did you mean 'hermes'"):
        detect("hermez", "", "")
