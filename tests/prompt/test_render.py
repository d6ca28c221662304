"""Requests rendered to prompts: messages, tools, images, thinking, prefills, and protection against injected tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import (
    Image,
    Message,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.prompt.render import MessageConverter, Renderer, ToolDefinitions, definition, instructions
from modelyard.prompt.template import ChatTemplate, TemplateFailed
from modelyard.prompt.template_source import builtin
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer, SpecialTokens
from modelyard.tokenizer.shield import SENTINEL, Shield, unshield
from tests.prompt.histories import CHAT_TEMPLATES, TOOL, call, make_message, make_request, tool_result
from tests.tokenizer import sample_tokenizers

VOCAB = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
CHATML = Renderer(ChatTemplate(builtin("generic")), VOCAB)


def echo(source: str, **settings: Any) -> Renderer:
    return Renderer(ChatTemplate(source), VOCAB, **settings)


def test_two_messages_become_chatml() -> None:
    rendered = CHATML.apply(make_request(make_message("system", "Be brief."), make_message("user", "Hi")))
    assert (
        rendered.text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered.ids == VOCAB.encode(rendered.text)
    assert rendered.tail == "", "a turn that was only opened holds nothing"


SPELLING = st.lists(
    st.sampled_from(
        [*sample_tokenizers.CONTROLS, *sample_tokenizers.MARKERS, "<|im_", "end|>", " ", "x", "\ufdd0", "\n"]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(SPELLING, SPELLING, SPELLING)
def test_text_never_becomes_a_control_token(user: str, tool: str, system: str) -> None:
    def ids(user: str, tool: str, system: str) -> list[int]:
        turns = (
            make_message("system", system),
            make_message("user", "q", user),
            make_message("assistant", call(arguments=f'{{"path": {_json(tool)}}}')),
        )
        request = make_request(*turns, tool_result(text=tool), tools=(Tool("read_file", user, {"title": tool}),))
        return [id for id in CHATML.apply(request).ids if id in VOCAB.specials.values()]

    assert ids(user + ".", tool + ".", system + ".") == ids(".", ".", ".")


def _json(text: str) -> str:
    return '"' + "".join(f"\\u{ord(character):04x}" for character in text) + '"'


def test_a_quoted_end_of_turn_decodes_to_the_same_text() -> None:
    rendered = CHATML.apply(make_request(make_message("user", "what is <|im_end|>?")))
    assert "what is <|im_end|>?" in rendered.text
    assert VOCAB.decode(rendered.ids) == rendered.text
    assert rendered.ids.count(VOCAB.specials["<|im_end|>"]) == 1


def test_a_growing_conversation_keeps_its_prefix_and_is_not_tokenized_again() -> None:
    first = make_request(
        make_message("system", "rules"),
        make_message("user", "one"),
        make_message("assistant", "two"),
        make_message("user", "three"),
    )
    grown = make_request(*first.messages, make_message("assistant", "four"), make_message("user", "five five"))
    renderer = echo(builtin("generic"))
    renderer.apply(first)
    text = renderer.text(grown)
    assert text.startswith(renderer.text(first))
    assert renderer.fresh(text) <= len("assistant\nfouruser\nfive five")


def test_calls_results_and_reasoning_reach_the_template() -> None:
    source = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    turns = make_message("assistant", Thinking("hm"), "let me", call()), tool_result()
    lines = echo(source).text(make_request(*turns)).splitlines()
    assert lines == [
        '{"role": "assistant", "content": "let me", "reasoning_content": "hm", "tool_calls": [{"id": '
        '"call_0123456789", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a.txt"}}}]}',
        '{"role": "tool", "name": "read_file", "tool_call_id": "call_0123456789", "content": "WORD-RESULT"}',
    ]


@pytest.mark.parametrize(
    ("made_call", "arguments"),
    [
        (ToolCall("1", "f", ""), "{}"),
        (ToolCall("1", "f", "[1]"), '{"__raw": "[1]"}'),
        (ToolCall("1", "f", '{"a": '), '{"__raw": "{\\"a\\": "}'),
        (ToolCall("1", "f", "patch", custom=True), '{"input": "patch"}'),
        (ToolCall("1", "f", '{"x": 5000.0}'), '{"x": 5000.0}'),
    ],
)
def test_arguments_are_always_a_dictionary(made_call: ToolCall, arguments: str) -> None:
    text = echo("{% for m in messages %}{{ m | tojson }}{% endfor %}").text(
        make_request(make_message("assistant", made_call))
    )
    assert f'"arguments": {arguments}}}' in text


def test_deferred_tools_are_rendered_where_they_were_found_and_server_tools_are_dropped() -> None:
    tools = (
        TOOL,
        Tool("late_one", "Later.", deferred=True),
        Tool("cloud_search", kind="server"),
        Tool("patch", kind="custom"),
    )
    found = make_message("tool", ToolResult("1", (Text("found"), ToolReference("late_one"))))
    text = CHATML.text(
        make_request(make_message("user", "WORD-ONE"), make_message("assistant", call("1")), found, tools=tools)
    )
    assert text.index("WORD-ONE") < text.index("late_one")
    assert text.index("patch") < text.index("WORD-ONE")
    assert "cloud_search" not in text
    assert '"input": {"type": "string"}' in text


def test_tools_are_described_in_the_prompt_if_the_template_has_no_tools() -> None:
    text = echo("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}").text(
        make_request(make_message("user", "x"), tools=(TOOL,))
    )
    assert text.startswith("system:")
    assert '"name": "read_file"' in text


NAIVE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
NATIVE = "{{ tools | tojson if tools else 'none' }}\n{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "setting", "tells"),
    [
        (NAIVE, "auto", True),
        (NAIVE, "always", True),
        (NAIVE, "never", False),
        (NATIVE, "auto", False),
        (NATIVE, "always", True),
        (NATIVE, "never", False),
    ],
)
def test_tools_prompt_decides_whether_tools_are_described(template: str, setting: Any, tells: bool) -> None:
    renderer = echo(template, tools_prompt=setting)
    text = renderer.text(make_request(make_message("user", "x"), tools=(TOOL,)))
    assert renderer.describes_tools is tells
    assert ("<tool_call>" in text) is tells
    assert ("<tool_call>" in renderer.text(make_request(make_message("user", "x")))) is False


def test_calls_in_the_history_match_the_described_tools() -> None:
    turns = make_request(make_message("user", "x"), make_message("assistant", call("1")), tool_result(), tools=(TOOL,))
    rendered, native = echo(NATIVE, tools_prompt="always").text(turns), echo(NATIVE).text(turns)
    assert rendered.startswith("none")
    assert "tool_calls" not in rendered
    assert rendered.count("<tool_call>") == 2
    assert "tool_calls" in native


def test_a_separate_tools_template_counts_as_tool_support() -> None:
    assert not echo("plain", tools_template=ChatTemplate("{{ tools[0].function.name }}")).describes_tools


def test_a_tools_template_is_used_only_with_tools() -> None:
    renderer = echo("plain", tools_template=ChatTemplate("{{ tools[0].function.name }}"))
    assert renderer.text(make_request(make_message("user", "x"))) == "plain"
    assert renderer.text(make_request(make_message("user", "x"), tools=(TOOL,))) == "read_file"


def test_tools_that_a_template_cannot_write_are_described() -> None:
    """Some fail on a parameter without a description."""
    picky = (
        """{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() -%}
    {{ t.function.name + p.description }}{% endfor %}{% endfor %}"""
        + NAIVE
    )
    asked = make_request(make_message("user", "x"), tools=(TOOL,))
    renderer = echo(picky)
    assert not renderer.describes_tools
    assert "<tool_call>" in renderer.text(asked)
    with pytest.raises(TemplateFailed):
        echo(picky, tools_prompt="never").text(asked)


def test_described_tools_are_called_in_the_models_own_format() -> None:
    renderer = echo(NAIVE, write_calls=lambda calls, dumps: f"CALL {calls[0][0]} {dumps(calls[0][1])}")
    text = renderer.text(make_request(make_message("user", "x"), make_message("assistant", call()), tools=(TOOL,)))
    assert 'CALL tool_name {"parameter": "value"}\n' in text
    assert 'assistant:CALL read_file {"path": "a.txt"}' in text


def test_images_are_parts_if_the_template_supports_them_and_text_otherwise() -> None:
    request = make_request(make_message("user", "look", Image("data:image/png;base64,")))
    with_images = (
        "{% for m in messages %}{% for p in m.content %}"
        "[{{ 'PIC' if p.type == 'image' else p.text }}]{% endfor %}{% endfor %}"
    )
    assert echo(with_images).text(request) == "[look][PIC]"
    assert echo("{% for m in messages %}{{ m.content }}{% endfor %}").text(request) == "look\n[image]"


@pytest.mark.parametrize(
    ("enabled", "default", "kwargs", "expected"),
    [
        (None, None, {}, "unset"),
        (True, None, {}, "True"),
        (None, False, {}, "False"),
        (True, False, {}, "True"),
        (True, True, {"enable_thinking": False}, "False"),
    ],
)
def test_thinking_of_the_request_overrides_that_of_the_model(
    enabled: bool | None, default: bool | None, kwargs: dict[str, Any], expected: str
) -> None:
    renderer = echo("{{ enable_thinking | default('unset') }}", thinking_default=default)
    request = Request(
        model="m",
        messages=(make_message("user", "x"),),
        reasoning=Reasoning(enabled=enabled),
        chat_template_kwargs=kwargs,
    )
    assert renderer.text(request) == expected


def test_effort_and_documents_and_settings_reach_the_template() -> None:
    renderer = echo("{{ reasoning_effort }} {{ documents[0].title }} {{ style }}", template_kwargs={"style": "terse"})
    request = Request(model="m", reasoning=Reasoning(effort="low"), documents=({"title": "T"},))
    assert renderer.text(request) == "low T terse"


def test_a_client_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        CHATML.text(Request(model="m", chat_template_kwargs={"messages": []}))


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_prefilled_reply_is_continued(name: str) -> None:
    renderer = echo(builtin(name))
    rendered = renderer.apply(make_request(make_message("user", "WORD-ONE"), make_message("assistant", "Sure, here")))
    assert rendered.text.endswith("Sure, here")
    assert rendered.tail.endswith("Sure, here")
    assert "WORD-ONE" not in rendered.tail


def test_a_prefill_refused_by_the_template_is_appended() -> None:
    source = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('last must be user') }}{% endif %}"
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    )
    assert echo(source).text(make_request(make_message("user", "a"), make_message("assistant", "b"))) == "<a>bot:b"


# --- the end of the prompt --------------------------------------------------------------------------------------------

ENDING = (make_message("user", "a"), make_message("assistant", "b"))


def ended(*messages: Message, renderer: Renderer = CHATML, **fields: Any) -> str:
    return unshield(renderer.text(Request(model="m", messages=messages, **fields)))


def test_the_opening_of_the_reply_is_left_out_on_request() -> None:
    turn = "<|im_start|>user\na<|im_end|>\n"
    assert ended(ENDING[0], add_generation_prompt=False) == turn
    assert ended(ENDING[0], add_generation_prompt=True) == turn + "<|im_start|>assistant\n"


def test_a_reply_at_the_end_is_complete_if_the_client_says_how_the_prompt_ends() -> None:
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert ended(*ENDING, add_generation_prompt=False) == whole
    assert ended(*ENDING, add_generation_prompt=True) == whole + "<|im_start|>assistant\n"
    assert ended(*ENDING, continue_final_message=False) == whole + "<|im_start|>assistant\n"
    for asked in (None, True, "content"):
        assert whole.startswith(ended(*ENDING, continue_final_message=asked) + "<|im_end|>")
    assert ended(*ENDING, continue_final_message=True, add_generation_prompt=False).endswith("\nb")


@pytest.mark.parametrize("asked", [True, "reasoning_content"])
def test_reasoning_is_continued(asked: Any) -> None:
    thought = Message("assistant", (Thinking("because"),))
    text = ended(ENDING[0], thought, continue_final_message=asked)
    assert text.endswith("<|im_start|>assistant\n<think>\nbecause")
    assert CHATML.tail(text).endswith("<think>\nbecause")
    opens = echo("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}")
    assert ended(ENDING[0], thought, renderer=opens, continue_final_message=asked) == "a<think>\nbecause"
    with pytest.raises(InvalidRequest, match="writes no reasoning"):
        ended(ENDING[0], thought, renderer=echo("{{ messages[0].content }}"), continue_final_message=asked)


def test_a_prompt_that_ends_outside_a_reply_has_no_tail() -> None:
    asked = Request(model="m", messages=(make_message("user", "what is <think>?"),), add_generation_prompt=False)
    assert "<think>" not in CHATML.apply(asked).tail


def test_an_empty_reply_at_the_end_is_ignored() -> None:
    turns = make_request(make_message("user", "a"))
    assert CHATML.text(make_request(*turns.messages, make_message("assistant", ""))) == CHATML.text(turns)


def test_open_reasoning_is_detected_at_the_end_of_the_prompt() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert echo(source).apply(make_request(make_message("user", "a"))).tail == "<|im_start|>assistant\n<think>\n"


def test_raw_prompts_keep_control_tokens_and_get_one_bos() -> None:
    vocab = HuggingFaceTokenizer.from_text(
        sample_tokenizers.byte_level(), special=SpecialTokens("<|endoftext|>", adds_bos=True)
    )
    renderer = Renderer(ChatTemplate("x"), vocab)
    assert renderer.raw("a<|im_end|>") == [0, *vocab.encode("a"), 2]
    assert renderer.raw("<|endoftext|>a") == [0, *vocab.encode("a")]
    assert CHATML.raw("a") == VOCAB.encode("a")


# --- the thinking switch ----------------------------------------------------------------------------------------------

SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "can"),
    [
        (builtin("qwen3_template"), True),
        (builtin("gemma4_template"), True),
        (builtin("llama3_template"), False),
        (SWITCH, False),
        (SWITCH + "{% if thinking %}<think>{% endif %}", True),
        (SWITCH + "{% if thinking_mode is defined and thinking_mode == 'disabled' %}<no>{% endif %}", True),
        (SWITCH + "{% if not reasoning | default(true) %}<no>{% endif %}", True),
        (SWITCH + "{% if not enable_thinking %}<no>{% endif %}", True),
        (SWITCH + "{% if not enable_thinking | default(true) %}<no>{% endif %}", True),
        (SWITCH + "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}", True),
        (SWITCH + "{% if message.thinking %}<think>{% endif %}", False),
        ("{{ raise_exception('never') if enable_thinking }}" + SWITCH, False),
    ],
)
def test_a_thinking_switch_is_detected_by_rendering(vocab: HuggingFaceTokenizer, template: str, can: bool) -> None:
    modes = ("default", "enabled", "disabled") if can else ("default",)
    assert Renderer(ChatTemplate(template), vocab).thinking_modes == modes


# Reduced to what is peculiar to them: the switches by which GLM, Qwen, LFM, Nemotron and DeepSeek keep old reasoning.
KEEPING = {
    "clear_thinking": "{% if clear_thinking is defined and not clear_thinking or loop.last %}",
    "preserve_thinking": "{% if preserve_thinking | default(false) or loop.last %}",
    "keep_past_thinking": "{% set keep = keep_past_thinking | default(false) %}{% if keep or loop.last %}",
    "truncate_history_thinking": "{% if not (truncate_history_thinking | default(true)) or loop.last %}",
    "drop_thinking": "{% if not (drop_thinking | default(true)) or loop.last %}",
}
THOUGHT = "{% for m in messages %}[{{ m.content }}]{SWITCH}{{ m.reasoning_content or '' }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("switch", KEEPING)
def test_reasoning_of_earlier_turns_is_kept_if_the_template_can(switch: str) -> None:
    source = THOUGHT.replace("{SWITCH}", KEEPING[switch])
    history = make_request(
        make_message("user", "one"), make_message("assistant", Thinking("WHY"), "two"), make_message("user", "three")
    )
    assert echo(source).apply(history).text == "[one][two]WHY[three]"
    overruled = {switch: switch in ("clear_thinking", "truncate_history_thinking", "drop_thinking")}
    assert echo(source, template_kwargs=overruled).apply(history).text == "[one][two][three]"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_separator_between_text_and_call_is_detected(name: str) -> None:
    renderer = Renderer(ChatTemplate(builtin(name)), VOCAB)
    history = make_request(
        make_message("user", "go"), make_message("assistant", "Looking.", call()), tool_result(), tools=(TOOL,)
    )
    rest = renderer.apply(history).text.partition("Looking.")[2]
    assert rest.startswith(renderer.separator)
    assert not rest.removeprefix(renderer.separator)[0].isspace()


SPECIALS = ("<|im_end|>", "<think>", "</think>")
SHIELD = Shield(SPECIALS)
CONVERSATION = MessageConverter(SPECIALS, ToolDefinitions(SHIELD), SHIELD, images=False)


def test_a_reply_keeps_its_reasoning_tags_but_no_other_control_tokens() -> None:
    (entry,) = CONVERSATION.convert(make_request(make_message("assistant", "<think>a</think>b<|im_end|>")))
    assert entry["content"] == f"<think>a</think>b<{SENTINEL}|im_end|>"
    (entry,) = CONVERSATION.convert(make_request(make_message("user", "<think>")))
    assert entry["content"] == f"<{SENTINEL}think>"


def test_a_control_token_in_json_escapes_is_found() -> None:
    (entry,) = CONVERSATION.convert(
        make_request(make_message("assistant", call(arguments='{"path": "\\u003c|im_end|>"}')))
    )
    assert entry["tool_calls"][0]["function"]["arguments"] == {"path": f"<{SENTINEL}|im_end|>"}


def test_a_control_token_across_two_blocks_is_found() -> None:
    shield = Shield(["a\nb"])
    conversation = MessageConverter(("a\nb",), ToolDefinitions(shield), shield, images=False)
    (entry,) = conversation.convert(make_request(make_message("user", "a", "b")))
    assert entry["content"] == f"a{SENTINEL}\nb"


def test_blocks_of_a_message_are_joined_as_lines_and_its_name_is_kept() -> None:
    message = Message("user", (Text("one"), Text("two")), name="Ann")
    assert CONVERSATION.convert(make_request(message)) == [{"role": "user", "content": "one\ntwo", "name": "Ann"}]


def test_an_empty_message_is_empty_text() -> None:
    assert CONVERSATION.convert(make_request(make_message("user"), make_message("assistant"))) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]


BOX = ToolDefinitions(Shield(["<|im_end|>"]))


def test_only_tools_that_the_model_can_call_are_offered() -> None:
    tools = [Tool("a"), Tool("b", deferred=True), Tool("c", kind="server"), Tool("d", kind="custom")]
    offered = BOX.offered(tools)
    assert [tool["function"]["name"] for tool in offered] == ["a", "d"]
    assert offered[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert offered[1]["function"]["parameters"]["required"] == ["input"]


def test_equal_tool_lists_are_converted_once() -> None:
    assert BOX.offered([Tool("a", "x")]) is BOX.offered([Tool("a", "x")])
    assert BOX.offered([Tool("a", "x")]) is not BOX.offered([Tool("a", "y")])


def test_the_cache_of_tool_lists_is_bounded() -> None:
    box = ToolDefinitions(Shield([]))
    first = box.offered([Tool("a")])
    for number in range(100):
        box.offered([Tool(f"tool{number}", "d" * 100_000)])
    assert box.offered([Tool("a")]) == first
    assert box.offered([Tool("a")]) is not first


def test_tool_definitions_are_shielded() -> None:
    tool = Tool("a", "say <|im_end|>", {"properties": {"<|im_end|>": {"enum": ["<|im_end|>"]}}})
    text = instructions(BOX.offered([tool]))
    assert "<|im_end|>" not in text
    assert text.count(SENTINEL) == 3


def test_a_reference_to_an_unknown_tool_is_reported() -> None:
    assert "missing" in BOX.announce("missing", [])
    assert '"name": "late"' in BOX.announce("late", [Tool("late", deferred=True)])


def test_the_grammar_of_a_custom_tool_is_described() -> None:
    rendered = definition(
        Tool("d", "Edits.", kind="custom", grammar={"syntax": "lark", "definition": "start: A\n"}), Shield([])
    )
    assert rendered["function"]["description"] == "Edits.\nThe input is text of this form (lark):\nstart: A"
    for grammar in (None, {}, {"definition": 7}):
        plain = definition(Tool("d", "Edits.", kind="custom", grammar=grammar), Shield([]))
        assert plain["function"]["description"] == "Edits."


@pytest.mark.parametrize(("template", "count"), [("Q: {{ messages[0].content }}", 1), ("{{ bos_token }}Q", 1)])
def test_a_file_that_begins_prompts_with_a_token_gets_it_once(
    vocab: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch, template: str, count: int
) -> None:
    monkeypatch.setattr(vocab, "begins_prompts", True, raising=False)
    monkeypatch.setattr(vocab, "bos_token", "<s>")
    text = Renderer(ChatTemplate(template, bos_token="<s>"), vocab).text(make_request(make_message("user", "hi")))
    assert (text.count("<s>"), text.startswith("<s>")) == (count, True)


def test_a_template_that_takes_long_is_left_to_a_thread() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if messages[-1].content == 'slow' %}"
        "{% for a in range(2000) %}{% for b in range(1000) %}{% set c = b %}{% endfor %}{% endfor %}{% endif %}"
    )
    renderer, quick, slow = (
        echo(source),
        make_request(make_message("user", "Hi")),
        make_request(make_message("user", "slow")),
    )
    assert renderer.quick_text(quick) == renderer.text(quick)
    assert renderer.quick_text(slow) is None
    assert "slow" in renderer.text(slow)  # its own budget is larger
    assert renderer.quick_text(quick) is None  # known to be costly now
