"""The engine's options, and sampling as arguments of `generate_batch`."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields
from pydantic import ValidationError

from modelyard.core.engine import Prompt
from modelyard.core.request import Sampling
from modelyard.library import cores
from modelyard_ct2.options import IGNORED, Ct2Options, generate_arguments

HONOURED = {"temperature", "top_p", "top_k", "repetition_penalty", "beam_size", "min_tokens", "ignore_eos"}


def test_compute_type_is_int8_by_default() -> None:
    assert Ct2Options(path="x").compute_type == "int8"


@pytest.mark.parametrize(
    ("physical", "capacity", "options", "expected"),
    [
        (8, 1, {}, (1, 8)),
        (8, 4, {}, (4, 2)),
        (2, 4, {}, (4, 1)),
        (8, 4, {"inter_threads": 1}, (1, 8)),
        (8, 4, {"intra_threads": 8}, (4, 8)),
        (8, 4, {"intra_threads": 512}, (4, 16)),
        (8, 0, {}, (1, 8)),
    ],
)
def test_physical_cores_are_shared_between_the_batches(
    physical: int, capacity: int, options: dict[str, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "physical", lambda: physical)
    monkeypatch.setattr(cores, "logical", lambda: 2 * physical)
    parsed = Ct2Options(path="x", **options)
    assert (parsed.batch_workers(capacity), parsed.threads_per_batch(capacity)) == expected


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"compute_type": "int4"}, {"inter_threads": 0}, {"n_gpu_layers": 1}]
)
def test_unknown_options_and_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Ct2Options(path="x", **wrong)


# --- sampling ---------------------------------------------------------------------------------------------------------


def arguments(sampling: Sampling, **options: Any) -> dict[str, Any]:
    return generate_arguments(Prompt(parts=(), sampling=sampling, stop_ids=(2, 0)), 10, Ct2Options(path="x", **options))


def test_every_sampling_field_is_either_honoured_or_listed_as_ignored() -> None:
    assert {field.name for field in fields(Sampling)} == HONOURED | set(IGNORED)
    assert not HONOURED & set(IGNORED)


def test_a_request_can_raise_the_minimum_length() -> None:
    assert arguments(Sampling(min_tokens=3), min_length=2)["min_length"] == 3
    assert arguments(Sampling(min_tokens=1), min_length=2)["min_length"] == 2
    endless = arguments(Sampling(ignore_eos=True))
    assert (endless["min_length"], endless["end_token"]) == (10, (2, 0))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=0, top_p=0.5)])
def test_greedy_sampling_takes_the_best_token(sampling: Sampling) -> None:
    result = arguments(sampling)
    assert result["sampling_topk"] == 1
    assert "sampling_temperature" not in result


def test_default_sampling_draws_from_all_tokens() -> None:
    result = arguments(Sampling())
    assert (result["sampling_topk"], result["sampling_topp"], result["sampling_temperature"]) == (0, 1.0, 1.0)


def test_sampling_fields_are_passed_on() -> None:
    result = arguments(Sampling(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2))
    assert (result["sampling_topk"], result["sampling_topp"], result["sampling_temperature"]) == (40, 0.9, 0.7)
    assert result["repetition_penalty"] == 1.2


def test_top_p_outside_its_range_truncates_nothing() -> None:
    assert [arguments(Sampling(top_p=top_p))["sampling_topp"] for top_p in (0.0, -1.0, 7.0)] == [1.0] * 3


def test_beam_search_has_its_own_limit_and_stop_tokens() -> None:
    result = arguments(Sampling(beam_size=4, temperature=0.7), length_penalty=0.8, patience=2.0)
    assert (result["beam_size"], result["max_length"], result["end_token"]) == (4, 10, (2, 0))
    assert (result["length_penalty"], result["patience"]) == (0.8, 2.0)
    assert "sampling_topk" not in result


def test_minimum_length_and_ngram_size_are_passed_on() -> None:
    result = arguments(Sampling(), min_length=50, no_repeat_ngram_size=3)
    assert (result["min_length"], result["no_repeat_ngram_size"]) == (10, 3), "no more than the output limit"
