"""Where the template of a model comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin, find_template, formats


def test_the_order_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("folder")
    all_of_them = {"prompt_format": "generic", "embedded": "metadata", "folder": tmp_path, "name": "qwen3-8b"}
    assert find_template(chat_template="{{ x }}", **all_of_them).text == "{{ x }}"  # type: ignore[arg-type]
    assert find_template(**all_of_them).text == "metadata"  # type: ignore[arg-type]
    assert find_template(embedded="metadata", folder=tmp_path).origin == "the model file's metadata"
    assert find_template(prompt_format="generic", folder=tmp_path, name="qwen3-8b").text == "folder"
    assert find_template(prompt_format="generic", name="Qwen3-8B-Q4").text == builtin("generic")
    assert find_template(name="Qwen3-8B-Q4").text == builtin("qwen3_template")


def test_a_forced_format_replaces_the_template_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("folder")
    found = find_template(prompt_format="qwen3", force_prompt_format=True, embedded="metadata", folder=tmp_path)
    assert found.text == builtin("qwen3_template")
    assert found.origin == "prompt_format qwen3, because of force_prompt_format"
    assert find_template(force_prompt_format=True, embedded="metadata").text == "metadata"


def test_the_origin_says_why_a_format_is_used_or_not(tmp_path: Path) -> None:
    assert find_template(prompt_format="qwen3").origin.endswith("because the model has no template of its own")
    found = find_template(prompt_format="qwen3", embedded="metadata")
    assert found.origin.startswith("the model file's metadata; prompt_format qwen3 is for models without a template")
    assert found.stops == (), "they are of the format"


def test_a_template_can_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own")
    found = find_template(chat_template="own.jinja", folder=tmp_path)
    assert (found.text, found.origin) == ("own", f"chat_template {tmp_path / 'own.jinja'}")
    with pytest.raises(InvalidRequest, match=r"other\.jinja"):
        find_template(chat_template="other.jinja", folder=tmp_path)


@pytest.mark.parametrize("file", ["chat_template.json", "tokenizer_config.json"])
def test_json_files_hold_one_template_or_a_list(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(json.dumps({"chat_template": "one"}))
    assert find_template(folder=tmp_path)[:2] == ("one", str(tmp_path / file))
    several = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / file).write_text(json.dumps({"chat_template": several}))
    found = find_template(folder=tmp_path)
    assert (found.text, found.for_tools) == ("plain", "with tools")


def test_a_broken_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"chat_template\.json"):
        find_template(folder=tmp_path)


def test_without_a_template_chat_requests_are_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = find_template(folder=tmp_path, name="mystery")
    assert re.search(r"tokenizer_config\.json.*set chat_template.*generic", found.missing or "")
    assert found.text == ""
    assert find_template(name="smollm").missing is None


@pytest.mark.parametrize("name", formats())
def test_every_built_in_template_compiles(name: str) -> None:
    item = {"type": "text", "source_lang_code": "nl", "target_lang_code": "en", "text": "WORD"}
    content = [item] if name == "translategemma_template" else "WORD"
    assert ChatTemplate(builtin(name)).render({"messages": [{"role": "user", "content": content}]}).count("WORD") == 1


@pytest.mark.parametrize("name", formats())
def test_every_built_in_template_names_its_stop_strings(name: str) -> None:
    (stop,) = find_template(prompt_format=name).stops
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "reply"}]
    if name == "translategemma_template":
        messages = messages[1:]
    text = ChatTemplate(builtin(name), eos_token="</s>").render({"messages": messages})
    assert text.rpartition("reply")[2].startswith(stop)


def test_the_template_of_a_model_adds_no_stop_strings() -> None:
    assert find_template(embedded="metadata").stops == ()
    assert find_template(name="translategemma-4b-it").stops == ("<end_of_turn>",)


def test_formats_are_found_by_file_name_with_or_without_suffix() -> None:
    assert builtin("llama3") == builtin("llama3_template")
    assert builtin("chatml") == builtin("generic")
    for wrong in ("qwen4_template", "../source", "generic.jinja"):
        with pytest.raises(InvalidRequest, match="prompt_format"):
            builtin(wrong)


# --- markers, roles and structure of the built-in templates -----------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "Where", "enum": ["a", "b"]},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["place"],
}
TOOL = {"type": "function", "function": {"name": "rain", "description": "Rain?", "parameters": SCHEMA}}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "rain", "arguments": {"place": "a", "days": 2}}}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "name": "rain", "tool_call_id": "abcdef123", "content": "wet"},
]


def built_in(name: str, *messages: dict[str, object], **variables: object) -> str:
    template = ChatTemplate(builtin(name), bos_token="<bos>")
    return template.render({"messages": messages, "tools": None, "add_generation_prompt": True, **variables})


def test_gemma_begins_an_answer_without_thinking_with_an_empty_thought() -> None:
    closed = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    assert built_in("gemma4", USER) == built_in("gemma4", USER, enable_thinking=False) == closed
    opened = "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert built_in("gemma4", USER, enable_thinking=True) == opened


def test_gemma_declares_a_tool_with_its_types_in_capitals() -> None:
    text = built_in("gemma4", USER, tools=[TOOL]).replace('<|"|>', "'")
    assert text.startswith(
        "<bos><|turn>system\n<|tool>declaration:rain{description:'Rain?',parameters:{properties:{"
        "at:{properties:{x:{type:'NUMBER'}},required:['x'],type:'OBJECT'},days:{type:'INTEGER'},"
        "place:{description:'Where',enum:['a','b'],type:'STRING'},tags:{items:{type:'STRING'},type:'ARRAY'}},"
        "required:['place'],type:'OBJECT'}}<tool|><turn|>\n"
    )


def test_gemma_keeps_the_reasoning_of_calls_after_the_last_question() -> None:
    text = built_in("gemma4", *CALLED, tools=[TOOL]).replace('<|"|>', "'")
    calling = "<|tool_call>call:rain{days:2,place:'a'}<tool_call|>"
    calling += "<|tool_response>response:rain{value:'wet'}<tool_response|>"
    assert text.endswith(f"<|turn>model\n<|channel>thought\nhm\n<channel|>{calling}")
    later = built_in("gemma4", *CALLED, {"role": "assistant", "content": "Yes"}, USER).replace('<|"|>', "'")
    assert f"<|turn>model\n{calling}Yes<turn|>\n<|turn>user\nHi<turn|>\n" in later


def test_gemma_takes_responses_beside_their_call_as_llama_server_sends_them() -> None:
    message = {**CALLED[1], "tool_responses": [{"name": "rain", "response": "wet"}]}
    assert built_in("gemma4", USER, message) == built_in("gemma4", *CALLED)
    answer = {"role": "assistant", "content": "Yes"}
    assert built_in("gemma4", USER, message | {"content": "Yes"}) == built_in("gemma4", *CALLED, answer)


def test_llama_offers_tools_in_the_first_question_and_reads_results_as_json() -> None:
    text = built_in("llama3", *CALLED, tools=[TOOL])
    system, question, call, result, opening = text.split("<|eot_id|>")
    assert system == "<bos><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    assert question.startswith("<|start_header_id|>user<|end_header_id|>\n\n")
    assert question.endswith("}\n\nHi")
    assert call.endswith('assistant<|end_header_id|>\n\n{"name": "rain", "parameters": {"place": "a", "days": 2}}')
    assert result == '<|start_header_id|>ipython<|end_header_id|>\n\n"wet"'
    assert opening == "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize("name", [name for name in formats() if name != "translategemma_template"])
def test_every_built_in_template_marks_images(name: str) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    template = ChatTemplate(builtin(name))
    assert template.mentions("image"), "else the renderer would put [image] as text"
    assert re.search(r"<image>|<\|image\|>|\[IMG\]|<\|image_pad\|>", built_in(name, {"role": "user", "content": parts}))
