"""Arguments between tags: where a value ends, and which JSON it means."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from modelyard.core.request import Tool
from modelyard.scanner.arguments import parameter_name, schema_types, to_json
from modelyard.scanner.formats import load
from modelyard.scanner.lenient_json import escape_json
from tests.scanner.helpers import calls_of, scan, text_of
from tests.scanner.writers import WRITERS

WRITE = Tool("write", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})


def _read(format: str, raw: str) -> object:
    """The arguments of the one call, the same in all chunks."""
    whole = scan([raw], format, tools=[WRITE])
    assert scan(list(raw), format, tools=[WRITE]) == whole
    ((name, arguments),) = calls_of(whole)
    assert (name, text_of(whole)) == ("write", "")
    return json.loads(arguments)


def _coder(*parts: str) -> str:
    return "<tool_call>\n<function=write>\n" + "\n".join(parts) + "\n</function>\n</tool_call>"


def _parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>"


def test_a_parameter_that_the_schema_does_not_know_is_passed_on() -> None:
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
def test_an_unknown_parameter_is_passed_on_in_other_families(format: str, raw: str) -> None:
    assert _read(format, raw) == {"content": "x", "mode": "w"}


def test_an_example_of_a_call_goes_into_a_file_unchanged() -> None:
    example = "Say:\n" + _parameter("city", "Rome") + "\n" + _parameter("days", "3") + "\nDone."
    assert _read("qwen3_coder", _coder(_parameter("content", example))) == {"content": example}


def test_invented_parameters_count_again_after_an_example() -> None:
    example = _parameter("city", "Rome") + " is all."
    raw = _coder(_parameter("content", example), _parameter("mode", "w"))
    assert _read("qwen3_coder", raw) == {"content": example, "mode": "w"}


def test_a_tag_without_a_valid_name_opens_nothing() -> None:
    code = 'out = f"<parameter={key}>" + value'
    raw = _coder(_parameter("content", code), _parameter("mode", "w"))
    assert _read("qwen3_coder", raw) == {"content": code, "mode": "w"}


def test_a_parameter_that_was_already_given_is_given_again() -> None:
    code = "a\n</parameter>\n<parameter=path>\nb"
    raw = _coder(_parameter("path", "x"), _parameter("content", code))
    assert _read("qwen3_coder", raw) == {"path": "b", "content": "a"}


def test_a_closing_tag_alone_is_text() -> None:
    code = 'tag = "</parameter>"\n</parameter>\nx'
    assert _read("qwen3_coder", _coder(_parameter("content", code))) == {"content": code}


def test_a_known_name_opens_a_parameter_on_the_same_line() -> None:
    raw = "<tool_call><function=write><parameter=path>a.py<parameter=content>x</parameter></function></tool_call>"
    assert _read("qwen3_coder", raw) == {"path": "a.py", "content": "x"}


def test_a_known_name_that_was_given_opens_nothing() -> None:
    raw = _coder(_parameter("path", "a.py"), _parameter("content", "Say <parameter=path> here."))
    assert _read("qwen3_coder", raw) == {"path": "a.py", "content": "Say <parameter=path> here."}


def test_an_unknown_name_without_a_closing_tag_before_it_is_text() -> None:
    assert _read("qwen3_coder", _coder(_parameter("content", "a\n<parameter=mode>\nb"))) == {
        "content": "a\n<parameter=mode>\nb"
    }


@pytest.mark.parametrize("raw", ["city", ' "city" ', "'city'", '"city" string="true"'])
def test_a_parameter_name_has_no_quotes_and_attributes(raw: str) -> None:
    assert parameter_name(raw) == "city"


# --- types ----------------------------------------------------------------------------------------------------------

ROOT = {"$defs": {"Level": {"enum": [1, 2, "max"]}, "Self": {"$ref": "#/$defs/Self"}, "a/b": {"type": "array"}}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string"}, ("string",)),
        ({"type": ["integer", "null"]}, ("integer", "null")),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, ("number", "null")),
        ({"oneOf": [{"type": "string"}, {"anyOf": [{"type": "object"}]}]}, ("string", "object")),
        ({"enum": ["a", "b"]}, ("string",)),
        ({"const": True}, ("boolean",)),
        ({"$ref": "#/$defs/Level"}, ("integer", "string")),
        ({"$ref": "#/$defs/a~1b"}, ("array",)),
        ({"$ref": "#/$defs/Self"}, ()),
        ({"$ref": "#/nowhere"}, ()),
        ({"properties": {}}, ("object",)),
        ({"items": {}}, ("array",)),
        ({"type": "integer", "nullable": True}, ("integer", "null")),
        ({"type": "fancy"}, ()),
        ({"type": "float"}, ("number",)),
        ({"type": ["int", "None"]}, ("integer", "null")),
        ({"type": "uint64"}, ("integer",)),
        ({"type": "Dict[str, int]"}, ("object",)),
        ({"type": "list<str>"}, ("array",)),
        ({"type": "bool"}, ("boolean",)),
        ({"type": "varchar"}, ("string",)),
        ({"type": "any"}, ("any",)),
        ({"type": "integrity"}, ()),
        ({"type": 5}, ()),
        ({"type": [5, "str"]}, ("string",)),
        ({}, ()),
        (None, ()),
        (True, ()),
    ],
)
def test_schema_types_are_found(schema: Any, found: tuple[str, ...]) -> None:
    assert schema_types(schema, ROOT) == found


@pytest.mark.parametrize(
    ("raw", "allowed", "expected"),
    [
        ("5", ("integer",), "5"),
        (" 5\n", ("integer",), "5"),
        ("5.0", ("integer",), "5"),
        ("5.5", ("integer",), '"5.5"'),
        ("5.50", ("number",), "5.50"),
        ("1e3", ("number",), "1e3"),
        ("five", ("integer",), '"five"'),
        ("True", ("boolean",), "true"),
        ("false", ("boolean",), "false"),
        ("maybe", ("boolean",), '"maybe"'),
        ("null", ("integer", "null"), "null"),
        ("None", ("string", "null"), "null"),
        ("null", ("string",), '"null"'),
        ("none", ("string", "null"), '"none"'),
        ("5", ("string", "integer"), "5"),
        ("5", ("integer", "string"), "5"),
        ("x", ("integer", "string"), '"x"'),
        ("05", ("integer", "string"), '"05"'),
        ("5.0", ("integer", "string"), '"5.0"'),
        ("1", ("boolean", "string"), '"1"'),
        ("1", ("boolean", "integer"), "1"),
        ("1", ("boolean",), "true"),
        ("TRUE", ("string", "boolean"), "true"),
        ("True", ("string", "boolean"), "true"),
        ('{"a": 1}', ("string", "object"), '{"a": 1}'),
        ("{'a': 1}", ("string", "object"), "\"{'a': 1}\""),
        ("{a}", ("string", "object"), '"{a}"'),
        ("[1]", ("string", "object"), '"[1]"'),
        ("{'a': 1}", ("null", "object"), '{"a": 1}'),
        ("5", ("any",), "5"),
        ("five", ("any",), '"five"'),
        ("[1, 'a']", ("array",), '[1, "a"]'),
        ('{"a": 1}', ("array", "object"), '{"a": 1}'),
        ("[1", ("array",), "[1]"),
        ("not json", ("object",), '"not json"'),
        ('[{\\"a\\": 1}]', ("array",), '[{"a": 1}]'),
        ("\"{'a': 1}\"", ("object",), '{"a": 1}'),
        ('"[1]"', ("array", "null"), "[1]"),
        ('"[1]"', ("array", "string"), '"\\"[1]\\""'),
        ('"text"', ("array",), '"\\"text\\""'),
        (" a\n", ("string",), '" a\\n"'),
        ("true", ("integer",), '"true"'),
    ],
)
def test_a_value_becomes_the_json_that_its_types_allow(raw: str, allowed: tuple[str, ...], expected: str) -> None:
    assert to_json(raw, allowed) == expected


def test_half_characters_do_not_break_a_string() -> None:
    assert escape_json("a\ud800b") == "a?b"


# --- in every format --------------------------------------------------------------------------------------------------

_PLACES = Tool(
    "search",
    parameters={"properties": {"place": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}}},
)
_NOW = Tool("now", parameters={"type": "object", "properties": {}})


def _written(format: str, **given: Any) -> str:
    return WRITERS[format]("", "", [(_PLACES, given)])


# The families that write every argument between tags, not all of them together as JSON or Python.
TAGGED = [format for format in WRITERS if not re.search(r"""["']?place["']?\s*[:=]""", _written(format, place="Roma"))]
every_format = pytest.mark.parametrize("format", WRITERS)
tagged_format = pytest.mark.parametrize("format", TAGGED)


def _calls(format: str, raw: str, tools: Sequence[Tool] = (_PLACES, _NOW), **options: Any) -> list[tuple[str, Any]]:
    blocks = scan([raw], format, tools=tools, **options)
    assert scan(list(raw), format, tools=tools, **options) == blocks
    assert text_of(blocks).strip() == ""
    return [(name, json.loads(arguments)) for name, arguments in calls_of(blocks)]


def test_the_families_with_tags_are_known() -> None:
    assert {"qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "deepseek_v32", "kimi_k3", "step3"} <= set(TAGGED)
    assert not {"hermes", "pythonic", "gemma4", "harmony"} & set(TAGGED)


@every_format
def test_the_last_value_of_a_parameter_counts(format: str) -> None:
    raw = _written(format, place="Roma", plac_="Luna").replace("plac_", "place")
    for stream in (True, False):
        assert _calls(format, raw, tool_stream=stream) == [("search", {"place": "Luna"})]


@every_format
def test_the_last_value_counts_if_the_schema_has_no_type(format: str) -> None:
    raw = _written(format, place="Roma", plac_="Luna").replace("plac_", "place")
    for untyped in (Tool("search"), Tool("search", parameters={"properties": {"place": {}}})):
        assert _calls(format, raw, [untyped]) == [("search", {"place": "Luna"})]


@tagged_format
def test_a_repeated_argument_is_sent_once_if_it_is_not_streamed(format: str) -> None:
    raw = _written(format, place="Roma", plac_="Luna").replace("plac_", "place")
    assert calls_of(scan([raw], format, tools=[_PLACES], tool_stream=False))[0][1].count('"place"') == 1


@tagged_format
def test_the_values_of_a_repeated_list_are_its_items(format: str) -> None:
    raw = _written(format, tags="a", tag_="b").replace("tag_", "tags")
    assert _calls(format, raw) == [("search", {"tags": ["a", "b"]})]
    raw = _written(format, tags="a", tag_="b", place="Roma").replace("tag_", "tags")
    assert _calls(format, raw) == [("search", {"tags": ["a", "b"], "place": "Roma"})]
    raw = _written(format, tags=["a", "b"], tag_=["c"]).replace("tag_", "tags")
    assert _calls(format, raw) == [("search", {"tags": ["a", "b", "c"]})]


@tagged_format
def test_an_element_may_end_with_its_own_tag(format: str) -> None:
    raw = WRITERS[format]("", "", [(_NOW, {}), (_PLACES, {"place": "Roma"})])
    empty = re.sub(r"(<[^<>]*now[^<>/]*)>(?:\s|\]<\]minimax\[>\[)*</[^<>]*>", r"\1/>", raw)
    assert _calls(format, empty) == [("now", {}), ("search", {"place": "Roma"})]
    if "/>" in empty:
        assert _calls(format, empty.replace("/>", " />")) == [("now", {}), ("search", {"place": "Roma"})]


@tagged_format
def test_a_parameter_without_a_value_is_not_given(format: str) -> None:
    end = r"(?:<\|close\|>argument<\|sep\|>|(?:\]<\]minimax\[>\[)?<[^<>]*>)"
    for missing in ("Roma", rf"Roma\s*{end}"):
        raw = re.sub(missing, "", _written(format, place="Roma"))
        assert _calls(format, raw) in ([("search", {})], [("search", {"place": ""})])
    assert _calls(format, raw) == [("search", {})]


@tagged_format
def test_a_parameter_or_call_without_a_name_shows_only_words(format: str) -> None:
    form = load(format)
    for name in ("place", "search"):
        raw = _written(format, place="Roma").replace(name, "")
        if form.has_messages:  # its header keeps the name, else it is no message to a tool
            raw = raw.replace("to=<", "to=search<")
        for tools in (None, [_PLACES]):
            blocks = scan([raw], format, tools=tools)
            assert calls_of(blocks) == []
            assert re.fullmatch(r"(search|place|Roma|\s)*", text_of(blocks)), text_of(blocks)
            assert not [m for m in (*form.markers, *form.inner_markers) if m in text_of(blocks)]


_UNTYPED = {"n": 3, "flag": True, "items": [1], "text": "so"}
_AS_TEXT = {"n": "3", "flag": "true", "items": "[1]", "text": "so"}
_CONTAINERS = {**_AS_TEXT, "items": [1]}
# What the family's own template writes for a value that is not text. All others write JSON.
TEMPLATES_WRITE = {
    **dict.fromkeys(("qwen3_coder", "nemotron_v3", "step3p5"), _CONTAINERS),
    **dict.fromkeys(("dots", "seed_oss", "step3"), _AS_TEXT),
}


@every_format
def test_a_value_without_a_type_is_what_the_template_of_the_family_writes(format: str) -> None:
    raw = WRITERS[format]("", "", [(_NOW, _UNTYPED)])
    assert _calls(format, raw, [Tool("now")]) == [("now", TEMPLATES_WRITE.get(format, _UNTYPED))]


@every_format
@pytest.mark.parametrize("name", ["search.search", "functions.search"])
def test_an_invented_namespace_is_not_part_of_the_name(format: str, name: str) -> None:
    raw = _written(format, place="Roma").replace("search", name)
    assert _calls(format, raw) == [("search", {"place": "Roma"})]
