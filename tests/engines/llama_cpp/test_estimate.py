"""The memory estimate of a model: close to what llama.cpp allocates, and a refusal with the numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import (
    ModelShape,
    check_fits,
    compute_bytes,
    estimate_memory,
    gpu_share,
    kv_bytes,
    read_model_shape,
)
from modelyard.engines.llama_cpp.options import Options
from modelyard.telemetry import system
from tests.engines.llama_cpp.exact_models import recurrent_model, sliding_model, write
from tests.engines.llama_cpp.helpers import model_buffers, model_file, running, spec

GIB = 2**30
NO_GPU = AvailableMemory(64 * GIB)


def allocated(file: Path, options: Options, info: CacheInfo, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    with model_buffers(monkeypatch) as found:
        model = loading.load_model(file, options, lambda _: True)
        raw = loading.create_context(model, "main", info, options)
        lib.llama_free(raw)
        lib.llama_model_free(model)
    assert set(found) == {"model", "KV", "compute"}
    return found


@pytest.mark.parametrize(
    ("info", "options"),
    [
        (CacheInfo(2048, 2), {"n_ubatch": 512}),
        (CacheInfo(8192, 1, flash_attn=True), {"n_ubatch": 512}),
        (CacheInfo(8192, 1, flash_attn=False), {"n_ubatch": 256}),
        (CacheInfo(1000, 3, type_k="q8_0"), {"n_ubatch": 64}),
        (CacheInfo(4096, 1, flash_attn=True, type_k="q4_0", type_v="q8_0"), {"n_ubatch": 128}),
    ],
)
def test_the_estimate_is_within_15_percent_of_what_llama_cpp_allocates(
    info: CacheInfo, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec({"main": info}, n_batch=512, **options)
    real = allocated(model_file(), asked.options, info, monkeypatch)
    guess = llama_cpp.estimate(asked, NO_GPU)
    assert guess.device == "cpu"
    assert guess.weights + guess.page_cache == pytest.approx(real["model"], rel=0.15)
    assert guess.kv == pytest.approx(real["KV"], rel=0.01)
    assert guess.compute == pytest.approx(real["compute"], rel=0.15)
    assert guess.total + guess.page_cache == pytest.approx(sum(real.values()), rel=0.15)


@pytest.mark.parametrize("made", [sliding_model, recurrent_model])
def test_models_that_cannot_rewind_are_estimated_too(made: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    info = CacheInfo(1024, 64)
    asked = spec({"main": info}, path=str(made()))
    real = allocated(made(), asked.options, info, monkeypatch)
    assert llama_cpp.estimate(asked, NO_GPU).kv == pytest.approx(real["KV"], rel=0.15)


def test_every_cache_of_a_model_counts_and_the_weights_count_once() -> None:
    one = llama_cpp.estimate(spec({"main": CacheInfo(1024, 2)}), NO_GPU)
    two = llama_cpp.estimate(spec({"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}), NO_GPU)
    assert (two.weights, two.kv, two.compute) == (one.weights, 2 * one.kv, 2 * one.compute)


async def test_a_window_of_ten_million_tokens_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidRequest, match=r"'smollm2' needs about \d+\.\d GiB of RAM and .* are free") as refused:
        async with running({"main": CacheInfo(10_000_000)}):
            pass
    assert refused.value.code == "model_too_large"
    assert re.search(r"weights \d+ MiB, KV caches [\d.]+ GiB, compute buffers [\d.]+ [GM]iB", refused.value.message)


def test_overcommit_skips_the_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_memory", lambda **_: AvailableMemory(0))
    asked = spec(overcommit=True)
    loading.check_before_loading(model_file(), asked)
    with pytest.raises(InvalidRequest, match="0 MiB are free"):
        loading.check_before_loading(model_file(), spec())


MODEL = ModelShape(
    weights=8 * GIB, trained=8192, layers=31, width=4096, heads=32, vocab=100_000, key=32_768, value=32_768
)


@pytest.mark.parametrize(("layers", "share"), [(-1, 1.0), (0, 0.0), (16, 0.5), (99, 1.0)])
def test_offloaded_layers_count_against_gpu_memory(layers: int, share: float) -> None:
    machine = AvailableMemory(64 * GIB, {"GPU-1": 12 * GIB, "GPU-2": 12 * GIB})
    options = Options(path="m.gguf", n_gpu_layers=layers)
    assert gpu_share(MODEL, options, machine) == share
    assert estimate_memory(MODEL, options, {}, machine).device == ("gpu" if share else "cpu")
    assert gpu_share(MODEL, options, NO_GPU) == 0.0


@pytest.mark.parametrize(
    ("share", "machine", "place"),
    [
        (1.0, AvailableMemory(64 * GIB, {"a": 5 * GIB}), "GPU memory"),
        (0.5, AvailableMemory(5 * GIB, {"a": 64 * GIB}), "RAM"),
        (0.0, AvailableMemory(9 * GIB), "RAM"),
    ],
)
def test_the_refusal_names_the_memory_that_is_too_small(share: float, machine: AvailableMemory, place: str) -> None:
    with pytest.raises(InvalidRequest, match=f"of {place} and"):
        check_fits("m", MemoryEstimate(8 * GIB, 2 * GIB, GIB), share, machine)
    check_fits("m", MemoryEstimate(8 * GIB, 2 * GIB, GIB), share, AvailableMemory(64 * GIB, {"a": 64 * GIB}))


def test_recurrent_layers_keep_a_state_instead_of_kv(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"general.architecture": "odd"} | {
        f"odd.{key}": value
        for key, value in {
            "block_count": 3,
            "embedding_length": 64,
            "ssm.inner_size": 128,
            "ssm.state_size": 16,
            "ssm.conv_kernel": 4,
            "vocab_size": 100,
        }.items()
    }
    file = tmp_path / "odd.gguf"
    write(file, facts, {})
    found = read_model_shape(file)
    assert (found.key, found.value, found.state) == (0, 0, 3 * 128 * 19)
    assert kv_bytes(found, CacheInfo(4096, 2)) == 4 * 2 * found.state
    assert compute_bytes(found, CacheInfo(4096, 2), Options(path="x")) > 0


def test_invalid_metadata_is_an_error_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    write(file, {"general.architecture": "odd", "odd.block_count": "many"}, {})
    with pytest.raises(InvalidRequest, match="has invalid metadata"):
        read_model_shape(file)
    loading.check_before_loading(file, spec())  # llama.cpp itself will say what is wrong


# --- beyond the trained length ----------------------------------------------------------------------------------------


def test_a_window_beyond_the_trained_length_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loading.check_before_loading(model_file(), spec({"main": CacheInfo(8192), "long": CacheInfo(9000)}))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'long' has a window of 9000 tokens, but the model 'smollm2' was trained on 8192" in warning


def test_rope_options_suppress_the_warning_and_reach_the_context(caplog: pytest.LogCaptureFixture) -> None:
    asked = spec({"main": CacheInfo(9000)}, rope_scaling="yarn", rope_freq_scale=0.5, yarn_orig_ctx=8192)
    with caplog.at_level(logging.WARNING):
        loading.check_before_loading(model_file(), asked)
    assert not caplog.records
    params = loading.context_parameters(asked.caches["main"], asked.options)
    assert (params.rope_scaling_type, params.rope_freq_scale, params.yarn_orig_ctx) == (2, 0.5, 8192)
    plain = loading.context_parameters(CacheInfo(512), spec().options)
    assert (plain.rope_scaling_type, plain.rope_freq_base, plain.yarn_ext_factor) == (-1, 0.0, -1.0)


def test_a_draft_model_adds_its_weights_and_a_context_per_cache() -> None:
    caches = {"main": CacheInfo(1024, 2), "fast": CacheInfo(512, 1)}
    alone = llama_cpp.estimate(spec(caches), NO_GPU)
    drafted = llama_cpp.estimate(spec(caches, draft_model_path=str(model_file()), speculation="draft"), NO_GPU)
    unused = llama_cpp.estimate(spec(caches, draft_model_path=str(model_file()), speculation="ngram"), NO_GPU)
    assert (drafted.weights, drafted.kv) == (2 * alone.weights, 2 * alone.kv)
    assert drafted.compute >= 2 * alone.compute
    assert (unused.weights, unused.kv) == (alone.weights, alone.kv)
