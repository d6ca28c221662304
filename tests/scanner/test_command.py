"""`modelyard parse`, from standard input to standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from modelyard.cli import app
from modelyard.core.errors import InvalidRequest
from modelyard.scanner.command import read_tools
from modelyard.scanner.formats import names

RAW = '<think>\nHm.\n</think>\n\nSo é.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "err", Console(width=200, stderr=True))


def _run(raw: str | bytes, *arguments: str) -> Result:
    return CliRunner().invoke(app.app, ["parse", *arguments], input=raw)


def _parsed(raw: str | bytes, *arguments: str) -> Any:
    shown = _run(raw, *arguments)
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.parametrize("chunks", [[], ["--chunks", "1"], ["--chunks", "7"], ["--chunks", "100000"]])
def test_it_prints_reasoning_content_and_calls_however_the_output_is_cut(chunks: list[str]) -> None:
    assert _parsed(RAW, "--format", "hermes", *chunks) == {
        "reasoning": "Hm.",
        "content": "So é.",
        "tool_calls": [{"name": "add", "arguments": '{"x": 1}'}],
    }


def test_nothing_in_nothing_out() -> None:
    assert _parsed("", "--format", "hermes") == {"reasoning": "", "content": "", "tool_calls": []}


def test_an_unknown_format_is_an_error_that_lists_the_known_ones() -> None:
    shown = _run(RAW, "--format", "hermez")
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert "Did you mean 'hermes'" in shown.stderr
    assert all(name in shown.stderr for name in names())


def test_auto_detects_from_a_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("<TOOLCALL>[…]</TOOLCALL>")
    raw = '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>'
    found = _parsed(raw, "--format", "auto", "--template", str(template))
    assert found["tool_calls"] == [{"name": "add", "arguments": "{}"}]


def test_auto_without_a_template_says_what_is_missing() -> None:
    shown = _run(RAW, "--format", "auto")
    assert shown.exit_code == 2
    assert "--template" in shown.stderr


def test_tools_give_values_their_types_and_other_names_become_text(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]))
    raw = "<tool_call>\n<function={}>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    options = ("--format", "qwen3_coder", "--tools", str(tools))
    assert _parsed(raw.format("add"), *options)["tool_calls"] == [{"name": "add", "arguments": '{"x": 1}'}]
    assert "other" in _parsed(raw.format("other"), *options)["content"]


def test_the_tail_of_the_prompt_may_open_the_reasoning() -> None:
    assert _parsed("Hm.</think>So.", "--format", "think", "--prefill", "<think>\n")["reasoning"] == "Hm."


def test_broken_bytes_are_read_all_the_same() -> None:
    assert _parsed(b"a\xffb\r\n", "--format", "plain")["content"] == "a\ufffdb\r\n"


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
def test_tools_are_read_in_every_shape(given: Any) -> None:
    (tool,) = read_tools(json.dumps(given).encode())
    assert (tool.name, tool.parameters) == ("add", SCHEMA)


@pytest.mark.parametrize("given", ["{", "3", '["add"]', '[{"type": "function"}]', '[{"name": 7}]', '{"tools": 1}'])
def test_what_is_no_list_of_tools_is_an_error(given: str) -> None:
    with pytest.raises(InvalidRequest):
        read_tools(given.encode())
