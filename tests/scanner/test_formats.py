"""Every format is registered and consistent; details of single families."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from modelyard import plugins
from modelyard.core.output_format import SwitchRegion
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import FAMILIES, load, names
from tests.scanner.helpers import TOOLS, ScannedBlock, calls_of, delta_texts, pieces, scan
from tests.scanner.writers import WRITERS


def test_every_family_file_has_the_formats_under_which_it_is_found() -> None:
    for file in plugins.in_tree("scanner.formats"):
        formats = plugins.load("scanner.formats", file).FORMATS
        assert {form.name for form in formats} == set(FAMILIES.get(file, (file,))), file
        assert all(load(form.name) is form for form in formats), file


def test_a_format_is_loaded_without_importing_the_other_families() -> None:
    script = (
        "import sys; from modelyard.scanner.formats import load, names; assert len(names()) > 50; load('deepseek_v31');"
        "print([m for m in sys.modules if m.startswith('modelyard.scanner.formats.') and '._' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['modelyard.scanner.formats.deepseek']"


def test_every_region_exists_and_starts_the_same_readers() -> None:
    for form in map(load, names()):
        regions = form.regions.values()
        targets = {a.region for r in regions for a in r.markers.values() if isinstance(a, SwitchRegion)}
        assert targets | {form.start_region} <= set(form.regions), form.name
        readers = [{m for m, a in r.markers.items() if not isinstance(a, SwitchRegion)} for r in regions]
        assert all(found == readers[0] for found in readers), form.name


# --- tags that contain tokens, or consist of several ------------------------------------------------------------------

DSML = ["｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>"]
GLM = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"]
M3 = ["]<]minimax[>[", "<mm:think>", "</mm:think>", "[e~["]
TOKENS = {"deepseek_v32": DSML, "deepseek_v4": DSML, "glm45": GLM, "glm47": GLM, "minimax_m3": M3}


def _turn(format: str) -> str:
    weather, now = TOOLS[0], TOOLS[3]
    return WRITERS[format]("Hm.", "So.", [(weather, {"city": "a < b", "days": 3}), (now, {})])


@pytest.mark.parametrize(
    ("format", "specials"), [*TOKENS.items(), ("minimax_m3", [*M3, "<tool_call>", "</tool_call>"])]
)
def test_a_turn_reads_the_same_if_only_parts_of_tags_are_tokens(format: str, specials: list[str]) -> None:
    raw = _turn(format)
    single = [one for p in pieces(raw, specials) for one in ([p] if p.special else map(Piece, p.text))]
    assert scan(single, format, specials=specials) == scan([raw], format)


@pytest.mark.parametrize(("format", "specials"), TOKENS.items())
def test_a_turn_that_is_quoted_without_its_tokens_is_text(format: str, specials: list[str]) -> None:
    raw = _turn(format)
    assert "".join(b.text for b in scan([Piece(raw)], format, specials=specials)) == raw


@pytest.mark.parametrize(("format", "specials"), TOKENS.items())
def test_stray_tokens_are_not_shown(format: str, specials: list[str]) -> None:
    stray = [p for token in specials for p in (Piece(token, special=True), Piece("w. "))]
    shown = "".join(block.text for block in scan(stray, format, specials=specials))
    assert shown.split() == ["w."] * len(specials)


def _token(text: str) -> Piece:
    return Piece(text, special=True)


def test_a_value_may_quote_its_own_closing_tag() -> None:
    head = [_token("<tool_call>"), Piece("write_file"), _token("<arg_key>"), Piece("content")]
    value = [_token("</arg_key>"), _token("<arg_value>"), Piece("x</arg_value></tool_call>")]
    blocks = scan([*head, *value, _token("</arg_value>"), _token("</tool_call>")], "glm45", specials=GLM)
    assert blocks == [ScannedBlock("tool_call", '{"content": "x</arg_value></tool_call>"}', "write_file")]


def test_a_closing_tag_that_is_a_token_always_ends_a_value() -> None:
    head = [_token("<tool_call>"), Piece("get_weather"), _token("<arg_key>"), Piece("city")]
    value = [_token("</arg_key>"), _token("<arg_value>"), Piece("Rome"), _token("</arg_value>")]
    odd = [_token("<arg_key>"), Piece("odd"), _token("</arg_key>"), _token("<arg_value>"), Piece("1")]
    blocks = scan([*head, *value, *odd, _token("</arg_value>"), _token("</tool_call>")], "glm45", specials=GLM)
    assert blocks == [ScannedBlock("tool_call", '{"city": "Rome", "odd": 1}', "get_weather")]


# --- Llama 3 ----------------------------------------------------------------------------------------------------------

PYTHON = Tool("python", parameters={"properties": {"code": {"type": "string"}}})


def test_code_is_a_call_of_the_interpreter() -> None:
    blocks = scan(list('<|python_tag|>x = {"a": 1}\nprint(x < 2)\n<|eom_id|>'), "llama3_json", tools=[PYTHON])
    assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [("python", {"code": 'x = {"a": 1}\nprint(x < 2)\n'})]


def test_truncated_code_is_an_incomplete_call() -> None:
    blocks = scan(["<|python_tag|>print(1"], "llama3_json", tools=[PYTHON], truncated=True)
    assert calls_of(blocks, complete=False) == [("python", '{"code": "print(1')]


def test_brackets_in_ordinary_text_are_held_back_no_longer_than_necessary() -> None:
    scanner = Scanner(load("llama3_json"), tools=TOOLS, new_id=lambda: "c")
    texts = ["".join(delta_texts(scanner.feed([Piece(t)]))) for t in ("if {", " x[", "0] ", '{"', "a", '": 1}')]
    assert "".join(texts) == 'if { x[0] {"a": 1}'
    assert texts[:3] == ["if ", "{ x", "[0] "]


# --- the elements of MiniMax M3 ---------------------------------------------------------------------------------------

NAMESPACE = "]<]minimax[>["
SCHEMA = {
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}, "item": {"type": "string"}}}},
    "properties": {
        "at": {"$ref": "#/$defs/point"},
        "path": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "limit": {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"max": {"type": "integer"}}}]},
        "labels": {"type": "object", "additionalProperties": {"type": "integer"}},
        "either": {"anyOf": [{"type": "array", "items": {"type": "boolean"}}, {"type": "null"}]},
        "text": {"type": "string"},
    },
}


def _m3_call(elements: str) -> str:
    inner = elements.replace("<", f"{NAMESPACE}<")
    invoke = f'{NAMESPACE}<invoke name="f">{inner}{NAMESPACE}</invoke>'
    return f"{NAMESPACE}<tool_call>\n{invoke}\n{NAMESPACE}</tool_call>"


@pytest.mark.parametrize(
    ("elements", "arguments"),
    [
        ("<at><x>1.5</x></at>", '{"at": {"x": 1.5}}'),
        ("<path><item><x>1</x></item><item><x>2</x></item></path>", '{"path": [{"x": 1}, {"x": 2}]}'),
        ("<at><item>name</item></at>", '{"at": {"item": "name"}}'),
        ("<limit>5</limit>", '{"limit": 5}'),
        ("<limit><max>10</max></limit>", '{"limit": {"max": 10}}'),
        ("<labels><a>1</a><b>2</b></labels>", '{"labels": {"a": 1, "b": 2}}'),
        ("<either><item>true</item><item>false</item></either>", '{"either": [true, false]}'),
        ("<either>null</either>", '{"either": null}'),
        ("<text>[1] ] ]<] end</text>".replace("<]", "\0"), '{"text": "[1] ] ]<] end"}'),
        ("<odd><item><x>1</x></item></odd>", '{"odd": [{"x": 1}]}'),
        ("", "{}"),
    ],
)
def test_elements_become_what_the_schema_says(elements: str, arguments: str) -> None:
    raw = _m3_call(elements).replace("\0", "<]")
    for chunks in ([raw], list(raw)):
        assert calls_of(scan(chunks, "minimax_m3", tools=[Tool("f", parameters=SCHEMA)])) == [("f", arguments)]


def test_a_recursive_schema_is_no_endless_loop() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    blocks = scan([_m3_call("<x><y>1</y></x>")], "minimax_m3", tools=[Tool("f", parameters=loop)])
    assert calls_of(blocks) == [("f", '{"x": {"y": 1}}')]


def test_elements_that_are_nested_too_deeply_break_the_call() -> None:
    blocks = scan([_m3_call("<a>" * 500)], "minimax_m3", tools=[Tool("f")])
    assert calls_of(blocks) == []
    assert len(calls_of(blocks, complete=False)) == 1
