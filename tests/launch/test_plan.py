"""A plan's files, and the plan as shell commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.errors import Unavailable
from modelyard.launch.plan import LaunchPlan, add_settings, shell_script, write_files

# The shell commands that `--print` shows do in a real shell what the launcher does.


def test_shell_script_sets_variables_writes_files_and_runs_the_program(tmp_path: Path) -> None:
    settings, state = tmp_path / "a folder" / "s.json", tmp_path / "state.json"
    plan = LaunchPlan(
        arguments=("--model", "a b"),
        env={"NAME": "it's $HOME"},
        unset=("SECRET",),
        files={settings: '{"a": "$HOME"}\n'},
        initial_files={state: "first"},
        notes=("It is small.",),
    )
    script = shell_script(plan, "agent", ["-p", "say 'hi'"])
    assert script.startswith("# It is small.\n")
    agent = 'agent() { printf "%s|" "$NAME" "${SECRET-none}" "$@"; }\n'
    env = {"SECRET": "x", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", agent + script], env=env, capture_output=True)
    assert done.stdout.decode() == "it's $HOME|none|--model|a b|-p|say 'hi'|", done.stderr
    assert settings.read_text() == '{"a": "$HOME"}\n'
    assert state.read_text() == "first"

    state.write_text("changed by the agent")
    subprocess.run(["sh", "-c", agent + script], env=env, capture_output=True, check=True)
    assert state.read_text() == "changed by the agent"


def test_shell_script_shows_what_to_add_to_a_users_own_file() -> None:
    plan = LaunchPlan(user_settings={Path("/home/ada/settings.json"): {"a": 1}})
    script = shell_script(plan, "zed", [])
    assert script.startswith("# Add to /home/ada/settings.json, which is yours")
    assert '#     "a": 1\n' in script
    assert all(line.startswith("#") for line in script.splitlines()[:-1])


# --- the user's own files ---------------------------------------------------------------------------------------------


def test_settings_are_added_to_a_users_file_once_and_the_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{\n  // mine\n  "theme": "dark",\n}\n')
    plan = LaunchPlan(user_settings={path: {"server": {"url": "x"}}})
    (told,) = write_files(plan)
    (backup,) = tmp_path.glob("settings.json.*.bak")
    assert str(backup) in told
    assert backup.read_text() == '{\n  // mine\n  "theme": "dark",\n}\n'
    assert '// mine\n  "theme": "dark"' in path.read_text()
    assert '"server": {' in path.read_text()
    before = path.read_text()
    assert write_files(plan) == []
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == (before, 2)


def test_a_missing_file_is_created_and_a_users_own_value_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "editor" / "settings.json"
    plan = LaunchPlan(user_settings={path: {"server": {"url": "ours"}}})
    assert write_files(plan) == [f"added the server to {path}"]
    assert json.loads(path.read_text()) == {"server": {"url": "ours"}}
    path.write_text('{"server": {"url": "mine"}}')
    assert write_files(plan) == [f"{path} keeps its own value of server.url"]
    assert path.read_text() == '{"server": {"url": "mine"}}'


def test_a_file_that_cannot_be_read_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"theme": ')
    with pytest.raises(Unavailable, match=r"settings\.json is not JSON, so nothing was added to it: the text ends"):
        write_files(LaunchPlan(user_settings={path: {"a": 1}}))
    assert [each.name for each in tmp_path.iterdir()] == ["settings.json"]


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
