"""Chat templates: the sandbox, its limits, and filters."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.prompt import template
from modelyard.prompt import template as template_module
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import (
    AdaptedTemplate,
    ChatTemplate,
    TemplateFailed,
    TemplateRefused,
    environment,
    tojson,
    with_json,
)
from modelyard.prompt.template_budget import Frozen
from modelyard.prompt.template_source import builtin
from modelyard.scanner.formats import load
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.prompt.histories import CHAT_TEMPLATES, HISTORIES, make_message, make_request


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ x | tojson(sort_keys=true) }}", '{"a": 1, "b": "<é>"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
        ("{{ x | tojson(separators=(',', ':')) }}", '{"b":"<é>","a":1}'),
        ("{{ x | tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9>", "a": 1}'),
    ],
)
def test_tojson_is_plain_json(source: str, text: str) -> None:
    assert render(source, x={"b": "<é>", "a": 1}) == text


@pytest.mark.parametrize("method", ["", "{% set x = [].append(1) %}"])
def test_tojson_takes_what_map_returns(method: str) -> None:
    source = method + "{{ tools | map(attribute='function') | tojson(indent=0) }}"
    assert json.loads(render(source, tools=[{"function": {"name": "now"}}])) == [{"name": "now"}]


def test_a_template_may_take_the_tools_as_text_and_the_date_as_a_variable() -> None:
    template = ChatTemplate("Today is {{ datetime }}. {{ functions }}", now=lambda: datetime(2026, 1, 2))
    assert template.mentions("tools")
    assert template.render({"tools": None}) == "Today is 2026-01-02. "
    text = template.render({"tools": [{"type": "function", "function": {"name": "now"}}]})
    assert json.loads(text.removeprefix("Today is 2026-01-02. ")) == [{"name": "now"}]


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_loops_can_break_and_continue() -> None:
    source = (
        "{% for x in [1,2,3,4] %}{% if x == 2 %}{% continue %}{% endif %}"
        "{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    )
    assert render(source) == "13"


def test_generation_blocks_render_their_body_with_a_local_scope() -> None:
    source = "{% set y = 1 %}a{% generation %}{% set y = 2 %}{{ x }}{{ y }}{% endgeneration %}{{ y }}"
    assert render(source, x="b") == "ab21"


def test_strftime_now_reads_the_clock() -> None:
    dated = ChatTemplate("{{ date_string }}", now=lambda: datetime(2031, 2, 3))
    assert (dated.render({}), dated.render({"date_string": "today"})) == ("03 Feb 2031", "today")
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2031, 2, 3))
    assert template.render({}) == "03 Feb 2031"


def test_special_tokens_are_variables() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        bos_token="<s>",
        eos_token="</s>",
        extra_tokens={"pad_token": "<p>"},
    )
    assert template.render({}) == "<s></s><p>"


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_an_unknown_filter_is_a_broken_template() -> None:
    with pytest.raises(InvalidRequest, match=r"line 1.*nope"):
        ChatTemplate("{{ x | nope }}")


def test_raise_exception_reports_the_text_of_the_template() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_failure_names_its_line() -> None:
    with pytest.raises(TemplateFailed, match="line 3"):
        render("a\nb\n{{ missing.attribute }}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ tool.nope.x }}", "'dict object' has no attribute 'nope'"),
        ("{{ 'a' + tool }}", 'can only concatenate str (not "dict") to str'),
        ("{{ 'a' + none }}", 'can only concatenate str (not "none") to str'),
        ("{{ missing | tojson }}", "Object of type undefined is not JSON serializable"),
        ("{{ none | length }}", "object of type 'none' has no len()"),
        ("{% for a in [1] %}{{ loop.nope.x }}{% endfor %}", "'loop object' has no attribute 'nope'"),
        ("{{ namespace(a=1).nope.x }}", "'namespace object' has no attribute 'nope'"),
        ("{{ tool | tojson(nope=1) }}", "a filter or method got an unexpected keyword argument 'nope'"),
        ("{{ 'a'.replace('b') }}", "a filter or method missing 1 required positional argument: 'new'"),
        ("{{ {}.pop('nope') }}", "there is no 'nope'"),
        ("{% set x = [] %}{% set _ = x.append([1]) %}{{ x[0].nope.y }}", "'list object' has no attribute 'nope'"),
    ],
)
def test_a_failure_names_no_internal_class_or_function(source: str, reason: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        render(source, tool=Frozen(name="x"))
    assert str(caught.value) == f"the chat template failed in line 1: {reason}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__init__}'.format(x) }}",
        "{{ x.__init__ }}{{ x._json.y }}",
    ],
)
def test_the_sandbox_cannot_be_escaped(source: str) -> None:
    try:
        text = render(source, messages=[], x=ChatTemplate(""))
    except TemplateFailed:
        text = ""
    assert text == ""


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_OUTPUT", 1000)
    with pytest.raises(TemplateFailed, match="longer than"):
        render("{% for a in range(2000) %}x{% endfor %}")


def test_the_variables_of_a_template_are_known() -> None:
    template = ChatTemplate(
        "{% if tools %}{{ messages[0]['role'] == 'system' }}{{ m.reasoning_content }}{% endif %}developer"
    )
    assert [template.mentions(n) for n in ("tools", "system", "role", "reasoning_content")] == [True] * 4
    assert not template.mentions("developer")
    assert not template.mentions("enable_thinking")


def test_ordinary_arithmetic_and_formatting_still_work() -> None:
    source = "{{ 3 * 4 }} {{ '-' * 3 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ '%03d' % 7 }} {{ '%s!' | format('a') }}"
    assert environment().from_string(source).render() == "12 --- 3 32 007 a!"
    source = "{{ '{:>3}'.format('x') }} {{ 'of 20310203: {}'.format(1) }} {{ '%d of 100000' % 1 }}"
    assert environment().from_string(source).render() == "  x of 20310203: 1 1 of 100000"


def test_indent_and_center_equal_those_of_jinja() -> None:
    made = environment()
    assert made.from_string("{{ 'a\nb\n\nc' | indent(2) }}").render() == "a\n  b\n\n  c"
    assert made.from_string("{{ 'a\nb' | indent('> ', true) }}").render() == "> a\n> b"
    assert made.from_string("{{ 'a' | center(3) }}").render() == " a "


def test_a_frozen_dictionary_is_serialised_once_and_equally() -> None:
    tool = Frozen(name="x", inner=Frozen(a="é"))
    assert tojson(tool) is tojson(tool)
    assert json.loads(tojson(tool)) == tool
    assert tojson(tool, indent=2) == json.dumps(tool, indent=2, ensure_ascii=False)


def test_a_template_can_append_to_its_own_list() -> None:
    text = (
        "{% set ids = [] %}{% for n in 'ab' %}{% set _ = ids.append(n) %}{% endfor %}{{ ids.pop(0) }}{{ ids | length }}"
    )
    assert render(text) == "a1"


def test_verbatim_arguments_are_rendered_verbatim() -> None:
    arguments = with_json({"b": 1, "a": "é"}, '{"b":1,  "a":"\\u00e9"}')
    assert tojson(arguments) == '{"b":1,  "a":"\\u00e9"}'
    assert tojson({"name": "x", "arguments": arguments}) == '{"name": "x", "arguments": {"b":1,  "a":"\\u00e9"}}'
    assert tojson({"name": "x", "arguments": {"b": 1}, 2: None}) == '{"name": "x", "arguments": {"b": 1}, "2": null}'
    assert json.loads(tojson(arguments, indent=2)) == {"b": 1, "a": "é"}


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
    as_text = ["calls_as_text", "results_as_text"]
    assert steps(DROPS) == ["developer_as_system", "short_call_ids", *as_text, "one_system_first"]
    assert set(steps(STRICT)) >= {*as_text, "system_in_first_user", "one_message_a_turn", "user_opens"}


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
    (both,) = template.one_message_a_turn([first, second])
    assert both == entry("assistant", "a\n\nb", reasoning_content="x\ny", tool_calls=[1, 2])
    assert first["tool_calls"] == [1]


def test_images_stay_parts_when_turns_are_joined() -> None:
    picture = {"type": "image"}
    (both,) = template.one_message_a_turn([entry("user", "look"), entry("user", [picture])])
    assert both["content"] == [{"type": "text", "text": "look"}, picture]


def test_tool_messages_are_never_joined() -> None:
    results = [entry("tool", "a"), entry("tool", "b")]
    assert template.one_message_a_turn(results) == results


def test_short_ids_are_stable_and_match_calls_with_results() -> None:
    messages = [entry("assistant", "", tool_calls=[{"id": "call_é"}]), entry("tool", "r", tool_call_id="call_é")]
    called, answered = template.short_call_ids(messages)
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) == 9
    assert template.short_call_ids([called, answered]) == [called, answered]


def test_a_lone_system_prompt_becomes_a_user_message() -> None:
    assert template.system_in_first_user([entry("system", "a"), entry("developer", "b")]) == [entry("user", "a\n\nb")]


def test_every_conversation_starts_with_a_user_message() -> None:
    assert [e["role"] for e in template.user_opens([entry("system", "s"), entry("assistant", "a")])] == [
        "system",
        "user",
        "assistant",
    ]
    assert [e["role"] for e in template.user_opens([])] == ["user"]
    assert template.user_opens([entry("user", "u")]) == [entry("user", "u")]


def test_a_template_that_reads_only_typed_parts_gets_them_and_keeps_every_role() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}"
    )
    adapted = AdaptedTemplate(ChatTemplate(source))
    entries = [{"role": "system", "content": "rule"}, {"role": "user", "content": "hi"}]
    assert adapted.render(entries, {}) == "<system>: rule</><user>: hi</>"
    assert adapted.render([{"role": "user", "content": ""}], {}) == "<user>: </>"


# --- tools ------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
NEEDS_TOOLS = """{%- for t in tools %}[{{ t.function.name }}]{% endfor -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}
{%- endfor %}{% endfor -%}"""


def called(content: str = "", *, ids: tuple[str, ...] = ("call_1",), **more: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "find", "arguments": {"place": id}}} for id in ids]
    return entry("assistant", content, tool_calls=calls, **more)


def result(id: str = "call_1", content: str = "found") -> dict[str, Any]:
    return entry("tool", content, tool_call_id=id, name="find")


def adapt(source: str, **options: Any) -> AdaptedTemplate:
    return AdaptedTemplate(ChatTemplate(source), **options)


def test_a_template_that_needs_tools_is_probed_with_and_without_them() -> None:
    adapted = adapt(NEEDS_TOOLS)
    entries = [entry("system", "rule"), entry("user", "hi")]
    assert adapted.render(entries, {"tools": TOOLS}) == "[find]<system>rule<user>hi"
    assert adapted.render(entries, {"tools": None}) == "<system>rule<user>hi"


def test_steps_may_differ_with_and_without_tools() -> None:
    """Some templates write calls only if tools are offered."""
    source = NEEDS_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [] if tools else [])")
    entries = [entry("user", "hi"), called(), result()]
    assert '{"name": "find", "arguments": {"place": "call_1"}}<tool>' in adapt(source).render(entries, {"tools": TOOLS})
    assert "<tool_call>" in adapt(source).render(entries, {"tools": None})


def test_tools_that_are_written_after_a_system_prompt_get_one() -> None:
    source = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}
    {%- if m.role == 'system' and tools %}[{{ tools[0].function.name }}]{% endif %}{% endfor -%}"""
    adapted = adapt(source)
    assert adapted.shows_tools
    assert adapted.render([entry("user", "hi")], {"tools": TOOLS}) == "<system>[find]<user>hi"
    assert adapted.render([entry("system", "rule"), entry("user", "hi")], {"tools": TOOLS}).startswith(
        "<system>rule[find]"
    )
    assert adapted.render([entry("user", "hi")], {"tools": None}) == "<user>hi"


