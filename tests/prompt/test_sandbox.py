from __future__ import annotations

import json

import pytest
from jinja2.exceptions import SecurityError

from modelyard.prompt.template import MAX_STEPS, Frozen, Steps, environment, spelled, tojson


def test_ordinary_arithmetic_and_formatting_still_work() -> None:
    source = "{{ 3 * 4 }} {{ '-' * 3 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ '%03d' % 7 }} {{ '%s!' | format('a') }}"
    assert environment().from_string(source).render() == "12 --- 3 32 007 a!"
    source = "{{ '{:>3}'.format('x') }} {{ 'of 20310203: {}'.format(1) }} {{ '%d of 100000' % 1 }}"
    assert environment().from_string(source).render() == "  x of 20310203: 1 1 of 100000"


def test_indent_and_center_are_what_they_are_in_jinja() -> None:
    made = environment()
    assert made.from_string("{{ 'a\nb\n\nc' | indent(2) }}").render() == "a\n  b\n\n  c"
    assert made.from_string("{{ 'a\nb' | indent('> ', true) }}").render() == "> a\n> b"
    assert made.from_string("{{ 'a' | center(3) }}").render() == " a "


def test_loops_share_one_budget() -> None:
    steps = Steps()
    assert list(steps.range(1, 4)) == [1, 2, 3]
    steps.range(MAX_STEPS - 3)
    with pytest.raises(SecurityError):
        steps.range(1)


def test_a_frozen_dictionary_is_written_once_and_the_same() -> None:
    tool = Frozen(name="x", inner=Frozen(a="é"))
    assert tojson(tool) is tojson(tool)
    assert json.loads(tojson(tool)) == tool
    assert tojson(tool, indent=2) == json.dumps(tool, indent=2, ensure_ascii=False)


def test_a_template_may_keep_a_list_of_its_own() -> None:
    text = (
        "{% set ids = [] %}{% for n in 'ab' %}{% set _ = ids.append(n) %}{% endfor %}{{ ids.pop(0) }}{{ ids | length }}"
    )
    assert environment().from_string(text).render() == "a1"


def test_a_list_that_grows_under_its_own_loop_is_stopped() -> None:
    text = "{% set ids = [1] %}{% for n in ids %}{% set _ = ids.append(n) %}{% endfor %}"
    with pytest.raises(SecurityError, match="more than"):
        environment().from_string(text).render()


def test_arguments_are_written_as_they_were_spelled_also_beside_their_name() -> None:
    arguments = spelled({"b": 1, "a": "é"}, '{"b":1,  "a":"\\u00e9"}')
    assert tojson(arguments) == '{"b":1,  "a":"\\u00e9"}'
    assert tojson({"name": "x", "arguments": arguments}) == '{"name": "x", "arguments": {"b":1,  "a":"\\u00e9"}}'
    assert tojson({"name": "x", "arguments": {"b": 1}, 2: None}) == '{"name": "x", "arguments": {"b": 1}, "2": null}'
    assert json.loads(tojson(arguments, indent=2)) == {"b": 1, "a": "é"}
