"""Sampling settings in vLLM's words."""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields

from modelyard.core.engine import Prompt, TokenRun
from modelyard.core.request import Constraint, Sampling
from modelyard.engines.vllm.request import IGNORED, PRIORITIES, sampling_arguments

VOCABULARY = 1000


def asked(sampling: Sampling = Sampling(), **more: Any) -> dict[str, Any]:
    return sampling_arguments(Prompt(parts=(TokenRun([1]),), sampling=sampling, **more), 7, VOCABULARY)


def test_what_nobody_asked_for_changes_nothing() -> None:
    assert asked() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 7,
        "stop_token_ids": [],
        "ignore_eos": True,
        "logprobs": None,
        "detokenize": False,
    }


def test_every_knob_that_vllm_has_is_turned() -> None:
    told = asked(
        Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            seed=7,
            logit_bias={5: 2.0},
        ),
        stop_ids=(3, 4),
        logprobs=2,
    )
    assert (told["temperature"], told["top_p"], told["top_k"], told["min_p"]) == (0.5, 0.9, 40, 0.05)
    assert (told["repetition_penalty"], told["presence_penalty"], told["frequency_penalty"]) == (1.1, 0.2, 0.3)
    assert (told["seed"], told["logit_bias"], told["stop_token_ids"], told["logprobs"]) == (7, {5: 2.0}, [3, 4], 2)


def test_each_knob_is_either_turned_or_named_as_one_that_is_not() -> None:
    told = set(asked(Sampling(seed=1, logit_bias={1: 1.0})))
    assert {field.name for field in fields(Sampling)} == (told & {f.name for f in fields(Sampling)}) | set(IGNORED)


def test_values_that_others_take_for_off_are_off() -> None:
    told = asked(Sampling(top_p=0.0, top_k=-1, temperature=-1.0))
    assert (told["top_p"], told["top_k"], told["temperature"]) == (1.0, 0, 0.0)


def test_bias_on_tokens_that_do_not_exist_is_left_out() -> None:
    assert asked(Sampling(logit_bias={-1: 1.0, 999: 1.0, 1000: 1.0}))["logit_bias"] == {999: 1.0}
    assert "logit_bias" not in asked(Sampling(logit_bias={1000: 1.0}))


def test_any_seed_is_a_seed() -> None:
    """To vLLM -1 means none, and a number of more bits is an error."""
    assert asked(Sampling(seed=-1))["seed"] == (1 << 63) - 1
    assert asked(Sampling(seed=1 << 70))["seed"] == 0


def test_complete_form_may_end_the_answer() -> None:
    assert asked(constraint=Constraint("json_object"))["ignore_eos"] is False


def test_background_work_comes_after_the_rest() -> None:
    assert PRIORITIES["main"] < PRIORITIES["background"]
