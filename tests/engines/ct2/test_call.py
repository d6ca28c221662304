from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields

from modelyard.core.engine import Prompt
from modelyard.core.request import Sampling
from modelyard.engines.ct2.options import IGNORED, Ct2Options, generate_arguments

HONOURED = {"temperature", "top_p", "top_k", "repetition_penalty", "beam_size"}


def call(sampling: Sampling, **options: Any) -> dict[str, Any]:
    return generate_arguments(Prompt(parts=(), sampling=sampling, stop_ids=(2, 0)), 10, Ct2Options(path="x", **options))


def test_every_knob_is_either_honoured_or_said_to_be_ignored():
    assert {field.name for field in fields(Sampling)} == HONOURED | set(IGNORED)
    assert not HONOURED & set(IGNORED)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=0, top_p=0.5)])
def test_greedy_takes_the_best_token_alone(sampling: Sampling):
    made = call(sampling)
    assert made["sampling_topk"] == 1
    assert "sampling_temperature" not in made


def test_nothing_asked_samples_from_all_tokens_as_they_are():
    made = call(Sampling())
    assert (made["sampling_topk"], made["sampling_topp"], made["sampling_temperature"]) == (0, 1.0, 1.0)


def test_sampling_fields_pass_through():
    made = call(Sampling(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2))
    assert (made["sampling_topk"], made["sampling_topp"], made["sampling_temperature"]) == (40, 0.9, 0.7)
    assert made["repetition_penalty"] == 1.2


@pytest.mark.parametrize("top_p", [0.0, -1.0, 7.0])
def test_top_p_that_means_nothing_cuts_nothing(top_p: float):
    assert call(Sampling(top_p=top_p))["sampling_topp"] == 1.0


def test_beam_search_brings_its_own_end_and_length():
    made = call(Sampling(beam_size=4, temperature=0.7), length_penalty=0.8, patience=2.0)
    assert (made["beam_size"], made["max_length"], made["end_token"]) == (4, 10, (2, 0))
    assert (made["length_penalty"], made["patience"]) == (0.8, 2.0)
    assert "sampling_topk" not in made


def test_model_settings_of_length_and_repetition_are_in_every_call():
    made = call(Sampling(), min_length=50, no_repeat_ngram_size=3)
    assert (made["min_length"], made["no_repeat_ngram_size"]) == (10, 3), "no more than it may say"
