from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.config.problems import ConfigError
from modelyard.config.sources import (
    config_files,
    environment_keys,
    foreign_reason,
    json_lines,
    read_environment,
    read_file,
    syntax_errors,
    toml_lines,
    user_file,
)


def find_files(path: Path | None, env: Mapping[str, str], cwd: Path) -> list[Path]:
    """The files that are read."""
    return [file.path for file in config_files(path, env, cwd) if file.state == "read"]


def write(folder: Path, *names: str) -> list[Path]:
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"service": {"port": 8001}}' if file.suffix == ".json" else "")
    return files


def test_a_named_file_is_the_only_one(tmp_path: Path) -> None:
    write(tmp_path, "config/settings.json", "modelyard.toml", "mine.toml")
    assert find_files(Path("mine.toml"), {"LLM_POOL_SETTINGS_PATH": "x.json"}, tmp_path) == [tmp_path / "mine.toml"]


def test_pool_files_replace_modelyard_toml(tmp_path: Path) -> None:
    files = write(tmp_path, "config/settings.json", "config/local.json", "modelyard.toml")
    assert find_files(None, {}, tmp_path) == files[:2]


def test_modelyard_toml_is_found_without_pool_files(tmp_path: Path) -> None:
    assert find_files(None, {}, tmp_path) == []
    files = write(tmp_path, "modelyard.toml")
    assert find_files(None, {}, tmp_path) == files


def test_variables_replace_the_pool_files(tmp_path: Path) -> None:
    write(tmp_path, "config/settings.json", "config/local.json", "else/s.json", "else/local.json", "l.json")
    env = {"LLM_POOL_SETTINGS_PATH": "else/s.json"}
    assert find_files(None, env, tmp_path) == [tmp_path / "else/s.json", tmp_path / "else/local.json"]
    env["LLM_POOL_LOCAL_SETTINGS_PATH"] = str(tmp_path / "l.json")
    assert find_files(None, env, tmp_path) == [tmp_path / "else/s.json", tmp_path / "l.json"]
    del env["LLM_POOL_SETTINGS_PATH"]
    assert find_files(None, env, tmp_path) == [tmp_path / "config/settings.json", tmp_path / "l.json"]


def test_a_file_named_by_a_variable_must_exist(tmp_path: Path) -> None:
    (missing, *_) = find_files(None, {"LLM_POOL_SETTINGS_PATH": "gone.json"}, tmp_path)
    with pytest.raises(ConfigError, match=r"gone\.json: there is no such file"):
        read_file(missing)


# --- the user's file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "env", "folder"),
    [
        ("linux", {"HOME": "/h"}, "/h/.config"),
        ("linux", {"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support"),
        ("darwin", {"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x"),
        ("win32", {"APPDATA": "/a", "USERPROFILE": "/u"}, "/a"),
        ("win32", {"USERPROFILE": "/u"}, "/u/AppData/Roaming"),
    ],
)
def test_the_users_file_is_in_the_platforms_folder(platform: str, env: dict[str, str], folder: str) -> None:
    assert user_file(env, platform) == Path(folder) / "modelyard" / "modelyard.toml"


def test_a_service_without_a_home_has_no_users_file(tmp_path: Path) -> None:
    assert user_file({}, "linux") is None
    assert [file.role for file in config_files(None, {}, tmp_path)] == ["settings", "local", "project"]


def test_the_users_file_is_below_the_files_of_the_project(tmp_path: Path) -> None:
    (own,) = write(tmp_path / "home" / "modelyard", "modelyard.toml")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    assert find_files(None, env, tmp_path) == [own]
    (project,) = write(tmp_path, "modelyard.toml")
    assert find_files(None, env, tmp_path) == [own, project]
    settings = write(tmp_path, "config/settings.json", "config/local.json")
    assert find_files(None, env, tmp_path) == [own, *settings]
    assert find_files(Path("modelyard.toml"), env, tmp_path) == [project], "a named file is read alone"


# --- files of other programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"theme": "dark"}',
        "{}",
        "[1, 2]",
        "// comments\n{}",
        '{"model": "gpt-5", "engine": "v8", "log": true}',
        '{"http": {"proxy": "x"}, "editor": {"fontSize": 12}}',
        '{"http": {"port": 3000}, "theme": "dark"}',
        '{"models": {"User": {"table": "users"}}}',
        '{"models": ["a"], "routes": ["/", "/about"]}',
        '{"keys": [1], "watch": true}',
    ],
)
def test_another_programs_settings_are_ignored(tmp_path: Path, text: str) -> None:
    for name in ("settings.json", "local.json"):
        (file,) = write(tmp_path, f"config/{name}")
        file.write_text(text)
    assert find_files(None, {}, tmp_path) == []
    project = write(tmp_path, "modelyard.toml")
    assert find_files(None, {}, tmp_path) == project
    named = {"LLM_POOL_SETTINGS_PATH": "config/settings.json"}
    assert find_files(None, named, tmp_path)[0] == tmp_path / "config/settings.json", "a named file is read"


@pytest.mark.parametrize(
    "text",
    [
        '{"service": {"port": 8001}}',
        '{"engine": {"models": {"m": {"model_path": null}}}}',
        '{"engin": {"backend": "fake"}, "service": {"port": 1}}',
        '{"model": {"model_name": "m"}}',
        '{"models": {"m": {"backend": "toy"}}, "cachs": {}}',
        '{"$schema": "s", "http": {"port": 1}}',
        '{"engine": {"models": {,}}}',
    ],
)
def test_our_own_settings_are_read_also_with_mistakes(tmp_path: Path, text: str) -> None:
    (file,) = write(tmp_path, "config/settings.json")
    file.write_text(text)
    assert find_files(None, {}, tmp_path) == [file]


