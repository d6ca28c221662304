"""What our server is started with."""

from __future__ import annotations

from pathlib import Path

from bench.peers import NOISE, configuration
from modelyard.config.load import load_config
from modelyard.library import default_model


def test_names_go_to_the_caches_they_are_meant_for():
    caches = {"main": (512, 2), "fast": (256, 4)}
    config = load_config(env={}, overrides=configuration(default_model.fetch(), 1, caches)).config
    routes = [(route.match, route.cache) for route in config.routes]
    assert routes == [([NOISE], NOISE), (["*haiku*"], "fast"), (["*"], "main")]
    assert config.caches["fast"].parallel == 4


def test_without_a_fast_cache_all_goes_to_main():
    routes = configuration(Path("x.gguf"), 1, {"main": (512, 2)})["routes"]
    assert [route["cache"] for route in routes] == [NOISE, "main"]
