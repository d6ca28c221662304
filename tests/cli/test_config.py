"""`modelyard check`: the rows that describe a configuration."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from modelyard.cli import app, console
from modelyard.cli.config import cache_rows, find_editor, model_rows, route_rows
from modelyard.cli.console import complete_library, complete_models
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig
from modelyard.core.errors import InvalidRequest, NotFound
from tests.library.files import write_gguf

TEXT = """
[models.m]
backend = "fake"
aliases = ["big"]
[models.n]
backend = "fake"
enabled = false
autoload = true
n_ctx = 64
[caches.main]
model = "m"
n_ctx = 100
parallel = 3
[caches.fast]
model = "m"
n_ctx = 50
overflow = "strict"
[[routes]]
match = ["*haiku*", "*mini*"]
endpoint = "/v1/*"
cache = "fast"
[[routes]]
match = "out*"
model = "n"
allow_remote = true
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "c.toml").write_text(TEXT)
    return load_config(Path("c.toml"), env={}, cwd=tmp_path)


def test_rows_show_the_effective_configuration(loaded: LoadedConfig) -> None:
    router = loaded.config.router()
    assert model_rows(router.catalog) == [("m", "fake", "big", "at start", ""), ("n", "fake", "", "on demand", "")]
    assert cache_rows(router.catalog) == [
        ("main", "m", "100", "3", "300", "clamp", ""),
        ("fast", "m", "50", "1", "50", "strict", ""),
        ("n", "n", "64", "1", "64", "clamp", ""),
    ]
    assert route_rows(router) == [
        ("m", "*", "m", "main", "100", ""),
        ("big", "*", "m", "main", "100", ""),
        ("n", "*", "n", "n", "64", ""),
        ("*haiku* | *mini*", "/v1/*", "m", "fast", "50", ""),
        ("out*", "*", "n", "n", "64", ""),
    ]


@pytest.mark.parametrize("backend", ["openai_remote", "litellm"])
@pytest.mark.parametrize(("settings", "window"), [("", None), ("n_ctx = 9000", 9000)])
def test_the_window_of_a_remote_model_is_unknown_unless_it_is_set(
    tmp_path: Path, backend: str, settings: str, window: int | None
) -> None:
    fields = {"openai_remote": 'remote_base_url = "http://a/v1"\nremote_model = "x"', "litellm": 'litellm_model = "x"'}
    text = f'[models.far]\nbackend = "{backend}"\n{fields[backend]}\n{settings}\n'
    (tmp_path / "c.toml").write_text(text + '[[routes]]\nmatch = "*"\nmodel = "far"\n')
    router = load_config(Path("c.toml"), env={}, cwd=tmp_path).config.router()
    shown = "unknown" if window is None else str(window)
    assert [(row[2], row[4]) for row in cache_rows(router.catalog)] == [(shown, shown)]
    assert {row[4] for row in route_rows(router)} == {shown}


REMOTE = {"backend": "openai_remote", "remote_base_url": "http://a/v1", "remote_model": "x"}


@pytest.mark.parametrize(
    ("models", "answers"),
    [
        ({"far": REMOTE, "a": {"backend": "fake"}, "b": {"backend": "fake"}}, None),
        ({"far": REMOTE, "a": {"backend": "fake"}}, "a"),
        ({"a": {"backend": "fake", "enabled": False}, "b": {"backend": "fake"}}, "b"),
        ({"a": {"backend": "fake", "enabled": False}}, "a"),
        ({"a": {"backend": "fake", "enabled": False}, "b": {"backend": "fake", "enabled": False}}, None),
        ({"far": REMOTE}, None),
    ],
)
def test_a_request_without_a_model_goes_to_the_only_one_of_this_machine(
    models: dict[str, Any], answers: str | None
) -> None:
    router = load_config(env={}, overrides={"models": models}).config.router()
    if answers is None:
        with pytest.raises(InvalidRequest, match=r"model is required: send the name of one\. Models: "):
            router.resolve("default", "/completion")
    else:
        assert router.resolve("default", "/completion").model == answers


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's file; the current folder is an empty project."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    for name in ("VISUAL", "EDITOR", "MODELYARD_API_KEY", "LLM_POOL_SETTINGS_PATH"):
        monkeypatch.delenv(name, raising=False)
    for printer in (console.out, console.err):
        monkeypatch.setattr(printer, "_width", 200)
    return tmp_path / "home" / "modelyard"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, arguments)


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_path_lists_every_file_with_what_becomes_of_it(home: Path):
    write(home / "modelyard.toml", "")
    write(Path("config/settings.json"), '{"theme": "dark"}')
    states = [line.split()[0] for line in invoke("config", "path").stdout.splitlines()]
    assert states == ["read", "ignored", "absent", "absent", "then"]
    write(Path("config/settings.json"), '{"service": {"port": 1}}')
    write(Path("modelyard.toml"), "")
    shown = invoke("config", "path").stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["read", "read", "absent", "unused", "then"]
    assert "settings.json is used instead" in shown
    assert invoke("config", "path", "--config", "x.toml").stdout.startswith("missing")


