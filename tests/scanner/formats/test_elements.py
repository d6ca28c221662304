from __future__ import annotations

import pytest

from modelyard.core.request import Tool
from tests.scanner.reading import calls_of, scan

NS = "]<]minimax[>["
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


def _call(*elements: str) -> str:
    inner = "".join(e.replace("<", f"{NS}<") for e in elements)
    return f'{NS}<tool_call>\n{NS}<invoke name="f">{inner}{NS}</invoke>\n{NS}</tool_call>'


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
        ("<odd><item><x>1</x></item></odd>", '{"odd": [{"x": "1"}]}'),
        ("", "{}"),
    ],
)
def test_elements_become_what_the_schema_says(elements: str, arguments: str) -> None:
    raw = _call(elements).replace("\0", "<]")
    for chunks in ([raw], list(raw)):
        assert calls_of(scan(chunks, "minimax_m3", tools=[Tool("f", parameters=SCHEMA)])) == [("f", arguments)]


def test_a_schema_that_refers_to_itself_ends() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    heard = scan([_call("<x><y>1</y></x>")], "minimax_m3", tools=[Tool("f", parameters=loop)])
    assert calls_of(heard) == [("f", '{"x": {"y": "1"}}')]


def test_nesting_without_end_is_no_call() -> None:
    heard = scan([_call("<a>" * 500)], "minimax_m3", tools=[Tool("f")])
    assert calls_of(heard) == []
    assert len(calls_of(heard, complete=False)) == 1
