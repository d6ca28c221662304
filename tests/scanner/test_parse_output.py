"""`modelyard.scanner.parse`, and `modelyard parse` from standard input to standard output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from modelyard.cli import app
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Tool
from modelyard.plugins import UnknownPlugin
from modelyard.scanner import ParsedCall, ParsedOutput, Piece, parse
from modelyard.scanner.formats import load, names
from modelyard.scanner.parse_output import read_tools

RAW = '<think>\nHm.\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_parse_returns_reasoning_content_and_calls() -> None:
    assert parse([RAW], format="hermes") == ParsedOutput("Hm.", "So.", (ParsedCall("f", '{"x": 1}'),))


def test_parse_accepts_chunks_of_any_size_and_a_format() -> None:
    assert parse(RAW, format=load("hermes")) == parse(list(RAW), format="hermes") == parse([RAW], format="hermes")


def test_parse_reads_tokens_with_their_special_flags() -> None:
    """A marker that is a token counts only as that token, and as text inside an argument."""
    body = '{"name": "f", "arguments": {"x": "'
    tokens = [("Write ", False), ("<tool", False), ("_call>", False), (".", False), ("<tool_call>", True)]
    tokens += [(body, False), ("</think>", True), ("<|pad|>", True), ('"}}', False), ("</tool_call>", True)]
    expected = ParsedOutput("", "Write <tool_call>.", (ParsedCall("f", '{"x": "</think><|pad|>"}'),))
    assert parse(tokens, format="hermes") == expected
    assert parse([Piece(text, special) for text, special in tokens], format="hermes") == expected
    quoted = [Piece("<tool_call>"), Piece("{}")]
    assert parse(quoted, format="hermes", specials=["<tool_call>"]).content == "<tool_call>{}"


def test_an_added_token_is_text_unless_the_format_names_it() -> None:
    pieces = [
        Piece("a"),
        Piece("\n\n", added=True),
        Piece("<h1>", added=True),
        Piece("<think>", added=True),
        Piece("b"),
    ]
    assert parse(pieces, format="hermes") == ParsedOutput("b", "a\n\n<h1>", ())


def test_the_examples_of_the_documentation_give_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    examples = re.findall(r"^(parse\(.*format=.*\))\n# (.*)$", text, re.MULTILINE)
    assert len(examples) == 2
    for code, result in examples:
        assert repr(eval(code, {"parse": parse, "Piece": Piece})) == result


def test_parse_reads_only_calls_of_the_given_tools() -> None:
    assert parse([RAW], format="hermes", tools=[Tool("g")]).tool_calls == ()


def test_the_prefill_may_open_the_reasoning() -> None:
    assert parse(["Hm.</think>So."], format="think", prefill="<think>\n") == ParsedOutput("Hm.", "So.", ())


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("hermes", "Hm.</think>So."),
        ("mistral", "Hm.[/THINK]So."),
        ("think", "Hm.◁/think▷So."),
        ("glm45", "Hm.</think>So."),
    ],
)
def test_a_closing_tag_before_all_other_markers_tells_what_the_prompt_opened(format: str, raw: str) -> None:
    assert parse([raw], format=format) == parse(list(raw), format=format) == ParsedOutput("Hm.", "So.", ())


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "poolside_v1", "think"])
def test_a_quoted_closing_tag_does_not_open_the_reasoning(format: str) -> None:
    raw = "It ends with `</think>`."
    assert parse([raw], format=format) == parse(list(raw), format=format) == ParsedOutput("", raw, ())
    spelled = [("Write ", False), ("</", False), ("think>", False), (".", False)]
    assert parse(spelled, format=format, specials=["</think>"]) == ParsedOutput("", "Write </think>.", ())
    ended = [*spelled, ("</think>", True), ("So.", False)]
    assert parse(ended, format=format) == ParsedOutput("Write </think>.", "So.", ())


@pytest.mark.parametrize(
    ("format", "tags"),
    [
        ("qwen3_coder", ("<function=f>", "<function=", "<parameter=x>", "</parameter>")),
        ("minicpm5", ('<function name="f">', '<param name="x">')),
        ("minimax_m2", ('<invoke name="f">', '<parameter name="x">')),
        ("dots", ('<invoke name="f">',)),
        ("step3", ('<steptml:invoke name="f">', '<steptml:parameter name="x">')),
        ("deepseek_v32", ('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="x" string="true">')),
        ("llama3_json", ("<function=f>",)),
    ],
)
def test_a_quoted_tag_with_the_name_of_a_tool_is_text(format: str, tags: tuple[str, ...]) -> None:
    offered = [Tool("f", parameters={"type": "object", "properties": {"x": {}}})]
    for tag in tags:
        for raw in (f"Write `{tag}` there.", f'"{tag}"', f"A `{tag}`"):
            expected = ParsedOutput("", raw, ())
            assert parse([raw], format=format, tools=offered) == expected
            assert parse(list(raw), format=format, tools=offered) == expected


def test_a_call_behind_a_quotation_mark_is_a_call() -> None:
    raw = "Run `<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
    for chunks in ([raw], list(raw)):
        assert parse(chunks, format="qwen3_coder").tool_calls == (ParsedCall("f", '{"x": "1"}'),)


def test_a_later_closing_tag_does_not_open_the_reasoning() -> None:
    raw = "A <tool_call>{} B</think> C"
    assert parse([raw], format="hermes").reasoning == ""


def test_parse_returns_a_broken_call_as_text() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>'
    assert parse([raw], format="hermes") == ParsedOutput("", '{"name": "f", "arguments": {"x": oops}}', ())


def test_the_error_for_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match=r"harmony, hermes, .*plain, .*qwen3_coder, .*think"):
        parse([""], format="xml")


# --- modelyard parse -------------------------------------------------------------------------------------------------

OUTPUT = '<think>\nHm.\n</think>\n\nSo é.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def _wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.cli.console.err", Console(width=200, stderr=True))


def _run(raw: str | bytes, *arguments: str) -> Result:
    return CliRunner().invoke(app.app, ["parse", *arguments], input=raw)


def _parse(raw: str | bytes, *arguments: str) -> Any:
    result = _run(raw, *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_command_prints_the_same_for_all_chunk_sizes() -> None:
    for options in ([], ["--chunks", "1"], ["--chunks", "7"], ["--chunks", "100000"]):
        assert _parse(OUTPUT, "--format", "hermes", *options) == {
            "reasoning": "Hm.",
            "content": "So é.",
            "tool_calls": [{"name": "add", "arguments": '{"x": 1}'}],
        }


def test_the_command_accepts_an_empty_output() -> None:
    assert _parse("", "--format", "hermes") == {"reasoning": "", "content": "", "tool_calls": []}


def test_the_command_lists_the_formats_if_the_format_is_unknown() -> None:
    result = _run(OUTPUT, "--format", "hermez")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Did you mean 'hermes'" in result.stderr
    assert all(name in result.stderr for name in names())


def test_auto_detects_the_format_from_a_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("<TOOLCALL>[…]</TOOLCALL>")
    raw = '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>'
    found = _parse(raw, "--format", "auto", "--template", str(template))
    assert found["tool_calls"] == [{"name": "add", "arguments": "{}"}]


def test_auto_without_a_template_is_an_error() -> None:
    result = _run(OUTPUT, "--format", "auto")
    assert result.exit_code == 2
    assert "--template" in result.stderr


def test_tools_decide_the_types_and_other_names_become_text(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]))
    raw = "<tool_call>\n<function={}>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    options = ("--format", "qwen3_coder", "--tools", str(tools))
    assert _parse(raw.format("add"), *options)["tool_calls"] == [{"name": "add", "arguments": '{"x": 1}'}]
    assert "other" in _parse(raw.format("other"), *options)["content"]


def test_the_command_accepts_a_prefill() -> None:
    assert _parse("Hm.</think>So.", "--format", "think", "--prefill", "<think>\n")["reasoning"] == "Hm."


def test_invalid_utf8_is_replaced() -> None:
    assert _parse(b"a\xffb\r\n", "--format", "plain")["content"] == "a\ufffdb\r\n"


@pytest.mark.parametrize(
    "given",
    [
        [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        [{"type": "function", "name": "add", "parameters": SCHEMA}],
        [{"name": "add", "input_schema": SCHEMA}],
        {"tools": [{"name": "add", "parameters": SCHEMA}]},
        {"name": "add", "parameters": SCHEMA},
    ],
)
def test_tools_are_read_in_the_shape_of_every_protocol(given: Any) -> None:
    (tool,) = read_tools(json.dumps(given).encode())
    assert (tool.name, tool.parameters) == ("add", SCHEMA)


@pytest.mark.parametrize("given", ["{", "3", '["add"]', '[{"type": "function"}]', '[{"name": 7}]', '{"tools": 1}'])
def test_anything_but_a_list_of_tools_is_an_error(given: str) -> None:
    with pytest.raises(InvalidRequest):
        read_tools(given.encode())


@pytest.mark.parametrize("format", sorted(set(names()) - {"deepseek_r1"}))  # its text without a prefill is reasoning
@pytest.mark.parametrize("tag", ["<function=f>", '<function name="f">', "<parameter=x>", '<parameter name="x">'])
def test_a_quoted_tag_of_a_call_is_text_in_either_spelling(format: str, tag: str) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"x": {}}})
    text = f"Write `{tag}` there."
    assert parse([text], format=format, tools=[tool]).content == text
