"""docs/config.md says what is true: every row is loaded, every field table is the generated one."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs.field_tables import field_tables
from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.config.settings import Config, engine_options, engine_spec, json_schema
from modelyard.core.engine import CacheInfo
from tests.config.conftest import Loader, ToyOptions


def test_options_hold_the_fields_of_the_engine_and_the_common_ones_that_it_declares(toml: Loader) -> None:
    config = toml('[models.m]\nbackend = "toy"\nmodel_path = "/w"\nspeed = 2.5\nn_ctx = 64\nparallel = 3\n').config
    assert engine_options(config.models["m"]) == ToyOptions(speed=2.5, path="/w")
    spec = engine_spec(config.router().catalog.models["m"])
    assert (spec.model, spec.options, spec.caches) == ("m", ToyOptions(speed=2.5, path="/w"), {"m": CacheInfo(64, 3)})


def test_an_invalid_option_is_reported_with_its_path(toml: Loader) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.speed: must be greater than 0, got 0\."):
        toml('[models.m]\nbackend = "toy"\nspeed = 0\n')


def test_a_misspelt_field_gets_a_suggestion_from_common_fields_and_options(toml: Loader) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.replica: unknown key.*Did you mean 'replicas'"):
        toml('[models.m]\nbackend = "toy"\nreplica = 2\n')


def test_an_option_that_names_an_unreadable_file_is_an_error(toml: Loader) -> None:
    with pytest.raises(ConfigError, match=r"models\.m: gone\.toml cannot be read"):
        toml('[models.m]\nbackend = "toy"\nwiring = "gone.toml"\n')


def test_a_missing_library_makes_a_model_unavailable(toml: Loader) -> None:
    (problem,) = toml('[models.m]\nbackend = "bare"\nx = 1\n').problems
    assert (problem.level, problem.path) == ("unavailable", "models.m.backend")
    assert "'bones'" in problem.message


def test_a_misspelt_engine_gets_a_suggestion(toml: Loader) -> None:
    (problem,) = toml('[models.m]\nbackend = "tpy"\n').problems
    assert problem.message.endswith("Did you mean 'toy'?")


def test_an_options_table_is_equal_to_fields_in_the_section(toml: Loader) -> None:
    config = toml('[models.m]\nbackend = "toy"\nwiring = "s"\n[models.m.options]\nspeed = 2.0\n').config
    assert config.models["m"].options == {"speed": 2.0, "wiring": "s"}


CONFIGS = Path(__file__).parents[2] / "configs"


def schema_errors(raw: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(json_schema()).iter_errors(raw)]


def test_the_schema_is_valid_json_schema() -> None:
    schema = json.loads(json.dumps(json_schema()))
    Draft202012Validator.check_schema(schema)
    assert schema["$defs"]["HttpSettings"]["properties"]["port"]["description"]


def test_the_schema_accepts_each_example() -> None:
    for file in CONFIGS.iterdir():
        text = file.read_text()
        assert schema_errors(tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)) == [], file


def test_the_schema_has_the_names_of_all_styles_and_engine_fields() -> None:
    raw = {
        "$schema": "x",
        "service": {"port": 1, "log_level": "info"},
        "engine": {"backend": "toy", "models": {"m": {"model_path": "x", "speed": 2.0}}, "decoding": {"top_k": 1}},
        "model": {"model_name": "m"},
        "caches": {"c": {"model": "m", "n_ctx": 1, "cache_type_k": "q8_0"}},
        "routes": [{"match": "a", "cache": "c"}, {"match": ["a", "b"], "model": "m"}],
    }
    assert schema_errors(raw) == []


def test_the_schema_refuses_what_loading_refuses() -> None:
    for raw in ({"x": 1}, {"http": {"prot": 1}}, {"service": {"port": "x"}}, {"models": {"m": {"speed": "fast"}}}):
        assert schema_errors(raw) != []


PAGE = Path(__file__).parents[2] / "docs" / "config.md"
MARK = "## All fields\n"
ROW = re.compile(r"^\| `(?P<written>[^`]+)` \| `(?P<value>[^`]+)` \| `(?P<means>[^`]+)` \|$", re.MULTILINE)


def rows(*, variables: bool) -> list[tuple[str, str, str]]:
    found = [match.group("written", "value", "means") for match in ROW.finditer(PAGE.read_text().partition(MARK)[0])]
    return [row for row in found if row[0].startswith("MODELYARD_") is variables]


def at(config: Config, path: str) -> Any:
    value: Any = config.model_dump(mode="json", exclude_unset=True)
    for key in path.split("."):
        value = value[key]
    return value


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return base | over | both


@pytest.mark.parametrize(("written", "value", "means"), rows(variables=False))
def test_each_name_of_another_style_sets_what_the_page_says(
    written: str, value: str, means: str, tmp_path: Path
) -> None:
    under = "engine.models.demo" if written.startswith("engine") else "models.demo"
    base = nested(under, {} if written == "engine.backend" else {"backend": "fake"})
    base["caches"] = {"main": {"model": "demo", "n_ctx": 512}}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(merged(base, nested(written, json.loads(value)))))
    assert at(load_config(file, env={}).config, means) == json.loads(value)


@pytest.mark.parametrize(("variable", "value", "means"), rows(variables=True))
def test_each_variable_sets_what_the_page_says(variable: str, value: str, means: str, tmp_path: Path) -> None:
    env = {variable: value}
    if variable == "MODELYARD_MODEL_TOKENIZER_PATH":
        env["MODELYARD_MODEL_MODEL_NAME"] = "demo"
        env["MODELYARD_ENGINE_BACKEND"] = "fake"
    if variable == "MODELYARD_MODEL_MODEL_NAME":
        env["MODELYARD_ENGINE_BACKEND"] = "fake"
    got = at(load_config(env=env, cwd=tmp_path).config, means)
    assert (",".join(got) if isinstance(got, list) else str(got).lower()) == value.lower()


def test_the_page_has_rows_to_test() -> None:
    assert len(rows(variables=False)) >= 20
    assert len(rows(variables=True)) >= 10


def test_the_field_tables_match_the_settings_classes() -> None:
    text = PAGE.read_text()
    fresh = f"{text.partition(MARK)[0]}{MARK}\n{field_tables()}"
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        PAGE.write_text(fresh)
    assert text == fresh, "run the tests with MODELYARD_GOLDEN=write to update the tables"


def test_every_field_has_a_description() -> None:
    lines = [line for line in field_tables().splitlines() if line.startswith("| `")]
    assert len(lines) > 80
    assert not [line for line in lines if line.endswith(("|  |", "| None |"))]