def test_tools_are_put_into_the_system_message_for_templates_that_look_there() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '|' + m['tools'] + '|' if m['tools'] }}{% endfor %}"
    )
    text = adapt(source).render([entry("user", "hi")], {"tools": TOOLS})
    assert text == f"<system>|{json.dumps([TOOLS[0]['function']])}|<user>hi"


def test_a_template_that_names_tools_without_showing_them_does_not_support_them() -> None:
    assert not adapt("{% set tools = [] %}" + NEEDS_TOOLS).shows_tools
    assert not adapt("{% if messages[-1].role == 'user' %}{{ tools }}{% endif %}" + ROLES).shows_tools
    assert adapt(NEEDS_TOOLS).shows_tools


ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def own_calls(calls: Any, dumps: Any) -> str:
    return "".join(f"[[{name} {dumps(arguments)}]]" for name, arguments in calls)


def test_calls_that_a_template_cannot_write_are_in_the_models_own_format_and_results_keep_their_role() -> None:
    entries = [entry("user", "hi"), called("Look:"), result()]
    expected = '<user>hi<assistant>Look:\n[[find {"place": "call_1"}]]<tool>found'
    assert adapt(ROLES, write=own_calls).render(entries, {}) == expected


def test_results_are_text_only_for_templates_without_their_role() -> None:
    entries = [entry("user", "hi"), called(), result()]
    text = adapt(DROPS, write=own_calls).render(entries, {})
    assert '<bot>[[find {"place": "call_1"}]]</bot><user><tool_response>\nfound\n</tool_response></user>' in text


