"""Settings are added to JSON with comments, and nothing that is there changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.launch.plan import add_settings

ZED = """// Zed settings
// For information see the docs.
{
  "theme": "One Dark", // dark
  /* many
     lines */
  "language_models": {
    "openai_compatible": {
      "Mine": {"api_url": "https://example.org/v1?a={b}", "available_models": []},
    },
  },
}
"""
ADDED = {"language_models": {"openai_compatible": {"Modelyard": {"api_url": "u", "available_models": [{"name": "m"}]}}}}


def test_comments_and_everything_else_stay() -> None:
    new, kept = add_settings(ZED, ADDED)
    assert kept == []
    lines = iter(new.splitlines())
    assert all(line in lines for line in ZED.splitlines()), "the old lines, in their order"
    assert '"Modelyard": {\n        "api_url": "u"' in new
    assert add_settings(new, ADDED) == (new, []), "a second time adds nothing"


def test_a_list_gets_the_items_that_it_lacks_by_their_names() -> None:
    old, _ = add_settings(ZED, ADDED)
    models = [{"name": "m", "window": 9}, {"name": "n"}]
    more = {"language_models": {"openai_compatible": {"Modelyard": {"available_models": models}}}}
    new, kept = add_settings(old, more)
    assert kept == []
    assert new.count('"name": "m"') == 1
    assert new.count('"name": "n"') == 1
    assert '"window"' not in new


def test_another_value_is_kept_and_named() -> None:
    text = '{"a": {"b": 1}, "c": "x"}'
    assert add_settings(text, {"a": {"b": 2}, "c": {"d": 1}}) == (text, ["a.b", "c"])


@pytest.mark.parametrize("text", ["", "  \n", "{}", "{ }\n", "// nothing yet\n{}"])
def test_an_empty_file_gets_the_settings(text: str) -> None:
    new, _ = add_settings(text, {"a": {"b": [1]}})
    assert json.loads("\n".join(line for line in new.splitlines() if not line.startswith("//"))) == {"a": {"b": [1]}}


@pytest.mark.parametrize("text", ["[]", "{", '{"a" 1}', '{"a": 1} {}', "nonsense", '{"a": "x}', "{1: 2}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        add_settings(text, {"a": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), JSON, max_size=3)


def is_kept(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(name in new and is_kept(value, new[name]) for name, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return all(item in new for item in old)
    return old == new


@given(OBJECTS, OBJECTS, st.sampled_from([None, 0, 2]))
def test_whatever_is_added_the_file_stays_valid_and_what_was_there_stays(
    old: dict[str, object], added: dict[str, object], indent: int | None
) -> None:
    text, _ = add_settings(json.dumps(old, indent=indent), added)
    new = json.loads(text)
    assert is_kept(old, new)
    assert set(added) <= set(new)
    assert add_settings(text, added)[0] == text
