"""Where a knob stands in a configuration, and the configuration with it turned."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.config.engine_options import engine_spec
from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.knobs import Knob
from modelyard.tune.places import alone, changes, places, turned, unset

THREADS = Knob(name="n_threads", values=(1, 2), stage=1)
FLASH = Knob(name="flash_attn", values=("on", "off"), stage=1)
PARALLEL = Knob(name="parallel", values=(1, 2), stage=1, place="cache")
BATCH = Knob(name="n_batch", values=(1, 2), stage=1, place="cache")
KNOBS = {knob.name: knob for knob in (THREADS, FLASH, PARALLEL)}


def config(model: dict[str, Any] | None = None, **caches: dict[str, Any]) -> Config:
    chosen = {"backend": "llama_cpp", "path": "/nowhere/x.gguf", **(model or {})}
    tables = {name: {"model": "m", "n_ctx": 512, **own} for name, own in caches.items()}
    return load_config(env={}, overrides={"models": {"m": chosen}, "caches": tables}).config


def test_a_knob_stands_in_the_models_section():
    assert places(config(main={}), "m", THREADS) == [("models", "m", "n_threads")]
    assert places(config(), "m", THREADS) == [("models", "m", "n_threads")]


def test_a_cache_that_says_it_itself_is_changed_too():
    both = config(main={"n_threads": 1}, fast={})
    assert places(both, "m", THREADS) == [("models", "m", "n_threads"), ("caches", "main", "n_threads")]


def test_where_all_caches_say_it_the_models_word_counts_for_nothing():
    assert places(config(main={"n_threads": 1}), "m", THREADS) == [("caches", "main", "n_threads")]


def test_a_knob_of_a_cache_stands_in_the_first_cache_or_else_in_the_model():
    assert places(config(main={}, fast={}), "m", PARALLEL) == [("caches", "main", "parallel")]
    assert places(config(), "m", PARALLEL) == [("models", "m", "parallel")]
    assert places(config(), "m", BATCH) == []


def test_a_turned_configuration_makes_another_engine():
    old = config(main={"flash_attn": True}, fast={})
    new = turned(old, changes(old, "m", KNOBS, {"n_threads": 2, "flash_attn": "off", "parallel": 3}))
    spec = engine_spec(new.router().catalog.models["m"], new.models["m"])
    assert spec.options.n_threads == 2
    assert spec.options.flash_attn == "off"
    assert spec.caches["main"].flash_attn is False
    assert (spec.caches["main"].parallel, spec.caches["fast"].parallel) == (3, 1)
    assert old.models["m"].options == {}


def test_a_field_under_its_old_name_is_replaced():
    old = config({"gguf_flash_attn": "off"})
    new = turned(old, changes(old, "m", KNOBS, {"flash_attn": "on"}))
    assert engine_spec(new.router().catalog.models["m"], new.models["m"]).options.flash_attn == "on"


@pytest.mark.parametrize("model", [{"n_threads": 1, "gguf_flash_attn": "off"}, {"options": {"n_threads": 1}}, {}])
def test_an_untouched_configuration_has_none_of_the_knobs_turned(model):
    plain = unset(config(model, main={"n_threads": 1, "parallel": 4, "flash_attn": False}), "m", KNOBS)
    spec = engine_spec(plain.router().catalog.models["m"], plain.models["m"])
    assert spec.options.n_threads is None
    assert spec.options.flash_attn is None
    assert spec.caches["main"].n_threads is None
    assert spec.caches["main"].parallel == 4  # what a cache is for is no setting of speed


def test_what_another_process_is_told_holds_one_model_and_no_keys():
    whole = load_config(
        env={},
        overrides={
            "models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}, "other": {"backend": "fake"}},
            "keys": [{"name": "me", "key": "secret"}],
        },
    ).config
    told = alone(whole, "m")
    assert told["models"].keys() == {"m"}
    assert "secret" not in str(told)
    assert Config.model_validate(told).models["m"].path == "/x.gguf"