def test_the_overrides_of_our_own_settings_are_ours(tmp_path: Path) -> None:
    files = write(tmp_path, "config/settings.json", "config/local.json")
    files[1].write_text('{"theme": "dark"}')
    assert find_files(None, {}, tmp_path) == files


def test_the_examples_are_ours(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "configs" / "pool-settings.json"
    assert foreign_reason(example) is None


# --- reading ----------------------------------------------------------------------------------------------------------


def test_an_invalid_file_is_reported_by_name(tmp_path: Path) -> None:
    cases = [
        ("a.toml", b"[http\n", r":1: .*at the end of a table"),
        ("a.json", b'{"a": }', r"a\.json:1: is not valid JSON: expecting value\."),
        ("a.json", b"[1]", "must be a table at the top level, found list"),
        ("a.json", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("a.json", b'{"a": [1,]}', "there is a comma before the"),
        ("a.json", b'{"a": 1, "a": 2}', "is given twice"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.yaml", b"a: 1", r"a configuration is a \.toml or a \.json file"),
    ]
    for name, content, message in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message) as error:
            read_file(tmp_path / name)
        assert error.value.problems[0].source == str(tmp_path / name)


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").mkdir()
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        read_file(tmp_path / "a.toml")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_file(tmp_path / "a.json") == {"a": 1}


# --- environment variables --------------------------------------------------------------------------------------------

NAMES = {"models": ["Qwen2.5-7B", "m"], "caches": ["main"]}


def test_a_variable_sets_the_setting_that_its_name_spells() -> None:
    cases: list[tuple[str, str, Any]] = [
        ("HTTP_PORT", "9", {"http": {"port": "9"}}),
        ("HTTP__PORT", "9", {"http": {"port": "9"}}),
        ("LOG_DEBUG_MAX_BYTES", "9", {"log": {"debug_max_bytes": "9"}}),
        ("DEFAULT_MODEL", "m", {"default_model": "m"}),
        ("MODEL_MODEL_NAME", "m", {"model": {"model_name": "m"}}),
        ("MODELS__QWEN2_5_7B__N_CTX", "9", {"models": {"Qwen2.5-7B": {"n_ctx": "9"}}}),
        ("MODELS__M__GGUF_N_CTX", "9", {"models": {"m": {"gguf_n_ctx": "9"}}}),
        ("MODELS__M__MODEL_PATH", "/x", {"models": {"m": {"model_path": "/x"}}}),
        ("MODELS__NEW__BACKEND", "toy", {"models": {"new": {"backend": "toy"}}}),
        ("ENGINE__MODELS__M__ENABLED", "1", {"engine": {"models": {"m": {"enabled": "1"}}}}),
        ("ENGINE_BACKEND", "toy", {"engine": {"backend": "toy"}}),
        ("ENGINE__DECODING__TOP_K", "4", {"engine": {"decoding": {"top_k": "4"}}}),
        ("HTTP_CORS_ORIGINS", "a, b", {"http": {"cors_origins": ["a", "b"]}}),
        ("HTTP_CORS_ORIGINS", '["a"]', {"http": {"cors_origins": ["a"]}}),
        ("MODELS__M__ALIASES", "x,y", {"models": {"m": {"aliases": ["x", "y"]}}}),
        ("MODELS__M__CHAT_TEMPLATE", "{% if x %}", {"models": {"m": {"chat_template": "{% if x %}"}}}),
        ("ROUTES", '[{"cache": "main"}]', {"routes": [{"cache": "main"}]}),
        ("CACHES__MAIN__CACHE_TYPE_K", "q8_0", {"caches": {"main": {"cache_type_k": "q8_0"}}}),
    ]
    for name, value, data in cases:
        found = read_environment({f"MODELYARD_{name}": value}, NAMES)
        assert (found.data, found.problems) == (data, []), name


def test_an_unknown_variable_is_a_problem() -> None:
    cases = [
        ("MODELYARD_HTPP_PORT", "Did you mean 'MODELYARD_HTTP_PORT'?"),
        ("MODELYARD_HTTP__PRT", "Did you mean"),
        ("MODELYARD_HTTP__PORT__X", ""),
        ("MODELYARD_ENGINE__BACKEND__X", ""),
        ("MODELYARD_CACHES__MAIN__NCTX", ""),
        ("MODELYARD_ZZZ", ""),
        ("MODELYARD_", ""),
        ("MODELYARD___", ""),
    ]
    for name, hint in cases:
        found = read_environment({name: "1"}, NAMES)
        (problem,) = found.problems
        assert (problem.source, problem.path, problem.level, found.data) == ("environment", name, "error", {})
        assert hint in problem.message


def test_other_variables_and_empty_values_are_ignored() -> None:
    others = ["GOLDEN", "CACHE", "TEMPORARY_SERVER", "WORKER_INDEX", "WORKER_FOLDER", "API_KEY", "ADMIN_KEY"]
    env = {f"MODELYARD_{name}": "x" for name in others} | {"MODELYARD_HTTP_PORT": "", "PATH": "/bin"}
    found = read_environment(env, NAMES)
    assert (found.data, found.problems) == ({}, [])


def test_a_table_as_json_is_merged_with_variables_of_its_fields() -> None:
    env = {"MODELYARD_MODELS__M": '{"n_ctx": 1}', "MODELYARD_MODELS__M__PARALLEL": "2"}
    assert read_environment(env, NAMES).data == {"models": {"m": {"n_ctx": 1, "parallel": "2"}}}


def test_api_keys_refer_to_their_variables() -> None:
    assert environment_keys({"MODELYARD_API_KEY": "s3cret", "MODELYARD_ADMIN_KEY": ""}) == [
        {"name": "env", "env": "MODELYARD_API_KEY", "admin": False}
    ]


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
