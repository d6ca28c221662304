"""The memory estimate of a model: close to what llama.cpp allocates, and a refusal with the numbers."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import library, loading, selftest
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import (
    WeightsMemory,
    check_fits,
    compute_bytes,
    estimate_memory,
    extra_buffers,
    installed_extra_buffers,
    kv_bytes,
    layer_weights,
    layers_that_fit,
    max_outputs,
    offloaded_layers,
    weights_memory,
)
from modelyard.engines.llama_cpp.model_shape import ModelShape, read_model_shape
from modelyard.engines.llama_cpp.options import Options
from modelyard.library.architectures import refusal
from modelyard.library.gguf import TensorInfo
from modelyard.telemetry import system
from modelyard.tokenizer import llama_log
from tests.engines.llama_cpp import architectures, wide_models
from tests.engines.llama_cpp.exact_models import recurrent_model, sliding_model, write
from tests.engines.llama_cpp.helpers import model_buffers, model_file, running, spec
from tests.real_models import gemma

GIB = 2**30
NO_GPU = AvailableMemory(64 * GIB)


def allocated(file: Path, options: Options, info: CacheInfo, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    with model_buffers(monkeypatch) as found:
        model = loading.load_model(file, options, lambda _: True)
        raw = loading.create_context(model, "main", info, options, max_outputs(info, options))
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
def test_the_estimate_is_within_10_percent_of_what_llama_cpp_allocates(
    info: CacheInfo, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec({"main": info}, n_batch=512, **options)
    real = allocated(model_file(), asked.options, info, monkeypatch)
    guess = llama_cpp.estimate(asked, NO_GPU)
    assert guess.device == "cpu"
    assert guess.weights + guess.page_cache == pytest.approx(real["model"], rel=0.1)
    assert guess.kv == pytest.approx(real["KV"], rel=0.01)
    assert guess.compute == pytest.approx(real["compute"], rel=0.15)
    assert guess.total + guess.page_cache == pytest.approx(sum(real.values()), rel=0.1)


# --- next to llama.cpp ------------------------------------------------------------------------------------------------


class Simulated:
    """What contexts of a model would take, as llama.cpp says without allocating it."""

    def __init__(self, model: Any, lines: list[str]) -> None:
        self._model, self._lines = model, lines

    def context(self, info: CacheInfo, options: Options) -> tuple[float, float]:
        """Bytes of its KV and states, and of its compute and output buffers."""
        self._lines.clear()
        lib.llama_free(loading.create_context(self._model, "main", info, options, max_outputs(info, options)))
        text = "".join(self._lines)
        kv = re.findall(r"size = +([\d.]+) MiB \( *\d+ cells", text)
        compute = re.findall(r"(?:compute|output) buffer size = +([\d.]+) MiB", text)
        return 2**20 * sum(map(float, kv)), 2**20 * sum(map(float, compute))


@contextmanager
def simulated_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    lines: list[str] = []
    listener: Any = lib.llama_log_callback(lambda _level, text, _: lines.append(text.decode("utf-8", "replace")))
    params = lib.llama_model_default_params()
    params.no_alloc, params.load_mode = True, 0
    with ExitStack() as stack:
        stack.callback(llama_log.clear)
        stack.enter_context(monkeypatch.context()).setattr(llama_log, "callback", listener)
        llama_log.clear()
        model = lib.llama_model_load_from_file(str(file).encode(), params)
        assert model, "".join(lines)
        stack.callback(lib.llama_model_free, model)
        yield Simulated(model, lines)


SETTINGS: dict[str, tuple[CacheInfo, dict[str, Any]]] = {
    "one conversation": (CacheInfo(4096), {"flash_attn": "on"}),
    "two, q8_0, half a window": (CacheInfo(16384, 2, type_k="q8_0", type_v="q8_0"), {"flash_attn": "on"}),
    "four, no flash attention": (CacheInfo(8192, 4), {"flash_attn": "off", "n_ubatch": 128}),
    "long, KV of windows only": (CacheInfo(32768), {"flash_attn": "on", "n_ubatch": 1024, "swa_full": False}),
}


@pytest.mark.parametrize("name", wide_models.MODELS)
def test_estimates_of_well_known_models_are_within_10_percent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, found = wide_models.wide_model(name), dict[str, tuple[float, float]]()
    with simulated_model(file, monkeypatch) as simulated:
        for setting, (info, chosen) in SETTINGS.items():
            options = Options(path=str(file), speculation="off", **chosen)
            guess = estimate_memory(read_model_shape(file), options, {"main": info}, NO_GPU, buffers=())
            kv, compute = simulated.context(info, options)
            assert guess.kv == pytest.approx(kv, rel=0.01), setting
            found[setting] = guess.compute / compute, guess.total / (guess.weights + kv + compute)
    assert all(0.75 < compute < 1.35 and 0.95 < total < 1.05 for compute, total in found.values()), found


def test_a_real_model_with_a_sliding_window_and_262144_tokens_takes_what_is_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, shape = gemma(), read_model_shape(gemma())
    assert (shape.vocab, shape.trained, shape.layers) == (262_144, 32_768, 18)
    info, options = CacheInfo(4096, 2), Options(path=str(file), n_ubatch=128, flash_attn="on", speculation="off")
    real, guess = allocated(file, options, info, monkeypatch), estimate_memory(shape, options, {"main": info}, NO_GPU)
    assert guess.weights + guess.page_cache == pytest.approx(real["model"], rel=0.1)
    assert guess.kv == pytest.approx(real["KV"], rel=0.01)
    assert guess.compute == pytest.approx(real["compute"], rel=0.15)
    with simulated_model(file, monkeypatch) as simulated:
        for setting, (info, chosen) in SETTINGS.items():
            options = Options(path=str(file), speculation="off", **chosen)
            guess = estimate_memory(shape, options, {"main": info}, NO_GPU, buffers=())
            kv, compute = simulated.context(info, options)
            assert guess.kv == pytest.approx(kv, rel=0.01), setting
            assert guess.total == pytest.approx(guess.weights + kv + compute, rel=0.05), setting
    everything = estimate_memory(shape, Options(path=str(file), swa_full=True), {"main": CacheInfo(32768)}, NO_GPU)
    windows = estimate_memory(shape, Options(path=str(file), swa_full=False), {"main": CacheInfo(32768)}, NO_GPU)
    assert windows.kv < everything.kv / 3


def test_the_kv_of_every_architecture_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[tuple[CacheInfo, dict[str, Any]]] = [
        (CacheInfo(4096, 2), {"n_ubatch": 512, "flash_attn": "on"}),
        (CacheInfo(16384, 2, type_k="q8_0"), {"n_ubatch": 64, "flash_attn": "on", "swa_full": False}),
        (CacheInfo(4096, 1), {"n_ubatch": 64, "flash_attn": "off"}),
    ]
    checked, wrong = 0, dict[tuple[str, int], float]()
    for name in (name for name in architectures.ARCHITECTURES if refusal(name) is None):
        if not (file := architectures.model(name)).is_file():  # this library does not know it
            continue
        with simulated_model(file, monkeypatch) as simulated:
            for info, chosen in settings:
                options = Options(path=str(file), **chosen)
                try:
                    kv, _ = simulated.context(info, options)
                except InvalidRequest:  # llama.cpp cannot quantize keys of some widths
                    continue
                guess, checked = kv_bytes(read_model_shape(file), info, options), checked + 1
                if guess != pytest.approx(kv, rel=0.01, abs=2**14):  # it says two digits of a MiB
                    wrong[name, info.window] = guess / max(1.0, kv)
    assert wrong == {}
    assert checked > 2.8 * len(architectures.ARCHITECTURES)


@pytest.mark.parametrize("made", [sliding_model, recurrent_model])
def test_models_that_cannot_rewind_are_estimated_too(made: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    info = CacheInfo(1024, 64)
    asked = spec({"main": info}, path=str(made()))
    real = allocated(made(), asked.options, info, monkeypatch)
    assert llama_cpp.estimate(asked, NO_GPU).kv == pytest.approx(real["KV"], rel=0.01)


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "nemotron_h", "jamba"])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_the_states_that_drafts_need_are_estimated(
    name: str, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, file = CacheInfo(256, 16), architectures.model(name)
    asked = spec({"main": info}, path=str(file), speculation=speculation, draft_n_max=6)
    real = allocated(file, asked.options, info, monkeypatch)
    assert llama_cpp.estimate(asked, NO_GPU).kv == pytest.approx(real["KV"], rel=0.02)


def test_every_cache_of_a_model_counts_and_the_weights_count_once() -> None:
    one = llama_cpp.estimate(spec({"main": CacheInfo(1024, 2)}), NO_GPU)
    other = CacheInfo(1024, 2, n_batch=17)
    two = llama_cpp.estimate(spec({"main": CacheInfo(1024, 2), "fast": other}), NO_GPU)
    assert (two.weights, two.kv, two.compute) == (one.weights, 2 * one.kv, 2 * one.compute)


def test_caches_of_one_layout_share_a_context_and_its_compute_buffer() -> None:
    apart = llama_cpp.estimate(spec({"main": CacheInfo(1024, 4)}), NO_GPU)
    assert llama_cpp.estimate(spec({"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}), NO_GPU) == apart


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
    with pytest.raises(InvalidRequest, match=" 0 B are free"):
        loading.check_before_loading(model_file(), spec())


MODEL = ModelShape(
    weights=8 * GIB, trained=8192, layers=31, width=4096, heads=32, vocab=100_000, key=32_768, value=32_768
)


@pytest.mark.parametrize(("asked", "layers"), [(-1, 32), (0, 0), (16, 16), (99, 32), ("auto", 32)])
def test_offloaded_layers_count_against_gpu_memory(asked: Any, layers: int) -> None:
    machine = AvailableMemory(64 * GIB, {"GPU-1": 12 * GIB, "GPU-2": 12 * GIB})
    options = Options(path="m.gguf", n_gpu_layers=asked)
    assert offloaded_layers(MODEL, options, {}, machine) == layers
    estimated = estimate_memory(MODEL, options, {}, machine)
    assert (estimated.device, estimated.gpu_layers, estimated.layers) == ("gpu" if layers else "cpu", layers, 32)
    assert offloaded_layers(MODEL, options, {}, NO_GPU) == 0


AUTO = Options(path="m.gguf")
CACHE = {"main": CacheInfo(8192, 1)}


@pytest.mark.parametrize(
    ("free", "layers"),
    [((24,), 32), ((8,), 28), ((4,), 14), ((0.25,), 0), ((), 0), ((3, 5), 27), ((80, 80), 32)],
)
def test_auto_offloads_as_many_layers_as_fit(free: tuple[float, ...], layers: int) -> None:
    """Each layer has 256 MiB of weights."""
    gpus = {str(n): int(gib * GIB) for n, gib in enumerate(free)}
    assert offloaded_layers(MODEL, AUTO, {}, AvailableMemory(64 * GIB, gpus)) == layers


def test_auto_leaves_room_for_kv_compute_buffers_and_the_draft_model() -> None:
    bare = layers_that_fit(MODEL, AUTO, {}, (8 * GIB,))
    cached = layers_that_fit(MODEL, AUTO, CACHE, (8 * GIB,))
    drafted = layers_that_fit(MODEL, AUTO, CACHE, (8 * GIB,), draft=ModelShape(GIB, 8192, 3, 1024, 8, 100, 512, 512))
    assert bare > cached > drafted > 0
    kv, compute = kv_bytes(MODEL, CACHE["main"], AUTO), compute_bytes(MODEL, CACHE["main"], AUTO)
    taken = cached * MODEL.weights // 32 + (cached - 1) * kv // 31 + compute
    assert 7 * GIB - (MODEL.weights + kv) // 31 < taken <= 7 * GIB


def test_the_output_and_each_block_count_with_their_own_bytes() -> None:
    tensors = [
        TensorInfo("token_embd.weight", (8, 8), 0, 100),
        TensorInfo("blk.0.attn_q.weight", (8, 8), 0, 356),
        TensorInfo("blk.1.attn_q.weight", (8, 8), 0, 612),
        TensorInfo("blk.1.ffn_up.weight", (8, 8), 0, 868),
        TensorInfo("output_norm.weight", (8,), 0, 1124),
    ]
    tied = ModelShape(1156, 0, 2, 8, 1, 8, 8, 8, files=((1156, tensors),))
    assert layer_weights(tied, Options(path="")) == [256, 512, 32 + 256]
    output = TensorInfo("output.weight", (8, 8), 0, 1156)
    untied = ModelShape(1412, 0, 2, 8, 1, 8, 8, 8, files=((1412, [*tensors, output]),))
    assert layer_weights(untied, Options(path="")) == [256, 512, 32 + 256]


def test_auto_becomes_a_number_before_a_model_is_loaded_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "uses_gpu", lambda options: options.n_gpu_layers != 0)
    monkeypatch.setattr(
        loading, "free_memory", lambda _: AvailableMemory(64 * GIB, {"CUDA0": 90 * 2**20, "CUDA1": 90 * 2**20})
    )
    caplog.set_level(logging.INFO)
    asked = spec()
    model = loading.check_before_loading(model_file(), asked)
    found = loading.resolve_gpu_layers(asked, model).options.n_gpu_layers
    assert isinstance(found, int)
    assert 0 < found < 31
    assert f"{found} of 31 layers of 'smollm2' go to the GPU (n_gpu_layers = auto): 180 MiB" in caplog.text
    everything = loading.resolve_gpu_layers(spec(n_gpu_layers=-1), model).options
    assert everything.n_gpu_layers == 31


def test_what_auto_leaves_in_ram_must_fit_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda _: AvailableMemory(20 * 2**20, {"CUDA0": 90 * 2**20}))
    with pytest.raises(InvalidRequest, match="of RAM and 20 MiB are free"):
        loading.check_before_loading(model_file(), spec())
    monkeypatch.setattr(loading, "free_memory", lambda _: AvailableMemory(20 * 2**20, {"CUDA0": 2**32}))
    loading.check_before_loading(model_file(), spec())


@pytest.mark.parametrize(
    ("share", "machine", "place"),
    [
        (1.0, AvailableMemory(64 * GIB, {"a": 5 * GIB}), "GPU memory"),
        (0.5, AvailableMemory(5 * GIB, {"a": 64 * GIB}), "RAM"),
        (0.0, AvailableMemory(9 * GIB), "RAM"),
    ],
)
def test_the_refusal_names_the_memory_that_is_too_small(share: float, machine: AvailableMemory, place: str) -> None:
    memory = MemoryEstimate(8 * GIB, 2 * GIB, GIB, gpu_layers=int(4 * share), layers=4)
    with pytest.raises(InvalidRequest, match=f"of {place} and"):
        check_fits("m", memory, machine)
    check_fits("m", memory, AvailableMemory(64 * GIB, {"a": 64 * GIB}))


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
    assert kv_bytes(found, CacheInfo(4096, 2), Options(path="x")) == 4 * 2 * found.state
    assert compute_bytes(found, CacheInfo(4096, 2), Options(path="x")) > 0


def test_a_list_with_fewer_values_than_layers_is_read(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    facts: dict[str, Any] = {"block_count": 3, "embedding_length": 64, "attention.head_count": 4}
    write(file, {"general.architecture": "odd"} | {f"odd.{key}": value for key, value in facts.items()}, {})
    whole = read_model_shape(file)
    facts["attention.head_count_kv"] = [4]
    write(file, {"general.architecture": "odd"} | {f"odd.{key}": value for key, value in facts.items()}, {})
    assert read_model_shape(file).key == whole.key


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


# Which weights llama.cpp copies into extra buffers: by CPU, by type, and in the installed library.

AVX2 = frozenset({"avx", "avx2"})
AVX512 = AVX2 | {"avx512f", "avx512_vnni"}
AMX = AVX512 | {"amx_tile", "amx_int8"}
NEON = frozenset({"asimd", "asimddp"})
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
Q4_0, Q8_0 = TYPES["Q4_0"], TYPES["Q8_0"]


def matrix(kind: int, *shape: int, name: str = "blk.0.ffn_up.weight", offset: int = 0) -> TensorInfo:
    return TensorInfo(name, shape or (512, 256), kind, offset)


def buffer_of(tensor: TensorInfo, features: frozenset[str], *, amx_kernels: bool = True) -> str | None:
    return next((each.name for each in extra_buffers(features, amx_kernels=amx_kernels) if each.takes(tensor)), None)


@pytest.mark.parametrize(
    ("features", "amx", "repack"),
    [
        (frozenset[str](), "", ""),
        (AVX2, "", "Q4_0 Q4_K"),
        (AVX512, "", "Q4_0 Q2_K Q4_K"),
        (AMX, "F16 Q4_0 Q4_1 Q8_0 Q4_K Q6_K", "Q2_K"),
        (NEON, "", "Q4_0 Q8_0 Q4_K Q6_K"),
    ],
)
def test_each_cpu_copies_the_types_that_it_has_kernels_for(features: frozenset[str], amx: str, repack: str) -> None:
    found = {name: buffer_of(matrix(kind), features) for name, kind in TYPES.items()}
    assert " ".join(name for name in TYPES if found[name] == "AMX") == amx
    assert " ".join(name for name in TYPES if found[name] == "CPU_REPACK") == repack


def test_a_library_without_amx_kernels_uses_none_on_a_cpu_that_has_them() -> None:
    assert buffer_of(matrix(Q4_0), AMX, amx_kernels=False) == "CPU_REPACK"
    assert buffer_of(matrix(Q8_0), AMX, amx_kernels=False) is None


def test_experts_and_unaligned_shapes_use_other_buffers_or_none() -> None:
    experts = matrix(Q4_0, 8, 512, 256, name="blk.0.ffn_up_exps.weight")
    assert buffer_of(experts, AMX) == "CPU_REPACK"
    assert buffer_of(matrix(Q8_0, 8, 512, 256, name=experts.name), AMX) is None
    assert buffer_of(matrix(Q4_0, 8, 512, 256, name="blk.0.attn_k_b.weight"), AMX) == "AMX"
    assert buffer_of(matrix(Q4_0, 8, 512, 256, name="blk.0.attn_k_b.weight"), AVX2) is None
    assert buffer_of(matrix(Q4_0, 24, 256), AMX) == "CPU_REPACK"  # rows come in 32
    assert buffer_of(matrix(Q4_0, 12, 256), AMX) is None  # or in 8
    assert buffer_of(matrix(Q4_0, 256), AMX) is None


# --- the sum ----------------------------------------------------------------------------------------------------------

BYTES = 512 * 256 // 32 * 34  # of one Q8_0 matrix


def q8_model(*, tied: bool) -> list[TensorInfo]:
    names = ["token_embd", "blk.0.attn_q", "blk.0.ffn_up", "output_norm"] + ([] if tied else ["output"])
    kinds = [0 if name.endswith("norm") else Q8_0 for name in names]
    return [
        TensorInfo(f"{name}.weight", (512, 256) if kind else (256,), kind, 1000 + at * BYTES)
        for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]


@pytest.mark.parametrize("features", [AVX2, AVX512, frozenset[str]()])
def test_without_copies_the_weights_are_the_file(features: frozenset[str]) -> None:
    files = [(10 * BYTES, q8_model(tied=False))]
    assert weights_memory(files, extra_buffers(features, amx_kernels=True), mmap=True) == WeightsMemory(10 * BYTES)


def test_copied_weights_count_in_their_new_size_and_their_pages_in_the_file_as_page_cache() -> None:
    files, buffers = [(10 * BYTES, q8_model(tied=False))], extra_buffers(AMX, amx_kernels=True)
    grown = 512 * 256 // 32 * 4  # four bytes for each block of 34
    # Two matrices lie between the embedding and the norm, which stay; the output lies behind them: it is unmapped.
    assert weights_memory(files, buffers, mmap=True) == WeightsMemory(10 * BYTES + 3 * grown, 2 * BYTES)
    assert weights_memory(files, buffers, mmap=False) == WeightsMemory(10 * BYTES + 3 * grown)


def test_a_tied_embedding_is_held_twice() -> None:
    files, buffers = [(10 * BYTES, q8_model(tied=True))], extra_buffers(AMX, amx_kernels=True)
    grown = 512 * 256 // 32 * 4
    assert weights_memory(files, buffers, mmap=True) == WeightsMemory(11 * BYTES + 3 * grown, 2 * BYTES)


def test_the_files_of_a_split_model_are_mapped_separately() -> None:
    first, second = q8_model(tied=False)[:2], q8_model(tied=False)[2:]
    buffers = extra_buffers(AMX, amx_kernels=True)
    parts = weights_memory([(4 * BYTES, first), (6 * BYTES, second)], buffers, mmap=True)
    assert parts.needed == weights_memory([(10 * BYTES, first + second)], buffers, mmap=True).needed
    assert parts.page_cache == 0  # one tensor stays in each file, so nothing lies between two of them


# --- this machine -----------------------------------------------------------------------------------------------------


def test_cpu_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    for line in ("flags\t\t: fpu avx2 amx_int8", "Features\t: fp avx2 amx_int8"):
        (tmp_path / line[:5]).write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}\n")
        assert {"avx2", "amx_int8"} < library.cpu_features(tmp_path / line[:5])
    (tmp_path / "odd").write_text("processor: 0\n")
    assert library.cpu_features(tmp_path / "odd") == frozenset()


def test_amx_kernels_are_found_in_the_librarys_file(tmp_path: Path) -> None:
    for name, code in (("with", b"\x7fELF..amx repack tensor %s"), ("without", b"\x7fELF..CPU_REPACK")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libggml-cpu.so").write_bytes(code)
    assert library.has_amx_kernels(tmp_path / "with")
    assert not library.has_amx_kernels(tmp_path / "without")


def test_the_installed_library_has_the_expected_buffer_types() -> None:
    library = lib.raw
    library.ggml_backend_dev_by_type.restype = library.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_buft_name.restype = ctypes.c_char_p
    device = ctypes.c_void_p(library.ggml_backend_dev_by_type(0))
    registry = ctypes.c_void_p(library.ggml_backend_dev_backend_reg(device))
    address = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    types: Any = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    names = list[str]()
    while types[len(names)]:
        names.append(library.ggml_backend_buft_name(ctypes.c_void_p(types[len(names)])).decode())
    assert [buffer.name for buffer in installed_extra_buffers()] == names


@pytest.mark.parametrize("mmap", [True, False])
def test_a_model_with_every_type_takes_the_expected_memory_on_this_cpu(
    tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    selftest.write_tiny_model(file)
    expected = weights_memory(read_model_shape(file).files, installed_extra_buffers(), mmap=mmap)
    with model_buffers(monkeypatch) as taken:
        lib.llama_model_free(loading.load_model(file, Options(path=str(file), use_mmap=mmap), lambda _: True))
    assert expected.needed + expected.page_cache == pytest.approx(taken["model"], rel=0.02)
