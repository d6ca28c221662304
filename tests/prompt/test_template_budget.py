"""A chat template may cost a second and a few million characters, whatever it does; ordinary ones notice nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.prompt import template_budget
from modelyard.prompt.template import ChatTemplate, TemplateFailed, TemplateTooCostly, tojson
from modelyard.prompt.template_budget import BudgetExceeded, Frozen, text_size
from modelyard.prompt.template_source import builtin, formats


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(
        {"s": "x" * 100_000, "messages": [{"role": "user", "content": "hi"}]} | variables
    )


@pytest.fixture(autouse=True)
def _little_time() -> Iterator[None]:
    before = template_budget.max_seconds.set(0.1)
    yield
    template_budget.max_seconds.reset(before)


def doubled(start: str, step: str, end: str = "") -> str:
    """The step is repeated so often that a number would have 70 bits."""
    return start + step * 70 + end


BIG = "{% set x = 'a' * 1000000 %}"


def growing(start: str, step: str, then: str = "") -> str:
    return (
        "{% set ns = namespace(x="
        + start
        + ") %}{% for i in range(100) %}{% set ns.x = "
        + step
        + " %}"
        + then
        + "{% endfor %}"
    )


@pytest.mark.parametrize(
    "source",
    [
        # loops
        "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10000000000) %}{% endfor %}",
        "{% for a in s | map('upper') %}{% for b in s | map('lower') %}{% endfor %}{% endfor %}",
        BIG + "{% for i in range(100000) %}{% if loop.length and x | upper == 'b' %}{% endif %}{% endfor %}",
        "{% for a in s %}{% set x = s | sort %}{% endfor %}",
        # recursion
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
        "{% for a in s[:999] recursive %}{% if loop.depth < 9 %}{{ loop(s[:999]) }}{% endif %}{% endfor %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 40
        + "x"
        + "{% endcall %}" * 40,
        # texts that double
        growing("'xx'", "ns.x + ns.x"),
        growing("'xx'", "ns.x ~ ns.x"),
        growing("'xx'", "'%s%s' % (ns.x, ns.x)"),
        growing("'xx'", "'{0}{0}'.format(ns.x)"),
        growing("'xx'", "ns.x.replace('x', 'xx')"),
        growing("'xx'", "[ns.x, ns.x] | join"),
        doubled("{% set x = 'xx' %}", "{% set x = x + x %}"),
        doubled("{% set x = 'xx' %}", "{% set x %}{{ x }}{{ x }}{% endset %}"),
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "d(" * 40 + "'x'" + ")" * 40 + " }}",
        "{% macro d(x, n) %}{% if n %}{{ d(x + x, n - 1) }}{% endif %}{% endmacro %}{{ d('xx', 90) }}",
        doubled("{{ '\"'", " | tojson", " }}"),
        BIG + "{% set y %}{% for i in range(100000) %}{{ x }}{% endfor %}{% endset %}",
        BIG + "{% set y = x" + " ~ x" * 40 + " %}",
        BIG + "{% set y = x" + " + x" * 40 + " %}",
        # collections that double, and those that contain one another
        growing("[1]", "ns.x + ns.x"),
        growing("['x']", "[ns.x, ns.x]"),
        growing("{}", "dict(a=ns.x, b=ns.x)"),
        doubled("{% set a = ['x'] %}{% set b = ['x'] %}", "{% set a = [a, a] %}{% set b = [b, b] %}", "{{ a == b }}"),
        doubled("{% set x = namespace(a=[1]) %}", "{% set x = dict(a=x, b=[x, x]) %}", "{{ x }}"),
        growing("[]", "[ns.x, ns.x]", "{% set _ = ns.x.append(ns.x) %}"),
        "{% set a = [1] %}{% for n in a %}{% set _ = a.append(n) %}{% endfor %}",
        "{% set a = [1] %}{% for n in range(99) %}{% set _ = a.extend(a) %}{% endfor %}",
        # methods, filters and operators with a large result
        BIG + "{{ x.replace('a', x) }}",
        BIG + "{{ x | replace('a', x) }}",
        BIG + "{{ x.join(s) }}",
        BIG + "{{ s | join(x) }}",
        BIG + "{{ ([x] * 1000000) | join }}",
        "{{ 'aaaaaaaa'" + " | replace('a', 'aaaaaaaa')" * 20 + " }}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ ((9 ** 64) ** 64) ** 64 }}",
        growing("9", "ns.x * ns.x"),
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ ('%9999d' * 100000) % (1,) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ ('{0}' * 100000).format(s) }}",
        "{{ ('{a}' * 100000).format_map({'a': s}) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ {'a': [1]} | tojson(indent=999999999) }}",
        "{{ [1] | batch(9999999999, 'x') | list }}",
        "{{ 1.5 | round(999999999, 'floor') }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ strftime_now('%999999999d') }}",
    ],
)
def test_a_template_that_costs_too_much_is_stopped(source: str) -> None:
    with pytest.raises(TemplateTooCostly, match="costs too much in line 1: "):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ ('a' * 1000000).translate({97: s}) }}",
        "{{ 'x'.encode().hex() }}",
    ],
)
def test_endless_recursion_and_methods_without_limits_fail(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1" + "0" * 5000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in s %}" * 30 + "{% endfor %}" * 30,
        "{{ s" + " | upper" * 600 + " }}",
        "{{ s }}" * 30_000,
        "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
        "{% include 'x' %}",
        "{{ s | urlize }}",
    ],
)
def test_a_template_that_cannot_be_bounded_is_broken(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source)
    assert caught.value.code == "template_broken"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for a in s %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }} {% endfor %}", "1/2 2/2. "),
        ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.get('z', 'none') }}", "a=1;b=[2, 3];none"),
        ("{{ s.upper().lower().strip() }}{{ s.split('x') }}{{ s.startswith('x') }}", "xy['', 'y']True"),
        ("{{ s.replace('x', 'zz') }}{{ '-'.join(['a', 'b']) }}{{ ['a', 1] | join('+') }}", "zzya-ba+1"),
        ("{% set a = [s, d] %}{{ a[1].a }}{{ a | tojson }}", '1["xy", {"a": 1, "b": [2, 3]}]'),
        ("{{ 'a' ~ 1 ~ [2] ~ none ~ 'b' ~ 3 ~ 4 ~ 5 ~ 6 ~ 7 ~ 8 }}", "a1[2]Noneb345678"),
        ("{{ 'a' + 'b' + s + 'c' + s + s + s + s + s + s + s + 'd' }}", "abxycxyxyxyxyxyxyxyd"),
        ("{% set q = [] %}{% set _ = q.append(d) %}{% set _ = q[0].b %}{{ q }}{{ q[0] | tojson }}", None),
        ("{% macro m(x, y=[1]) %}{{ x }}{{ y }}{% endmacro %}{{ m('a') }}{{ m(y=2, x=s) }}", "a[1]xy2"),
        ("{% for a in [3, 1, 2] | sort %}{{ a }}{% endfor %}{{ [1, 2] | max }}{{ 'ab' | list }}", "1232['a', 'b']"),
        ("{{ d['a'] }}{{ d.a }}{{ d.missing is defined }}{{ d['missing'] | default('-') }}", "11False-"),
        ("{% for n in range(1000) if n % 250 == 0 %}{{ n }} {% else %}none{% endfor %}", "0 250 500 750 "),
        ("{% set x | upper %}a{{ s }}{% endset %}{{ x }}{% filter lower %}{{ x }}{% endfilter %}", "AXYaxy"),
        ("{% with a = s + s %}{{ a }}{% endwith %}{{ 'yes' if s else 'no' }}{{ 7 // 2 }}{{ 2 ** 10 }}", "xyxyyes31024"),
    ],
)
def test_ordinary_templates_render_as_before(source: str, text: str | None) -> None:
    expected = text if text is not None else "[{'a': 1, 'b': [2, 3]}]" + '{"a": 1, "b": [2, 3]}'
    assert render(source, s="xy", d={"a": 1, "b": [2, 3]}) == expected


def test_a_long_conversation_is_within_the_budget() -> None:
    template_budget.max_seconds.set(60.0)
    turn = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "word " * 200}]
    for name in formats():
        if name != "translategemma_template":
            text = ChatTemplate(builtin(name)).render({"messages": turn * 1000, "add_generation_prompt": True})
            assert text.count("word") == 400_000


def test_waiting_for_the_processor_is_not_the_work_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0, 100)
    monkeypatch.setattr(template_budget, "monotonic", lambda: next(clock))
    assert render("{% for a in 'abc' %}{{ a }}{% endfor %}") == "abc"


def test_a_template_that_names_no_changing_method_cannot_reach_one() -> None:
    with pytest.raises(TemplateFailed, match="unsafe"):
        render("{% set a = [1] %}{% set _ = a['app' ~ 'end'](2) %}")


def test_what_is_put_into_a_collection_does_not_change_any_more() -> None:
    source = "{% set a = [1] %}{% set b = [a, a] %}{% set _ = a.append(2) %}{{ a }}{{ b }}"
    assert render(source) == "[1, 2][[1], [1]]"
    with pytest.raises(TemplateFailed, match="unsafe"):
        render("{% set a = [[1]] %}{% set b = [a] %}{% set _ = b[0].append(2) %}")


def test_a_template_cannot_pay_itself() -> None:
    with pytest.raises(TemplateFailed, match="No filter named 'budget pay'"):
        render("{{ [-1000000000] | map('budget pay') | list }}")


def test_a_namespace_shows_nothing_of_those_inside_it() -> None:
    source = doubled("{% set x = namespace() %}", "{% set x = namespace(a=x, b=x) %}", "{{ x }}{{ [x] }}")
    assert render(source) == "<namespace>[<namespace>]"


def test_the_size_of_a_collection_is_that_of_its_text() -> None:
    assert text_size("abc") == 3
    assert text_size(["abc", {"de": "f"}]) > 6
    shared: list[Any] = ["x"]
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(BudgetExceeded):
        text_size(shared)


def test_an_error_names_the_line_of_the_template() -> None:
    with pytest.raises(TemplateTooCostly, match="in line 3"):
        render("a\nb\n{{ 'x' * 99999999 }}")


def test_a_template_that_was_stopped_once_is_known_to_be_costly() -> None:
    template = ChatTemplate("{{ 'x' * n }}")
    assert template.render({"n": 3}) == "xxx"
    assert not template.is_costly
    with pytest.raises(TemplateTooCostly):
        template.render({"n": 99999999})
    assert template.is_costly


def test_tool_definitions_keep_their_cached_text() -> None:
    tool = Frozen(name="x")
    assert render("{{ t | tojson }}{{ [t] | tojson }}", t=tool) == '{"name": "x"}[{"name": "x"}]'
    assert tojson(tool) is tojson(tool)
