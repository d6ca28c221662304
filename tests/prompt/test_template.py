"""Chat templates: the sandbox, its limits, and filters."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.prompt import template as template_module
from modelyard.prompt.template import (
    ChatTemplate,
    TemplateFailed,
    TemplateRefused,
    environment,
    tojson,
    with_json,
)
from modelyard.prompt.template_budget import Frozen


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
