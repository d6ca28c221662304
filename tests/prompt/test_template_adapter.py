"""Adapting histories to what a template accepts."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.prompt import template_adapter
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate, TemplateRefused
from modelyard.prompt.template_adapter import AdaptedTemplate
from modelyard.prompt.template_source import builtin
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.prompt.histories import CHAT_TEMPLATES, HISTORIES, make_message, make_request

STRICT = """{{ bos_token }}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate user/assistant/user/assistant') -}}
  {%- endif -%}
  {%- if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>
  {%- else -%}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif -%}
{%- endfor -%}"""
DROPS = """{%- for m in messages -%}
  {%- if m.role == 'system' and loop.first %}<sys>{{ m.content }}</sys>{% endif -%}
  {%- if m.role == 'user' %}<user>{{ m.content }}</user>{% endif -%}
  {%- if m.role == 'assistant' %}<bot>{{ m.content }}</bot>{% endif -%}
{%- endfor -%}{% if add_generation_prompt %}<bot>{% endif %}"""
NINE = """{%- for m in messages -%}
  {{ m.role }}: {{ m.content }} {{ m.tool_call_id }}
  {%- for c in m.tool_calls or [] -%}
    {%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif -%}
    [CALL {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]
  {%- endfor -%}
{%- endfor -%}"""
TEMPLATES = {"strict": STRICT, "drops": DROPS, "nine": NINE} | {name: builtin(name) for name in CHAT_TEMPLATES}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_renders_every_history_completely(
    vocab: HuggingFaceTokenizer, template: str, history: str
) -> None:
    request, words = HISTORIES[history]
    text = Renderer(ChatTemplate(TEMPLATES[template]), vocab).text(request)
    at = 0
    for word in words:
        at = text.find(word, at)
        assert at >= 0, f"{word} is missing or out of order in {text}"


def steps(source: str) -> list[str]:
    return [step.__name__ for step in AdaptedTemplate(ChatTemplate(source)).steps]


def test_requirements_of_a_template_are_detected_by_probing() -> None:
    assert steps(NINE) == ["developer_as_system", "short_call_ids"]
    assert steps(builtin("generic")) == []
    assert steps(DROPS) == ["developer_as_system", "short_call_ids", "tools_as_text", "one_system_first"]
    assert set(steps(STRICT)) >= {"tools_as_text", "system_in_first_user", "one_message_a_turn", "user_opens"}


KNOWS_DEVELOPER = """{%- for m in messages -%}
<|im_start|>{{ 'developer' if m.role in ['system', 'developer'] else m.role }}\n{{ m.content }}<|im_end|>
{%- endfor -%}"""


def test_a_developer_is_the_system_unless_the_template_knows_the_role(vocab: HuggingFaceTokenizer) -> None:
    """A template that copies any role's name shows the text, but its model was not trained on that role."""
    copies = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{%- endfor -%}"
    request = make_request(make_message("developer", "be brief"), make_message("user", "hi"))
    assert "<|im_start|>system\nbe brief" in Renderer(ChatTemplate(copies), vocab).text(request)
    assert "<|im_start|>developer\nbe brief" in Renderer(ChatTemplate(KNOWS_DEVELOPER), vocab).text(request)


def test_repr_lists_the_steps() -> None:
    assert repr(AdaptedTemplate(ChatTemplate(NINE))) == "<AdaptedTemplate [developer_as_system, short_call_ids]>"


def test_a_late_system_message_becomes_a_reminder_in_place(vocab: HuggingFaceTokenizer) -> None:
    request, _ = HISTORIES["system in the middle"]
    text = Renderer(ChatTemplate(DROPS), vocab).text(request)
    assert "<user><system-reminder>\nWORD-LATE\n</system-reminder></user><user>WORD-THREE</user>" in text


def test_a_strict_template_gets_alternating_roles(vocab: HuggingFaceTokenizer) -> None:
    text = Renderer(ChatTemplate(STRICT), vocab).text(
        make_request(make_message("system", "S"), make_message("user", "A"), make_message("user", "B"))
    )
    assert text == "[INST] S\n\nA\n\nB [/INST]"


def test_rendering_does_not_depend_on_earlier_requests(vocab: HuggingFaceTokenizer) -> None:
    renderer = Renderer(ChatTemplate(STRICT), vocab)
    simple = make_request(make_message("user", "A"))
    before = renderer.text(simple)
    for request, _ in HISTORIES.values():
        renderer.text(request)
    assert renderer.text(simple) == before


def test_a_failing_history_is_adapted_step_by_step(vocab: HuggingFaceTokenizer) -> None:
    picky = (
        "{% if messages | length > 5 %}{{ raise_exception('too many turns') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    request = make_request(*[make_message("user", f"word{n} ") for n in range(8)])
    assert Renderer(ChatTemplate(picky), vocab).text(request) == "\n\n".join(f"word{n} " for n in range(8))


def test_a_template_that_refuses_everything_reports_the_reason(vocab: HuggingFaceTokenizer) -> None:
    with pytest.raises(TemplateRefused, match="never"):
        Renderer(ChatTemplate("{{ raise_exception('never') }}"), vocab).text(make_request(make_message("user", "x")))


def entry(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def test_joined_turns_lose_nothing() -> None:
    first = entry("assistant", "a", reasoning_content="x", tool_calls=[1])
    second = entry("assistant", "b", reasoning_content="y", tool_calls=[2])
    (both,) = template_adapter.one_message_a_turn([first, second])
    assert both == entry("assistant", "a\n\nb", reasoning_content="x\ny", tool_calls=[1, 2])
    assert first["tool_calls"] == [1]


def test_images_stay_parts_when_turns_are_joined() -> None:
    picture = {"type": "image"}
    (both,) = template_adapter.one_message_a_turn([entry("user", "look"), entry("user", [picture])])
    assert both["content"] == [{"type": "text", "text": "look"}, picture]


def test_tool_messages_are_never_joined() -> None:
    results = [entry("tool", "a"), entry("tool", "b")]
    assert template_adapter.one_message_a_turn(results) == results


def test_short_ids_are_stable_and_match_calls_with_results() -> None:
    messages = [entry("assistant", "", tool_calls=[{"id": "call_é"}]), entry("tool", "r", tool_call_id="call_é")]
    called, answered = template_adapter.short_call_ids(messages)
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) == 9
    assert template_adapter.short_call_ids([called, answered]) == [called, answered]


def test_a_lone_system_prompt_becomes_a_user_message() -> None:
    assert template_adapter.system_in_first_user([entry("system", "a"), entry("developer", "b")]) == [
        entry("user", "a\n\nb")
    ]


def test_every_conversation_starts_with_a_user_message() -> None:
    assert [e["role"] for e in template_adapter.user_opens([entry("system", "s"), entry("assistant", "a")])] == [
        "system",
        "user",
        "assistant",
    ]
    assert [e["role"] for e in template_adapter.user_opens([])] == ["user"]
    assert template_adapter.user_opens([entry("user", "u")]) == [entry("user", "u")]


def test_a_template_that_reads_only_typed_parts_gets_them_and_keeps_every_role() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}"
    )
    adapted = AdaptedTemplate(ChatTemplate(source))
    entries = [{"role": "system", "content": "rule"}, {"role": "user", "content": "hi"}]
    assert adapted.render(entries, {}) == "<system>: rule</><user>: hi</>"
    assert adapted.render([{"role": "user", "content": ""}], {}) == "<user>: </>"
