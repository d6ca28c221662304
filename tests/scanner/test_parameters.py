"""Where a value between tags ends, though it may hold the same tags itself."""

from __future__ import annotations

import json

import pytest

from modelyard.core.request import Tool
from modelyard.scanner.parameters import parameter_name
from tests.scanner.reading import calls_of, scan, text_of

WRITE = Tool("write", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})


def _read(format: str, raw: str) -> object:
    """The arguments of the one call, the same in every cutting."""
    whole = scan([raw], format, tools=[WRITE])
    assert scan(list(raw), format, tools=[WRITE]) == whole
    ((name, arguments),) = calls_of(whole)
    assert (name, text_of(whole)) == ("write", "")
    return json.loads(arguments)


def _coder(*parts: str) -> str:
    return "<tool_call>\n<function=write>\n" + "\n".join(parts) + "\n</function>\n</tool_call>"


def _parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>"


def test_a_parameter_that_the_schema_does_not_know_is_one() -> None:
    raw = _coder(_parameter("content", "x"), _parameter("mode", "w"), _parameter("path", "a.py"))
    assert _read("qwen3_coder", raw) == {"content": "x", "mode": "w", "path": "a.py"}


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        (
            "glm45",
            "<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>x</arg_value>\n"
            "<arg_key>mode</arg_key>\n<arg_value>w</arg_value>\n</tool_call>",
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="write">\n<parameter name="content">x</parameter>\n'
            '<parameter name="mode">w</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "seed_oss",
            "<seed:tool_call><function=write><parameter=content>x</parameter>"
            "<parameter=mode>w</parameter></function></seed:tool_call>",
        ),
    ],
)
def test_so_it_is_in_other_families(format: str, raw: str) -> None:
    assert _read(format, raw) == {"content": "x", "mode": "w"}


def test_an_example_of_a_call_goes_into_a_file_whole() -> None:
    example = "Say:\n" + _parameter("city", "Rome") + "\n" + _parameter("days", "3") + "\nDone."
    assert _read("qwen3_coder", _coder(_parameter("content", example))) == {"content": example}


def test_after_the_example_invented_parameters_count_again() -> None:
    example = _parameter("city", "Rome") + " is all."
    raw = _coder(_parameter("content", example), _parameter("mode", "w"))
    assert _read("qwen3_coder", raw) == {"content": example, "mode": "w"}


def test_a_tag_with_something_else_than_a_name_opens_nothing() -> None:
    code = 'out = f"<parameter={key}>" + value'
    raw = _coder(_parameter("content", code), _parameter("mode", "w"))
    assert _read("qwen3_coder", raw) == {"content": code, "mode": "w"}


def test_a_parameter_that_was_given_is_quoted() -> None:
    code = "a\n</parameter>\n<parameter=path>\nb"
    raw = _coder(_parameter("path", "x"), _parameter("content", code))
    assert _read("qwen3_coder", raw) == {"path": "x", "content": code}


def test_a_closing_tag_alone_is_quoted() -> None:
    code = 'tag = "</parameter>"\n</parameter>\nx'
    assert _read("qwen3_coder", _coder(_parameter("content", code))) == {"content": code}


def test_a_known_name_opens_a_parameter_also_on_the_same_line() -> None:
    raw = "<tool_call><function=write><parameter=path>a.py<parameter=content>x</parameter></function></tool_call>"
    assert _read("qwen3_coder", raw) == {"path": "a.py", "content": "x"}


def test_unless_it_was_given() -> None:
    raw = _coder(_parameter("path", "a.py"), _parameter("content", "Say <parameter=path> here."))
    assert _read("qwen3_coder", raw) == {"path": "a.py", "content": "Say <parameter=path> here."}


def test_an_unknown_name_without_a_closing_tag_before_it_is_quoted() -> None:
    assert _read("qwen3_coder", _coder(_parameter("content", "a\n<parameter=mode>\nb"))) == {
        "content": "a\n<parameter=mode>\nb"
    }


@pytest.mark.parametrize("raw", ["city", ' "city" ', "'city'", '"city" string="true"'])
def test_names_are_read_without_quotes_and_attributes(raw: str) -> None:
    assert parameter_name(raw) == "city"
