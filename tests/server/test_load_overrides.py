"""What one load of a model may set for itself, and what not."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.errors import InvalidRequest
from modelyard.server.load_overrides import allowed, altered, schemas

MODEL = {
    "backend": "llama_server",
    "path": "/models/m.gguf",
    "llama_server_n_ctx": 4096,
    "llama_server_host": "127.0.0.1",
}


def config(**more: Any) -> Config:
    return load_config(env={}, overrides={"models": {"m": MODEL, "plain": {"backend": "fake"}}, **more}).config


def test_a_managed_llama_server_has_five() -> None:
    fields = allowed(config().models["m"])
    assert list(fields) == [
        "llama_server_n_ctx",
        "llama_server_image_max_tokens",
        "llama_server_spec_type",
        "llama_server_spec_draft_n_max",
        "llama_server_spec_draft_p_min",
    ]


def test_forms_get_types_and_ranges() -> None:
    shown = schemas(config().models["m"])
    assert (shown["llama_server_spec_draft_n_max"]["minimum"], shown["llama_server_spec_draft_n_max"]["maximum"]) == (
        1,
        6,
    )
    assert (shown["llama_server_spec_draft_p_min"]["minimum"], shown["llama_server_spec_draft_p_min"]["maximum"]) == (
        0,
        1,
    )
    assert shown["llama_server_n_ctx"]["type"] == "integer"


def test_a_load_may_change_them_and_nothing_else_changes() -> None:
    before = config()
    after = altered(before, "m", {"llama_server_n_ctx": 8192, "llama_server_spec_draft_n_max": 3})
    assert after.models["m"].n_ctx == 8192
    assert after.models["m"].options["llama_server_spec_draft_n_max"] == 3
    assert after.models["m"].options["llama_server_host"] == "127.0.0.1"
    assert before.models["m"].n_ctx == 4096
    assert after.models["plain"] is before.models["plain"]


@pytest.mark.parametrize(
    "field",
    ["path", "model_path", "llama_server_binary", "llama_server_host", "llama_server_port", "llama_server_extra_args"],
)
def test_paths_and_places_are_refused_with_the_names_that_are_allowed(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        altered(config(), "m", {field: "x"})
    assert caught.value.param == field
    assert caught.value.code == "override_not_allowed"
    assert "llama_server_n_ctx" in caught.value.message


def test_an_engine_without_any_says_so() -> None:
    far = {"backend": "openai_remote", "remote_base_url": "https://api.example.com/v1", "remote_model": "large"}
    remote = load_config(env={}, overrides={"models": {"far": far}}).config
    with pytest.raises(InvalidRequest, match="none that one may"):
        altered(remote, "far", {"remote_base_url": "https://elsewhere.example"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama_server_spec_draft_n_max", 7),
        ("llama_server_spec_draft_n_max", 0),
        ("llama_server_spec_draft_p_min", 1.1),
        ("llama_server_n_ctx", "many"),
        ("llama_server_image_max_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        altered(config(), "m", {field: value})
    assert caught.value.param == field
    assert repr(value) in caught.value.message


def test_a_window_that_the_caches_set_cannot_be_changed_by_a_load() -> None:
    with pytest.raises(InvalidRequest, match="caches"):
        altered(config(caches={"c": {"model": "m", "n_ctx": 1024}}), "m", {"llama_server_n_ctx": 8192})
