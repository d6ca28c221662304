from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from modelyard import plugins
from modelyard.config.problems import ConfigError
from tests.config.conftest import Loader

BASE = """
[models.m]
backend = "toy"
aliases = ["big"]
[models.n]
backend = "toy"
[caches.main]
model = "m"
n_ctx = 100
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[caches.c]\nmodel = "mm"\nn_ctx = 1',
            "caches.c.model: there is no model 'mm'; known: m, n. Did you mean 'm'?",
        ),
        ('[caches.n]\nmodel = "m"\nn_ctx = 1', "caches.n: has the name of a model but is a cache of 'm'"),
        (
            '[[routes]]\ncache = "mian"',
            "routes[0].cache: there is no cache 'mian'; known: main, n. Did you mean 'main'?",
        ),
        ('[[routes]]\nmodel = "x"', "routes[0].model: there is no model 'x'"),
        ('[[routes]]\nmodel = "n"\ncache = "main"', "routes[0].model: cache 'main' belongs to 'm', not to 'n'"),
        ("[[routes]]\nmatch = 'x'", "routes[0]: a route needs cache or model"),
        (
            '[[routes]]\nmodel = "n"\nfallback = ["mian"]',
            "routes[0].fallback: there is no model or cache 'mian'; known: m, n, big, main. Did you mean 'main'?",
        ),
        ('[[routes]]\nmodel = "n"\nfallback = ["n"]', "routes[0].fallback: 'n' is the route's own target already"),
        ('[[routes]]\ncache = "main"\nfallback = ["n", "big"]', "'big' is the route's own target already"),
        ('[[routes]]\nmodel = "n"\nfallback = ["m", "main"]', "routes[0].fallback: 'main' is fallback 1 already"),
        ('[models.o]\nbackend = "toy"\naliases = ["big"]', "models.o.aliases[0]: 'big' is already an alias of 'm'."),
        ('[models.o]\nbackend = "toy"\naliases = ["n"]', "models.o.aliases[0]: 'n' is already the id of a model."),
        ('[[keys]]\nname = "a"', "keys[0]: a key needs exactly one of hash, env and key; found none of them."),
        ('[[keys]]\nname = "a"\nenv = "NOPE"', "keys[0].env: the environment variable 'NOPE' is not set."),
        (
            '[models.o]\nbackend = "toy"\npython = "p"\nplacement = "inline"',
            "models.o: python sets the interpreter of a process, but placement is inline",
        ),
        ('[http]\nssl_certfile = "c.pem"', "http: ssl_certfile is set but ssl_keyfile is not; TLS needs both."),
        ('[http]\nssl_certfile = "c"\nssl_keyfile = "k"', "http.ssl_certfile: there is no file 'c'."),
        ('[caches.c]\nmodel = "m"\nn_ctx = 1\ntype_k = "q9"', "caches.c.type_k: must be one of f16, q8_0, got 'q9'."),
        ('[models.o]\nbackend = "toy"\ntype_v = "q8"', "models.o.type_v: must be one of f16, q8_0, got 'q8'. Did you"),
        (
            '[models.o]\nbackend = "toy"\nformat = "hermess"',
            "models.o.format: there is no format 'hermess'. Did you mean 'hermes'?",
        ),
        (
            '[models.o]\nbackend = "toy"\nport = 1',
            "models.o.port: unknown key; it is neither common to all models nor an ",
        ),
        ('[models.o]\nbackend = "toy"\nport = 1', "It belongs into [http]."),
        ('[models.o]\npath = "no-such-model"', "there is no file or folder 'no-such-model' that would imply one"),
        ("[models.o]", "models.o.backend: neither backend nor path is set"),
        ('[models.o]\nbackend = "toy"\nprompt_format = "zz"', "there is no prompt_format 'zz'. Choose one of chatml, "),
    ],
)
def test_an_inconsistency_is_an_error(text: str, message: str, toml: Loader) -> None:
    with pytest.raises(ConfigError) as error:
        toml(BASE + text)
    assert message in str(error.value)


def test_a_folder_without_a_model_implies_no_backend(toml: Loader, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="/empty' does not imply one: it is no GGUF or CTranslate2 model"):
        toml(f'{BASE}[models.o]\npath = "{empty}"')


def test_names_of_types_and_templates_are_accepted_as_people_write_them(toml: Loader) -> None:
    text = '[models.o]\nbackend = "toy"\ntype_k = "Q8_0"\nprompt_format = "qwen3"\nformat = "hermes"\n'
    loaded = toml(BASE + text)
    assert loaded.problems == []
    assert loaded.config.models["o"].type_k == "q8_0"


def test_a_type_that_the_engine_does_not_use_is_a_warning(toml: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(plugins.engine("toy"), kv_types=None)
    monkeypatch.setattr(plugins, "load", lambda package, name: toy)
    (problem,) = toml('[models.o]\nbackend = "toy"\ntype_k = "f16"').problems
    assert (problem.path, problem.level) == ("models.o.type_k", "warning")


def test_a_default_model_must_exist(toml: Loader) -> None:
    with pytest.raises(ConfigError, match="default_model: there is no model 'x'; known: "):
        toml('default_model = "x"\n' + BASE)
    assert toml('default_model = "big"\n' + BASE).config.default_model == "big"


def test_duplicate_key_names_are_an_error(toml: Loader) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    key = f'[[keys]]\nname = "a"\nhash = "sha256:{digest}"\n'
    with pytest.raises(ConfigError, match=r"keys\[1\]\.name: two keys are named 'a'"):
        toml(BASE + key + key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[keys]]\nname = "a"\nkey = "plain"', "keys[0].key: is plain text in the file."),
        ('[[routes]]\nmodel = "n"\nfallback_wait_s = 1', "routes[0].fallback_wait_s: is not used"),
        ('[[routes]]\ncache = "main"\n[[routes]]\nmatch = "X*"\nmodel = "n"', "routes[1]: is never reached: routes[0]"),
        (
            '[[routes]]\nmatch = ["*a*", "b"]\ncache = "main"\n[[routes]]\nmatch = ["B", "*xA"]\nmodel = "n"',
            "routes[1]: is never reached: routes[0]",
        ),
        ('[[routes]]\nmatch = "N"\ncache = "main"', "routes[0]: takes 'n', a name of the model n: m answers to it."),
        (
            '[[routes]]\nmatch = "*"\noverride = true\ncache = "main"',
            "routes[0]: takes 'n', a name of the model n: m answers to it.",
        ),
        (
            '[[routes]]\nmatch = ["n*"]\ncache = "main"',
            "routes[0]: does not apply to n: a pattern leaves the names of other models alone, unless override",
        ),
        ('[caches.two]\nmodel = "n"\nn_ctx = 1\n[models.n]\nn_ctx = 5', "models.n.n_ctx: is not used"),
        ("[models.n]\nforce_prompt_format = true", "force_prompt_format: is not used: prompt_format is not set"),
        (
            '[models.n]\nforce_prompt_format = true\nprompt_format = "qwen3"',
            "its wording is not the one that the model was trained on",
        ),
        (
            '[models.n]\nforce_prompt_format = true\nprompt_format = "qwen3"\nchat_template = "{{ x }}"',
            "models.n.force_prompt_format: is not used: chat_template is set",
        ),
    ],
)
def test_a_useless_or_unsafe_setting_is_a_warning(text: str, message: str, toml: Loader) -> None:
    base = BASE.replace('[models.n]\nbackend = "toy"\n', "") if "[models.n]" in text else BASE
    text = text.replace("[models.n]", '[models.n]\nbackend = "toy"')
    (problem,) = toml(base + text).problems
    assert problem.level == "warning"
    assert message in str(problem)
    assert 'plain"' not in problem.message


def test_a_route_with_another_endpoint_is_reachable(toml: Loader) -> None:
    routes = '[[routes]]\nendpoint = "/v1/messages*"\ncache = "main"\n[[routes]]\nmodel = "n"'
    assert toml(BASE + routes).problems == []


def test_an_invalid_scheduler_endpoint_is_an_error(toml: Loader) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.endpoint: .*is not an address"):
        toml(BASE + '[scheduler]\nendpoint = "5555"')
    assert toml(BASE + '[scheduler]\nendpoint = "tcp://127.0.0.1:5555"').problems == []


def test_a_missing_interpreter_makes_a_model_unavailable(toml: Loader) -> None:
    """The file may be meant for several machines."""
    loaded = toml(BASE + '[models.o]\nbackend = "toy"\npython = "/nowhere/python"\n')
    (problem,) = [each for each in loaded.problems if each.path == "models.o.python"]
    assert problem.level == "unavailable"
    assert "there is no such program" in problem.message
