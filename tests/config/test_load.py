from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard import plugins
from modelyard.config.load import load_config, merge_tables
from modelyard.config.problems import ConfigError
from modelyard.library.default_model import DEFAULT_MODEL
from tests.config.conftest import Loader

TOY = '[models.m]\nbackend = "toy"\n'


def messages(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [f"{problem.path}: {problem.message}" for problem in error.value.problems]


def test_without_files_the_embedded_default_is_loaded(tmp_path: Path) -> None:
    loaded = load_config(env={}, cwd=tmp_path)
    assert loaded.sources == ["embedded default"]
    assert {name: cache.n_ctx for name, cache in loaded.config.caches.items()} == {"main": 8192, "fast": 8192}
    assert [route.match for route in loaded.config.routes] == [["*haiku*"]]
    assert loaded.config.default_model == "smollm2"
    model = loaded.config.models["smollm2"]
    assert (model.backend, model.path) == ("llama_cpp", DEFAULT_MODEL.path)


def test_a_file_with_models_replaces_the_embedded_default(toml: Loader) -> None:
    config = toml(TOY).config
    assert (list(config.models), config.caches, config.routes) == (["m"], {}, [])


def test_a_file_without_models_keeps_the_embedded_default(toml: Loader) -> None:
    loaded = toml("[http]\nport = 9001\n")
    assert loaded.config.http.port == 9001
    assert list(loaded.config.models) == ["smollm2"]


def test_the_environment_overrides_files_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    (tmp_path / "modelyard.toml").write_text('[http]\nport = 1\nhost = "a"\n[log]\nlevel = "error"\n')
    env = {"MODELYARD_HTTP_PORT": "2", "MODELYARD_HTTP_HOST": "b"}
    config = load_config(env=env, cwd=tmp_path, overrides={"http": {"port": 3, "workers": None}}).config
    assert (config.http.port, config.http.host, config.log.level, config.http.workers) == (3, "b", "error", 1)


def test_omitted_options_of_the_command_line_are_not_a_source(tmp_path: Path) -> None:
    assert load_config(env={}, cwd=tmp_path, overrides={"http": {"port": None}}).sources == ["embedded default"]


def test_all_errors_are_reported_with_file_path_and_suggestion(toml: Loader, tmp_path: Path) -> None:
    text = """
        htpp = 1
        [http]
        prot = 8
        port = "abc"
        [models.m]
        backend = "toy"
        spede = 2.0
        [caches.c]
        model = "n"
        n_ctx = 0
        [[routes]]
        match = "x"
        cache = "d"
    """
    with pytest.raises(ConfigError) as error:
        toml(text)
    assert messages(error) == [
        "htpp: unknown key. Did you mean 'http'?",
        "http.prot: unknown key. Did you mean 'port'?",
        "http.port: must be a whole number, got 'abc'.",
        "models.m.spede: unknown key; it is neither common to all models nor an option of toy. Did you mean 'speed'?",
        "caches.c.model: there is no model 'n'; known: m.",
        "caches.c.n_ctx: must be greater than 0, got 0.",
        "routes[0].cache: there is no cache 'd'; known: c, m.",
    ]
    assert [problem.line for problem in error.value.problems] == [2, 4, 5, 8, 10, 11, 14]
    assert {problem.source for problem in error.value.problems} == {str(tmp_path / "c.toml")}
    assert str(error.value).splitlines()[0] == f"{tmp_path / 'c.toml'}:2: htpp: unknown key. Did you mean 'http'?"


def test_errors_of_all_sections_are_reported_and_the_rest_of_the_file_is_kept(toml: Loader) -> None:
    text = """
        [[routes]]
        match = 5
        cache = "nowhere"
        [[routes]]
        cache = "main"
        model = "other"
        [models.m]
        backend = "toy"
        [models.n]
        backend = "warp_drive"
        [caches.main]
        model = "m"
    """
    with pytest.raises(ConfigError) as error:
        toml(text)
    assert [(problem.path, problem.level) for problem in error.value.problems] == [
        ("routes[0].match", "error"),
        ("routes[0].cache", "error"),
        ("routes[1].model", "error"),
        ("models.n.backend", "unavailable"),
        ("caches.main.n_ctx", "error"),
    ]
    rest = error.value.rest
    assert rest is not None
    assert list(rest.config.models) == ["m", "n"]


def test_the_syntax_errors_of_all_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "home/modelyard").mkdir(parents=True)
    (tmp_path / "home/modelyard/modelyard.toml").write_text("[http\n")
    (tmp_path / "modelyard.toml").write_text('a = "x\nb = True\n')
    with pytest.raises(ConfigError) as error:
        load_config(env={"XDG_CONFIG_HOME": str(tmp_path / "home")}, cwd=tmp_path)
    assert [(Path(p.source).parent.name, p.line) for p in error.value.problems] == [
        ("modelyard", 1),
        (tmp_path.name, 1),
        (tmp_path.name, 2),
    ]