def test_results_without_a_role_have_the_marks_of_the_models_family() -> None:
    entries = [entry("user", "hi"), called(), result()]
    adapted = adapt(DROPS, write=own_calls, results=load("deepseek_v3").results)
    begin, end = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>", "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert f"<user>{begin}found{end}</user>" in adapted.render(entries, {})


def test_arguments_are_written_verbatim_in_a_models_own_format() -> None:
    message = called()
    message["tool_calls"][0]["function"]["arguments"] = with_json({"a": 1}, '{"a":1}')
    assert adapt(ROLES, write=own_calls).render([entry("user", "hi"), message], {}).endswith('[[find {"a":1}]]')


FIRST_CALL = """{%- for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}
{%- else %}{{ m.content }}{% endif %}{% endfor -%}"""


def test_text_and_calls_are_messages_of_their_own_for_templates_that_write_only_the_first_call() -> None:
    find = '<assistant>{"name": "find", "arguments": {"place": "%s"}}'
    entries = [entry("user", "hi"), called("Look.", ids=("a", "b")), result("a", "A"), result("b", "B")]
    expected = f"<user>hi<assistant>Look.{find % 'a'}<tool>A{find % 'b'}<tool>B"
    assert adapt(FIRST_CALL).render(entries, {}) == expected
    assert adapt(FIRST_CALL).render([entry("user", "hi"), called(), result()], {}) == (
        f"<user>hi{find % 'call_1'}<tool>found"
    )


