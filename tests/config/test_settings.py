from __future__ import annotations

import pytest

from modelyard.config.problems import ConfigError
from modelyard.config.settings import engine_options, engine_spec
from modelyard.core.engine import CacheInfo
from tests.config.conftest import Loader, ToyOptions


def test_options_hold_the_fields_of_the_engine_and_the_common_ones_that_it_declares(toml: Loader) -> None:
    config = toml('[models.m]\nbackend = "toy"\nmodel_path = "/w"\nspeed = 2.5\nn_ctx = 64\nparallel = 3\n').config
    assert engine_options(config.models["m"]) == ToyOptions(speed=2.5, path="/w")
    spec = engine_spec(config.router().catalog.models["m"], config.models["m"])
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
