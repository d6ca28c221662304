"""The fields of a definition, and the overrides of one load."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from modelyard.engines.llama_server import LIVE_OVERRIDES, Options


def test_fields_that_one_load_may_override() -> None:
    assert list(LIVE_OVERRIDES) == [
        "llama_server_n_ctx",
        "llama_server_image_max_tokens",
        "llama_server_spec_type",
        "llama_server_spec_draft_n_max",
        "llama_server_spec_draft_p_min",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama_server_n_ctx", 8192),
        ("llama_server_image_max_tokens", 512),
        ("llama_server_spec_type", "draft-mtp"),
        ("llama_server_spec_draft_n_max", 1),
        ("llama_server_spec_draft_n_max", 6),
        ("llama_server_spec_draft_p_min", 0),
        ("llama_server_spec_draft_p_min", 1.0),
    ],
)
def test_values_in_range_are_accepted(field: str, value: Any) -> None:
    assert TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value) == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama_server_n_ctx", 0, "greater than or equal to 1"),
        ("llama_server_image_max_tokens", -1, "greater than or equal to 1"),
        ("llama_server_spec_type", "a; rm -rf", "is not a kind of speculative decoding"),
        ("llama_server_spec_draft_n_max", 0, "greater than or equal to 1"),
        ("llama_server_spec_draft_n_max", 7, "less than or equal to 6"),
        ("llama_server_spec_draft_p_min", 1.5, "less than or equal to 1"),
        ("llama_server_spec_draft_p_min", "x", "valid number"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(LIVE_OVERRIDES[field]).validate_python(value)


@pytest.mark.parametrize("argument", ["-m", "--model=x.gguf", "--host", "--port=1", "-c", "--parallel", "--api-key"])
def test_extra_arguments_must_not_set_reserved_flags(argument: str) -> None:
    with pytest.raises(ValidationError, match=f"{argument.partition('=')[0]} is set by"):
        Options(path="m", llama_server_extra_args=["--mlock", argument])


@pytest.mark.parametrize(
    "fields",
    [
        {"llama_server_n_gpu_layers": "many"},
        {"llama_server_flash_attn": "maybe"},
        {"llama_server_port": 70000},
        {"llama_server_spec_draft_p_min": 2},
        {"llama_server_nonsense": 1},
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Options(path="m", **fields)
