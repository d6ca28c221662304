"""The engine's options: accepted spellings and refused values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import modelyard_exllamav3 as exllamav3
from modelyard.core.engine import CacheInfo, Prompt, TokenRun
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard_exllamav3.options import (
    IGNORED,
    ExllamaOptions,
    cache_bits,
    cache_tokens,
    generator_arguments,
    job_arguments,
    load_arguments,
    sampler_steps,
)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(None, None), (4, (4, 4)), ("4", (4, 4)), ("8,4", (8, 4)), ([6, 5], (6, 5)), ((2, 8), (2, 8))],
)
def test_cache_quant_accepts_one_number_or_two(value: Any, parsed: Any) -> None:
    assert ExllamaOptions(path="x", exllama_cache_quant=value).exllama_cache_quant == parsed


@pytest.mark.parametrize("value", [1, 9, "f16", "4,4,4", True, 4.5])
def test_unknown_cache_quant_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        ExllamaOptions(path="x", exllama_cache_quant=value)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(None, None), ("auto", None), ("20,23.5", [20, 23.5]), ([20, 0, 24], [20, 0, 24]), (22, [22])],
)
def test_gpu_split_accepts_a_size_per_gpu(value: Any, parsed: Any) -> None:
    assert ExllamaOptions(path="x", exllama_gpu_split=value).exllama_gpu_split == parsed


@pytest.mark.parametrize(
    "wrong",
    [
        {"exllama_gpu_split": "a lot"},
        {"exllama_gpu_split": [-1]},
        {"exllama_tp_backend": "mpi"},
        {"exllama_max_chunk_size": 1000},
        {"exllama_max_chunk_size": 128},
        {"exllama_cache_size": 100},
        {"exllama_max_batch_size": 0},
        {"exllama_cache": 1},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ExllamaOptions(path="x", **wrong)


def test_options_survive_a_json_round_trip() -> None:
    options = ExllamaOptions(path="x", exllama_cache_quant="8,4", exllama_gpu_split="20,24")
    assert ExllamaOptions.model_validate_json(options.model_dump_json()) == options


def test_live_overrides_are_fields_with_a_schema() -> None:
    for name, kind in exllamav3.LIVE_OVERRIDES.items():
        assert name == "n_ctx" or name in ExllamaOptions.model_fields
        assert TypeAdapter(kind).json_schema()


# The exact arguments of ExLlamaV3's calls.

# The definition in the llm-pool guide, and one with every field that the guide names.
GUIDE: dict[str, Any] = {
    "path": "/models/some-model-exl3",
    "exllama_cache_size": 8192,
    "exllama_cache_quant": None,
}
EVERY: dict[str, Any] = {
    "path": "/models/some-model-exl3",
    "exllama_cache_size": 32768,
    "exllama_cache_quant": "8,6",
    "exllama_gpu_split": "20,23.5",
    "exllama_tensor_parallel": True,
    "exllama_tp_backend": "nccl",
    "exllama_max_batch_size": 16,
    "exllama_max_chunk_size": 1024,
    "exllama_max_q_size": 4,
    "exllama_max_rq_tokens": 2048,
}
MAIN = {"main": CacheInfo(4096)}


def test_definition_from_the_guide_becomes_these_calls() -> None:
    options = ExllamaOptions(**GUIDE)
    assert load_arguments(options, 1, [8192]) == {"use_per_device": None, "max_chunk_size": 2048, "max_batch_size": 1}
    assert cache_tokens(options, MAIN) == {"main": 8192}
    assert cache_bits("main", MAIN["main"], options) is None
    assert generator_arguments(options, MAIN["main"], 8192) == {
        "max_batch_size": 1,
        "max_chunk_size": 2048,
        "max_q_size": 8,
    }


def test_every_field_reaches_its_call() -> None:
    options = ExllamaOptions(**EVERY)
    assert load_arguments(options, 16, [32768]) == {
        "use_per_device": [20.0, 23.5],
        "max_chunk_size": 1024,
        "max_batch_size": 16,
        "tensor_p": True,
        "tp_backend": "nccl",
    }
    assert cache_tokens(options, MAIN) == {"main": 32768}
    assert cache_bits("main", MAIN["main"], options) == (8, 6)
    assert generator_arguments(options, CacheInfo(4096, 2), 32768) == {
        "max_batch_size": 16,
        "max_chunk_size": 1024,
        "max_q_size": 4,
    }
    assert job_arguments(a_prompt(), 5, options)["max_rq_tokens"] == 2048


def test_chunk_is_no_longer_than_the_smallest_cache() -> None:
    options = ExllamaOptions(path="x")
    assert load_arguments(options, 1, [8192, 512])["max_chunk_size"] == 512
    assert generator_arguments(options, CacheInfo(4096), 4352)["max_chunk_size"] == 2048
    assert generator_arguments(options, CacheInfo(200), 256)["max_chunk_size"] == 256


# --- caches ---------------------------------------------------------------------------------------------------------


def test_cache_size_is_the_windows_of_its_conversations_in_whole_pages() -> None:
    caches = {"main": CacheInfo(4096, 2), "fast": CacheInfo(200, 3)}
    assert cache_tokens(ExllamaOptions(path="x"), caches) == {"main": 2 * 4352, "fast": 3 * 256}


def test_caches_share_exllama_cache_size_in_proportion_to_their_windows() -> None:
    caches = {"main": CacheInfo(3839, 2), "fast": CacheInfo(1279, 2)}
    shares = cache_tokens(ExllamaOptions(path="x", exllama_cache_size=8192), caches)
    assert shares == {"main": 6144, "fast": 2048}


def test_cache_size_too_small_for_one_conversation_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"gives the cache 'main' 2048 tokens.*needs 4352") as caught:
        cache_tokens(ExllamaOptions(path="x", exllama_cache_size=2048), MAIN)
    assert caught.value.code == "cache_unusable"


@pytest.mark.parametrize(
    ("type_k", "type_v", "expected"),
    [("f16", "f16", (4, 4)), ("q8_0", "q4_0", (8, 4)), ("q6", "q5_1", (6, 5)), ("bf16", "f16", (4, 4))],
)
def test_cache_types_override_the_models_cache_quant(type_k: str, type_v: str, expected: tuple[int, int]) -> None:
    options = ExllamaOptions(path="x", exllama_cache_quant=4)
    assert cache_bits("main", CacheInfo(512, 1, type_k, type_v), options) == expected


@pytest.mark.parametrize(("type_k", "message"), [("q4_0", "both or neither"), ("f32", "no cache type")])
def test_unknown_cache_type_is_refused(type_k: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        cache_bits("main", CacheInfo(512, 1, type_k), ExllamaOptions(path="x"))


# --- jobs -----------------------------------------------------------------------------------------------------------


def a_prompt(**fields: Any) -> Prompt:
    return Prompt(parts=(TokenRun([1, 2, 3]),), **fields)


def test_job_gets_its_limit_and_each_stop_token_once() -> None:
    arguments = job_arguments(
        a_prompt(stop_ids=(7, 2), sampling=Sampling(seed=5)), 30, ExllamaOptions(path="x"), (2, 9)
    )
    assert arguments == {"max_new_tokens": 30, "stop_conditions": [7, 2, 9], "seed": 5, "max_rq_tokens": None}


def test_job_has_a_minimum_on_request() -> None:
    def least(**sampling: Any) -> Any:
        prompt = a_prompt(sampling=Sampling(**sampling))
        return job_arguments(prompt, 30, ExllamaOptions(path="x")).get("min_new_tokens")

    assert (least(), least(min_tokens=4), least(min_tokens=99), least(ignore_eos=True)) == (None, 4, 30, 30)


@pytest.mark.parametrize("count", [0, 3])
def test_job_returns_probabilities_if_requested(count: int) -> None:
    arguments = job_arguments(a_prompt(logprobs=count), 1, ExllamaOptions(path="x"))
    assert (arguments["return_probs"], arguments["return_top_tokens"]) == (True, count)


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        (Sampling(), ["SS_Sample"]),
        (Sampling(temperature=0, top_p=0.9, seed=3), ["SS_Argmax"]),
        (Sampling(top_k=1), ["SS_Argmax"]),
        (Sampling(top_p=0), ["SS_Argmax"]),
        (
            Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
            [
                ("SS_MinP", {"min_p": 0.05}),
                ("SS_TopK", {"top_k": 40}),
                ("SS_TopP", {"top_p": 0.9}),
                ("SS_Temperature", {"temperature": 0.7}),
                "SS_Sample",
            ],
        ),
        (Sampling(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1), ["SS_Sample"]),
        (
            Sampling(logit_bias={5: -1.0}, repetition_penalty=1.2, presence_penalty=0.5, temperature=0),
            [
                ("SS_LogitBias", {"logit_bias": {5: -1.0}}),
                ("SS_RepP", {"rep_p": 1.2}),
                ("SS_PresFreqP", {"pres_p": 0.5, "freq_p": 0.0}),
                "SS_Argmax",
            ],
        ),
        (Sampling(xtc_probability=0.5), [("SS_XTC", {"probability": 0.5, "threshold": 0.1}), "SS_Sample"]),
        (
            Sampling(dry_multiplier=0.8, dry_sequence_breakers=("\n",), dry_penalty_last_n=-1),
            [
                (
                    "SS_DRY",
                    {
                        "dry_multiplier": 0.8,
                        "dry_base": 1.75,
                        "dry_allowed_length": 2,
                        "dry_range": 0,
                        "dry_sequence_breakers": ("\n",),
                    },
                ),
                "SS_Sample",
            ],
        ),
        (Sampling(dry_multiplier=0.8, dry_penalty_last_n=0), ["SS_Sample"]),
    ],
)
def test_sampling_becomes_these_steps(sampling: Sampling, steps: list[Any]) -> None:
    assert list(sampler_steps(sampling)) == [(step, {}) if isinstance(step, str) else step for step in steps]


def test_ignored_sampling_fields_add_no_step() -> None:
    neutral = list(sampler_steps(Sampling()))
    for field, value in {
        "typical_p": 0.5,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "beam_size": 4,
    }.items():
        assert list(sampler_steps(Sampling(**{field: value}))) == neutral
        assert field in IGNORED
