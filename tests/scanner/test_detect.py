"""Detection by setting, template and name, and formats with the calls of Hermes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from modelyard.core.request import Tool
from modelyard.plugins import UnknownPlugin
from modelyard.prompt.template import hermes_calls, tojson
from modelyard.scanner.detect import DetectedFormat, detect, with_hermes_calls
from modelyard.scanner.formats import load, names
from tests.public_templates import public_templates
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


# --- public templates -------------------------------------------------------------------------------------------------

FORMATS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "templates.toml").read_text("utf-8"))
TEMPLATES = {name: format for format, listed in FORMATS.items() for name in listed}


def test_every_public_template_is_listed() -> None:
    assert sorted(public_templates()) == sorted(TEMPLATES)
    assert len(TEMPLATES) >= 380


@pytest.mark.parametrize("format", FORMATS)
def test_the_format_of_every_public_template_is_detected(format: str) -> None:
    found = {name: detect(None, public_templates()[name], "").format for name in FORMATS[format]}
    assert {name: other for name, other in found.items() if other != format} == {}


def test_a_template_that_asks_for_json_in_the_turns_of_llama_4_is_read() -> None:
    template = public_templates()["vllm/tool_chat_template_llama4_json"]
    call = '{"name": "now", "parameters": {"zone": "UTC"}}'
    blocks = scan([f"{call}; {call}<|eot|>"], detect(None, template, "").format, tools=[Tool("now")])
    assert blocks == [ScannedBlock("tool_call", '{"zone": "UTC"}', "now")] * 2


# --- the calls of Hermes in other formats -----------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_every_format_without_calls_can_read_those_of_hermes() -> None:
    for name in (name for name in names() if load(name).writer is None):
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


def test_a_format_with_hermes_calls_is_built_once() -> None:
    assert with_hermes_calls(load("hermes")) is load("hermes")
    assert with_hermes_calls(load("plain")) is with_hermes_calls(load("plain"))


def test_calls_are_taught_as_hermes_writes_them() -> None:
    writer = load("hermes").writer
    calls = [("now", {"zone": "é", "at": [1, None]}), ("later", {})]
    assert writer is not None
    assert hermes_calls(calls, tojson) == writer.write(calls, tojson)
