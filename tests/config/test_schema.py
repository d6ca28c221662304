from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from modelyard.config import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"


def faults(raw: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(json_schema()).iter_errors(raw)]


def test_the_schema_is_valid_and_can_be_written() -> None:
    schema = json.loads(json.dumps(json_schema()))
    Draft202012Validator.check_schema(schema)
    assert schema["$defs"]["HttpSettings"]["properties"]["port"]["description"]


@pytest.mark.parametrize("name", sorted(file.name for file in CONFIGS.iterdir()))
def test_the_schema_accepts_each_example(name: str) -> None:
    text = (CONFIGS / name).read_text()
    assert faults(tomllib.loads(text) if name.endswith(".toml") else json.loads(text)) == []


def test_the_schema_knows_other_names_and_engine_fields() -> None:
    raw = {
        "$schema": "x",
        "service": {"port": 1, "log_level": "info"},
        "engine": {"backend": "toy", "models": {"m": {"model_path": "x", "speed": 2.0}}, "decoding": {"top_k": 1}},
        "model": {"model_name": "m"},
        "caches": {"c": {"model": "m", "n_ctx": 1, "cache_type_k": "q8_0"}},
        "routes": [{"match": "a", "cache": "c"}, {"match": ["a", "b"], "model": "m"}],
    }
    assert faults(raw) == []


@pytest.mark.parametrize(
    "raw", [{"x": 1}, {"http": {"prot": 1}}, {"service": {"port": "x"}}, {"models": {"m": {"speed": "fast"}}}]
)
def test_the_schema_refuses_what_loading_refuses(raw: Any) -> None:
    assert faults(raw) != []
