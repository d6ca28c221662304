from __future__ import annotations

from typing import Any

import pytest

from modelyard.config.sources import DefinedNames, environment_keys, read_environment

NAMES = DefinedNames(models=["Qwen2.5-7B", "m"], caches=["main"])


@pytest.mark.parametrize(
    ("name", "value", "raw"),
    [
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
    ],
)
def test_a_name_finds_its_place(name: str, value: str, raw: Any) -> None:
    found = read_environment({f"MODELYARD_{name}": value}, NAMES)
    assert (found.raw, found.problems) == (raw, [])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MODELYARD_HTPP_PORT", "Did you mean 'MODELYARD_HTTP_PORT'?"),
        ("MODELYARD_HTTP__PRT", "Did you mean"),
        ("MODELYARD_HTTP__PORT__X", ""),
        ("MODELYARD_ENGINE__BACKEND__X", ""),
        ("MODELYARD_CACHES__MAIN__NCTX", ""),
        ("MODELYARD_ZZZ", ""),
        ("MODELYARD_", ""),
        ("MODELYARD___", ""),
    ],
)
def test_an_unknown_name_is_a_problem(name: str, hint: str) -> None:
    found = read_environment({name: "1"}, NAMES)
    (problem,) = found.problems
    assert (problem.source, problem.path, problem.level, found.raw) == ("environment", name, "error", {})
    assert hint in problem.message


def test_names_that_are_no_settings_and_empty_values_are_left_alone() -> None:
    others = ["GOLDEN", "CACHE", "WORKER_INDEX", "WORKER_SOCKET", "API_KEY", "ADMIN_KEY"]
    env = {f"MODELYARD_{name}": "x" for name in others} | {"MODELYARD_HTTP_PORT": "", "PATH": "/bin"}
    found = read_environment(env, NAMES)
    assert (found.raw, found.problems) == ({}, [])


def test_json_for_a_table_joins_values_of_its_fields() -> None:
    env = {"MODELYARD_MODELS__M": '{"n_ctx": 1}', "MODELYARD_MODELS__M__PARALLEL": "2"}
    assert read_environment(env, NAMES).raw == {"models": {"m": {"n_ctx": 1, "parallel": "2"}}}


def test_keys_stay_in_their_variables() -> None:
    assert environment_keys({"MODELYARD_API_KEY": "s3cret", "MODELYARD_ADMIN_KEY": ""}) == [
        {"name": "env", "env": "MODELYARD_API_KEY", "admin": False}
    ]
