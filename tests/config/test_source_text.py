from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.config.sources import json_lines, syntax_errors, toml_lines

TEXT = """a = 1
b.c = [
  1,
  { x = 2 },
]
[models."q.5"]
template = '''
[not a section]
'''
# a comment
[[routes]]
match = "x"

[[routes]]
match = "y"
[[models.d.script]]
when = "z"
[models.d.script.step]
text = "t"
"""


def test_every_setting_has_the_line_where_it_begins() -> None:
    lines = toml_lines(TEXT)
    assert {path: lines[path] for path in [("a",), ("b", "c"), ("b", "c", 1, "x"), ("models", "q.5")]} == {
        ("a",): 1,
        ("b", "c"): 2,
        ("b", "c", 1, "x"): 2,
        ("models", "q.5"): 6,
    }
    assert lines["models", "q.5", "template"] == 7
    assert (lines["routes", 0], lines["routes", 1, "match"]) == (11, 15)
    assert (lines["models", "d", "script", 0, "when"], lines["models", "d", "script", 0, "step", "text"]) == (17, 19)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('backend = "fake', "a text is not closed"),
        ("backend: fake", "key = value"),
        ("backend = fake", "texts need quotes"),
        ("enabled = True", "lower case"),
        ('path = "C:\\Users\\me"', "a backslash in a text is written twice"),
        ("enabled = true\nenabled = false", "given twice in one section"),
        ("n_ctx = 8 192", "more than a comment"),
    ],
)
def test_a_syntax_error_says_what_to_write(line: str, reason: str) -> None:
    ((number, message),) = syntax_errors(f"[models.m]\n{line}\nreplicas = 1\n")
    assert reason in message
    assert number == 1 + len(line.splitlines())


def test_all_syntax_errors_are_found() -> None:
    found = syntax_errors('a = "x\nb = 1\nc = True\n[m]\nd: 1\n[m]\n')
    assert [line for line, _ in found] == [1, 3, 5, 6]


def test_what_follows_an_unclosed_list_is_not_reported() -> None:
    assert [line for line, _ in syntax_errors("a = [1,\n2\nb = 1\nc = 2\n")] == [3]
    assert len(syntax_errors('a = """x\nb = 1\nc = True\n')) == 1


def test_a_valid_text_has_no_errors() -> None:
    assert syntax_errors(TEXT) == []


def test_settings_of_json_have_lines() -> None:
    text = """{
  "service": {"port": "x",
              "host": "y"},
  "engine": {
    "models": {"m{": {"aliases": ["a", "b,",
                                  "c"], "path": "\\\"}\n"}}
  },
  "routes": [
    {"match": "x"},
    {"match": ["y"], "cache": null}
  ]
}"""
    lines = json_lines(text)
    assert (lines["service",], lines["service", "port"], lines["service", "host"]) == (2, 2, 3)
    assert lines["engine", "models", "m{", "aliases", 1] == 5
    assert lines["engine", "models", "m{", "aliases", 2] == 6
    assert lines["engine", "models", "m{", "path"] == 6
    assert (lines["routes", 0, "match"], lines["routes", 1], lines["routes", 1, "cache"]) == (9, 10, 10)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def paths(value: Any, start: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path for key, inner in entries for path in ({(*start, key)} | paths(inner, (*start, key)))}


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
@settings(deadline=None, max_examples=40)
def test_every_value_of_a_json_text_has_a_line(value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1)
    lines = json_lines(text)
    assert paths(value) <= lines.keys()
    for path, line in lines.items():
        if path and isinstance(path[-1], str) and path in paths(value):
            assert json.dumps(path[-1]) in text.splitlines()[line - 1]