def test_ids_contain_the_names_for_templates_that_write_nothing_else() -> None:
    source = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] -%}
    [{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}{{ m.tool_call_id }}{% endfor -%}"""
    entries = [entry("user", "hi"), called(ids=("a", "b")), result("b")]
    calls = '[functions.find:0 {"place": "a"}][functions.find:1 {"place": "b"}]'
    assert adapt(source).render(entries, {}) == f"<user>hi<assistant>{calls}<tool>foundfunctions.find:1"


def test_a_system_prompt_that_belongs_to_a_last_question_is_not_lost_without_one() -> None:
    source = """{%- set ns = namespace(system='') -%}{%- for m in messages -%}
    {%- if m.role == 'system' %}{% set ns.system = m.content %}{% else -%}
    <{{ m.role }}>{{ ns.system ~ ': ' if loop.last and m.role == 'user' and ns.system }}{{ m.content }}
    {%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor -%}"""
    asked = [entry("system", "rule"), entry("user", "one"), entry("assistant", "two"), entry("user", "three")]
    assert adapt(source).render(asked, {}) == "<user>one<assistant>two<user>rule: three"
    answered = [entry("system", "rule"), entry("user", "one"), called(), result()]
    assert adapt(source).render(answered, {}).startswith("<user>rule\n\none<assistant>")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.NAME }}{{ m.content }}{% endfor %}".replace("NAME", name)
    entries = [entry("user", "hi"), entry("assistant", "so", reasoning_content="hm, ")]
    assert adapt(source).render(entries, {}) == "<user>hi<assistant>hm, so"
