from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields
from pydantic import ValidationError

from modelyard.core.request import Sampling
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings


def test_every_sampling_parameter_has_a_setting() -> None:
    knobs = {field.name for field in fields(Sampling)}
    assert set(DecodingSettings.model_fields) == knobs | {"max_tokens", "max_repeated_tokens", "stop"}


def test_decoding_settings_convert_to_sampling() -> None:
    settings = DecodingSettings.model_validate({"top_k": 4, "dry_sequence_breakers": ["a"], "logit_bias": {"7": -1}})
    assert settings.sampling() == Sampling(top_k=4, dry_sequence_breakers=("a",), logit_bias={7: -1.0})


def test_fields_accept_their_aliases() -> None:
    cache = CacheSettings.model_validate({"model": "m", "n_ctx": 1, "cache_type_k": "q8_0", "type_v": "q4_0"})
    assert (cache.type_k, cache.type_v) == ("q8_0", "q4_0")
    assert ModelSettings.model_validate({"model_path": "a"}).path == ModelSettings(path="a").path


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [("gguf_n_ctx", "n_ctx", 9), ("gguf_type_k", "type_k", "q8_0"), ("cache_type_v", "type_v", "q4_0")],
)
def test_a_model_accepts_the_pool_names_of_cache_fields(written: str, field: str, value: Any) -> None:
    model = ModelSettings.model_validate({written: value})
    assert (getattr(model, field), model.options) == (value, {})


def test_fields_of_an_engine_are_collected_in_options() -> None:
    model = ModelSettings.model_validate({"backend": "x", "odd": 1, "options": {"y": 2}})
    assert (model.backend, model.options) == ("x", {"odd": 1, "y": 2})


def test_replica_max_defaults_to_replicas() -> None:
    assert ModelSettings(replicas=3).replica_max == 3
    with pytest.raises(ValidationError, match="replicas is 3, more than replica_max"):
        ModelSettings(replicas=3, replica_max=2)


def test_a_single_glob_becomes_a_list() -> None:
    assert RouteSettings.model_validate({"match": "a*", "model": "m"}).match == ["a*"]
    assert RouteSettings(model="m").match == ["*"]


@pytest.mark.parametrize(
    "raw", [{"temperature": -1}, {"top_p": 1.1}, {"max_tokens": 0}, {"mirostat": 3}, {"unknown": 1}, {"beam_size": 0}]
)
def test_invalid_values_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DecodingSettings.model_validate(raw)