def test_show_is_toml_with_the_source_of_every_value(home: Path):
    write(home / "modelyard.toml", '[http]\nport = 1\n[models."a b"]\nbackend = "fake"\naliases = ["x"]\n')
    write(Path("modelyard.toml"), '[http]\nport = 2\n[[keys]]\nname = "k"\nkey = "very-secret-key"\n')
    shown = invoke("config", "show").stdout
    assert f"port = 2  # {Path.cwd() / 'modelyard.toml'}" in shown
    assert f'backend = "fake"  # {home / "modelyard.toml"}' in shown
    assert "very-secret-key" not in shown
    parsed = tomllib.loads(shown)
    assert (parsed["http"]["port"], parsed["models"]["a b"]["aliases"]) == (2, ["x"])
    assert "keepalive_s = 5.0" in invoke("config", "show", "--all").stdout
    rows = [json.loads(line) for line in invoke("config", "show", "--json").stdout.splitlines()]
    assert {"path": "http.port", "value": 2, "source": str(Path.cwd() / "modelyard.toml")} in rows


def test_a_foreign_settings_file_is_one_line_in_every_command():
    write(Path("config/settings.json"), '{"theme": "dark"}')
    for command in (("check",), ("config", "show"), ("models", "list"), ("models", "show", "smollm2")):
        shown = invoke(*command)
        assert shown.exit_code == 0, shown.stderr
        assert [line for line in shown.stderr.splitlines() if "settings.json" in line] == [
            f"note {Path.cwd()}/config/settings.json is ignored: it has no settings of Modelyard, only 'theme'. "
            "--config or LLM_POOL_SETTINGS_PATH reads it in any case."
        ]
    assert "theme" in invoke("check", "--config", "config/settings.json").stderr, "a named file is read"


# --- edit -------------------------------------------------------------------------------------------------------------


def edit_with(monkeypatch: pytest.MonkeyPatch, script: str) -> Result:
    """An editor that is a shell script; the file is its first argument."""
    editor = Path("editor.sh")
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", f"{editor.resolve()} --wait" if "$2" in script else str(editor.resolve()))
    return invoke("config", "edit")


def test_edit_creates_a_template_that_is_valid_and_private(home: Path, monkeypatch: pytest.MonkeyPatch):
    shown = edit_with(monkeypatch, "exit 0")
    assert shown.exit_code == 0
    assert "is valid" in shown.stdout
    file = home / "modelyard.toml"
    assert file.stat().st_mode & 0o077 == 0
    examples = file.read_text().partition("# [http]")[1:]
    assert tomllib.loads("".join(examples).replace("# ", "", 1).replace("\n# ", "\n"))["http"]["port"] == 8000


def test_edit_says_what_is_wrong(home: Path, monkeypatch: pytest.MonkeyPatch):
    write(home / "modelyard.toml", "[http]\nport = 1\n")
    shown = edit_with(monkeypatch, 'echo "[htpp]" > "$2"')
    assert shown.exit_code == 1
    assert "Did you mean 'http'?" in shown.stderr
    assert "modelyard config edit again" in shown.stderr


def test_an_editor_that_fails_or_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    failed = edit_with(monkeypatch, "exit 3")
    assert (failed.exit_code, "exit code 3" in failed.stderr) == (1, True)
    monkeypatch.setenv("VISUAL", "/nowhere/editor")
    missing = invoke("config", "edit")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    with pytest.raises(NotFound, match="set EDITOR"):
        find_editor({"PATH": "/nowhere"})


# --- completion -------------------------------------------------------------------------------------------------------


def test_models_of_the_configuration_and_the_library_are_completed():
    write(Path("modelyard.toml"), '[models.quick]\nbackend = "fake"\naliases = ["quail"]\n')
    write_gguf(Path("tiny.gguf"))
    assert invoke("pull", "tiny.gguf").exit_code == 0
    assert complete_models("qu") == ["quail", "quick"]
    assert complete_models("ti") == ["tiny"]
    assert complete_library("") == ["tiny"]
    write(Path("modelyard.toml"), "[htpp]")
    assert complete_models("") == ["tiny"], "a broken file hides its own models only"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_a_completion_script(shell: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = CliRunner().invoke(app.app, ["--show-completion", shell])
    assert shown.exit_code == 0
    assert "_MODELYARD_COMPLETE" in shown.stdout


def test_the_shell_completes_commands_and_models(monkeypatch: pytest.MonkeyPatch):
    write(Path("modelyard.toml"), '[models.quick]\nbackend = "fake"\n')
    env = {"_MODELYARD_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    shown = CliRunner().invoke(app.app, [], env={**env, "COMP_WORDS": "modelyard run qu"}, prog_name="modelyard")
    assert shown.stdout.split() == ["quick"]
