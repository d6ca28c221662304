"""The fields of a definition for the process and its HTTP server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelyard_vllm.serve import LIVE_OVERRIDES, Options
from modelyard_vllm.serve.options import flag_name


@pytest.mark.parametrize(
    "argument",
    [
        *("--model=x", "--host", "--port=1", "--uds", "--api-key", "--max-model-len", "--max_model_len=5"),
        *("--served-model-name", "--speculative-config", "--enable-sleep-mode", "--lora-modules"),
    ],
)
def test_extra_arguments_must_not_set_reserved_flags(argument: str) -> None:
    with pytest.raises(ValidationError, match=f"{flag_name(argument)} is set by"):
        Options(vllm_model="m", vllm_serve_extra_args=["--quantization", "modelopt", argument])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_serve_port": 70000}, "65535"),
        ({"vllm_serve_start_timeout_s": 0}, "greater than 0"),
        ({"vllm_serve_api_key": ""}, "at least 1 character"),
        ({"vllm_serve_nonsense": 1}, "Extra inputs"),
        ({"vllm_serve_sleep_s": 5, "vllm_serve_host": "127.0.0.1"}, "needs the private socket"),
        ({"vllm_serve_sleep_s": 5, "vllm_serve_port": 0}, "needs the private socket"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Options(vllm_model="m", **fields)


def test_one_load_may_override_the_same_fields_as_in_process() -> None:
    assert len(LIVE_OVERRIDES) == 9
    assert all(field in Options.model_fields or field == "vllm_max_model_len" for field in LIVE_OVERRIDES)


def test_sleep_is_off_by_default() -> None:
    assert Options(vllm_model="m").vllm_serve_sleep_s == 0
