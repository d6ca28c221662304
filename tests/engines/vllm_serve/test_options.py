"""What a definition may say of the process and its HTTP side."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.engines.vllm_serve import LIVE_OVERRIDES, Options
from modelyard.engines.vllm_serve.options import flag_of


@pytest.mark.parametrize(
    "argument",
    [
        *("--model=x", "--host", "--port=1", "--uds", "--api-key", "--max-model-len", "--max_model_len=5"),
        *("--served-model-name", "--speculative-config", "--enable-sleep-mode", "--lora-modules"),
    ],
)
def test_arguments_that_are_fields_of_their_own_are_refused_by_name(argument: str) -> None:
    with pytest.raises(ValidationError, match=f"{flag_of(argument)} is set by"):
        Options(vllm_model="m", vllm_serve_extra_args=["--quantization", "modelopt", argument])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"vllm_serve_port": 70000}, "65535"),
        ({"vllm_serve_start_timeout_s": 0}, "greater than 0"),
        ({"vllm_serve_api_key": ""}, "at least 1 character"),
        ({"vllm_serve_nonsense": 1}, "Extra inputs"),
        ({"vllm_serve_sleep_s": 5, "vllm_serve_host": "127.0.0.1"}, "needs the private socket"),
        ({"vllm_serve_sleep_s": 5, "vllm_serve_port": 0}, "needs the private socket"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Options(vllm_model="m", **fields)


def test_it_may_be_set_for_one_load_what_may_be_in_process() -> None:
    assert len(LIVE_OVERRIDES) == 9
    assert all(field in Options.model_fields or field == "vllm_max_model_len" for field in LIVE_OVERRIDES)


def test_it_does_not_sleep_unless_it_is_told_to() -> None:
    assert Options(vllm_model="m").vllm_serve_sleep_s == 0