def test_an_error_uses_the_names_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps({"service": {"port": "x"}, "engine": {"models": {"m": {"backend": "toy", "model_path": 5}}}})
    )
    with pytest.raises(ConfigError) as error:
        load_config(Path("a.json"), env={"MODELYARD_LOG_LEVEL": "loud"}, cwd=tmp_path)
    by_path = {problem.path: problem.source for problem in error.value.problems}
    file = str(tmp_path / "a.json")
    assert by_path == {
        "service.port": file,
        "engine.models.m.model_path": file,
        "MODELYARD_LOG_LEVEL": "environment",
    }


def test_an_error_names_the_file_that_sets_the_value(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/settings.json").write_text('{"service": {"port": 1}}')
    (tmp_path / "config/local.json").write_text('{"service": {"port": -1}}')
    with pytest.raises(ConfigError) as error:
        load_config(env={}, cwd=tmp_path)
    sources = [problem.source for problem in error.value.problems if problem.level == "error"]
    assert sources == [str(tmp_path / "config/local.json")]


def test_a_secret_is_never_quoted(toml: Loader) -> None:
    with pytest.raises(ConfigError) as error:
        toml('[[keys]]\nname = "a"\nkey = ["hush"]\n')
    assert "hush" not in str(error.value)


def test_local_settings_override_single_keys(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    base = {"engine": {"backend": "toy", "models": {"m": {"model_path": "/x", "replicas": 2}, "n": {}}}}
    (tmp_path / "config/settings.json").write_text(json.dumps(base))
    (tmp_path / "config/local.json").write_text('{"engine": {"models": {"m": {"enabled": true}}}}')
    models = load_config(env={}, cwd=tmp_path).config.models
    assert (models["m"].path, models["m"].replicas, models["m"].enabled) == ("/x", 2, True)
    assert models["n"].enabled is False


def test_keys_of_the_environment_add_to_those_of_the_file(toml: Loader) -> None:
    config = toml(f'{TOY}[[keys]]\nname = "a"\nhash = "sha256:{"0" * 64}"\n', MODELYARD_API_KEY="k").config
    assert [(key.name, key.admin) for key in config.keys] == [("a", False), ("env", False)]
    config = toml(TOY, MODELYARD_ADMIN_KEY="k").config
    assert [(key.name, key.env, key.admin) for key in config.keys] == [("env-admin", "MODELYARD_ADMIN_KEY", True)]


def test_a_missing_engine_is_one_problem_and_not_an_error(toml: Loader) -> None:
    loaded = toml('[models.m]\nbackend = "llama_cpp"\ngguf_n_ctx = 8\nany = "thing"\n')
    assert [(p.path, p.level) for p in loaded.problems] == [("models.m.backend", "unavailable")]
    assert loaded.problems[0].message == "'llama_cpp' is not one of the engines of this build: bare, toy."
    assert loaded.config.models["m"].options == {"any": "thing"}
    assert loaded.config.models["m"].n_ctx == 8


def test_each_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # use the real engines
    folder = Path(__file__).parents[2] / "configs"
    names = sorted(file.name for file in folder.iterdir())
    assert {"claude-code.toml", "demo.toml", "pool-settings.json"} <= set(names)
    for name in names:
        loaded = load_config(folder / name, env={})
        missing = [n for n, model in loaded.config.models.items() if model.backend not in plugins.names("engines")]
        assert [p.path for p in loaded.problems] == [f"models.{model}.backend" for model in missing]
        assert loaded.config.router().resolve(next(iter(loaded.config.models)), "/v1/messages")


def test_the_example_for_claude_code_sends_haiku_to_the_small_cache() -> None:
    router = load_config(Path(__file__).parents[2] / "configs/claude-code.toml", env={}).config.router()
    haiku, sonnet = (router.resolve(name, "/v1/messages") for name in ("claude-3-5-haiku", "claude-sonnet-4"))
    assert (haiku.cache, haiku.window, sonnet.cache, sonnet.window) == ("fast", 8192, "main", 32768)


TABLES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(st.integers() | st.lists(st.integers()), lambda c: st.dictionaries(st.sampled_from("abc"), c)),
)


@given(TABLES, TABLES, TABLES)
@settings(deadline=None, max_examples=40)
def test_later_tables_override_earlier_ones(a: Any, b: Any, c: Any) -> None:
    assert merge_tables(merge_tables(a, b), {}) == merge_tables(a, b)
    assert merge_tables(b, b) == b
    for key, value in c.items():
        if not isinstance(value, dict):
            assert merge_tables(merge_tables(a, b), c)[key] == value
