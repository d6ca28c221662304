"""Which tensors go to the GPU, and what is given up for a model that is larger than its memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.core.engine import AvailableMemory, CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.estimate import estimate_memory, layer_weights, memory_by_device
from modelyard.engines.llama_cpp.model_shape import ModelShape
from modelyard.engines.llama_cpp.offload import FitChoice, fit_to_memory, limit_memory
from modelyard.engines.llama_cpp.options import Options
from modelyard.libllama import GpuDevice
from modelyard.library.gguf import TensorInfo
from tests.engines.llama_cpp.exact_models import exact_model
from tests.engines.llama_cpp.helpers import id_prompt, running, spec
from tests.engines.reading import assert_alike, read

GIB, MIB = 1 << 30, 1 << 20
RAM = 200 * GIB
LAYERS = 40


def moe(experts: int = GIB, rest: int = 256 * MIB) -> ModelShape:
    """40 layers with `experts` and `rest` bytes each, an output and a table of 1 GiB."""
    tensors, offset = [], 0
    for layer in range(LAYERS):
        for name, size in (("ffn_down_exps", experts), ("attn_q", rest)):
            if size:
                tensors.append(TensorInfo(f"blk.{layer}.{name}.weight", (1, 1), 8, offset))
                offset += size
    for name in ("output.weight", "token_embd.weight"):
        tensors.append(TensorInfo(name, (1, 1), 8, offset))
        offset += GIB
    # 4 KiB of KV per layer and token
    return ModelShape(
        offset, 131_072, LAYERS, 1024, 16, 32_000, LAYERS * 1024, LAYERS * 1024, files=((offset, tensors),)
    )


def fitted(model: ModelShape, gpu: int, window: int = 32_768, ram: int = RAM, **options: Any) -> FitChoice:
    machine = AvailableMemory(ram, {"CUDA0": gpu} if gpu else {})
    return fit_to_memory(model, Options(path="", fit=True, **options), {"main": CacheInfo(window)}, machine)


@pytest.mark.parametrize(
    ("gpu", "layers", "experts", "type_k", "changes"),
    [
        pytest.param(80 * GIB, -1, 0, "f16", "as configured", id="all on the GPU"),
        pytest.param(40 * GIB, -1, 18, "f16", "the experts of 18 of 40 layers in RAM", id="some experts in RAM"),
        pytest.param(20 * GIB, -1, 38, "f16", "the experts of 38 of 40 layers in RAM", id="most experts in RAM"),
        pytest.param(17 * GIB, -1, 38, "q8_0", "KV of q8_0, the experts of 38 of 40 layers in RAM", id="smaller KV"),
        pytest.param(
            8 * GIB, 19, 40, "q8_0", "KV of q8_0, all experts in RAM, 19 of 41 layers on the GPU", id="few layers"
        ),
    ],
)
def test_a_mixture_of_experts_leaves_experts_in_ram_first(
    gpu: int, layers: int, experts: int, type_k: str, changes: str
) -> None:
    choice = fitted(moe(), gpu)
    assert choice.description == changes
    assert (choice.options.n_gpu_layers, choice.options.n_cpu_moe) == (layers, experts)
    assert (choice.caches["main"].type_k, choice.caches["main"].window) == (type_k, 32_768)


def test_a_dense_model_gets_smaller_kv_and_then_fewer_layers() -> None:
    dense = moe(experts=0, rest=GIB)
    assert fitted(dense, 48 * GIB).description == "as configured"
    assert fitted(dense, 45 * GIB).description == "KV of q8_0"
    choice = fitted(dense, 24 * GIB)
    assert choice.description == f"KV of q8_0, {choice.options.n_gpu_layers} of 41 layers on the GPU"
    assert 15 < int(choice.options.n_gpu_layers) < 24


def test_the_window_shrinks_only_if_ram_does_not_suffice_either() -> None:
    dense = moe(experts=0, rest=GIB)
    choice = fitted(dense, 0, window=131_072, ram=52 * GIB)
    assert choice.description == "windows of at most 65536 tokens, KV of q8_0"
    assert choice.caches["main"] == CacheInfo(65_536, type_k="q8_0", type_v="q8_0")
    assert fitted(dense, 0, window=131_072, ram=GIB).caches["main"].window == 4096, "loading explains what is missing"


def test_quantized_values_are_not_chosen_without_flash_attention() -> None:
    choice = fitted(moe(experts=0, rest=GIB), 45 * GIB, flash_attn="off")
    assert (choice.caches["main"].type_k, choice.caches["main"].type_v) == ("q8_0", "f16")


def test_experts_and_single_tensors_in_ram_leave_room_on_the_gpu() -> None:
    model = moe()
    for options, expected in (
        (Options(path=""), LAYERS * (GIB + 256 * MIB) + GIB),
        (Options(path="", n_cpu_moe=10), 30 * GIB + LAYERS * 256 * MIB + GIB),
        (Options(path="", n_cpu_moe=-1), LAYERS * 256 * MIB + GIB),
        (Options(path="", tensor_overrides={"attn_q": "CPU"}), LAYERS * GIB + GIB),
        (Options(path="", n_cpu_moe=-1, tensor_overrides={r"blk\.0\..*exps": "CUDA0"}), 40 * 256 * MIB + 2 * GIB),
    ):
        assert sum(layer_weights(model, options)) == expected


def test_the_estimate_knows_what_stays_in_ram() -> None:
    machine = AvailableMemory(RAM, {"CUDA0": 80 * GIB})
    memory = estimate_memory(moe(), Options(path="", n_cpu_moe=-1), {"main": CacheInfo(4096)}, machine)
    gpu, ram = memory_by_device(memory)
    assert memory.ram_weights == 40 * GIB <= ram
    assert gpu < 16 * GIB
    assert (memory.gpu_layers, memory.layers) == (41, 41)


def test_a_limit_hides_the_rest_of_the_gpus_memory() -> None:
    free = AvailableMemory(RAM, {"a": 80 * GIB, "b": GIB})
    assert limit_memory(Options(path="", gpu_memory_mb=2048), free).gpus == {"a": 2 * GIB, "b": GIB}
    assert limit_memory(Options(path=""), free) == free


# --- with llama.cpp ---------------------------------------------------------------------------------------------------


async def test_answers_do_not_depend_on_where_tensors_are() -> None:
    run = list(range(40))
    async with running({"main": CacheInfo(256)}, path=str(exact_model())) as engine:
        expected = await read(engine.generate(id_prompt(run)))
    moved = {"tensor_overrides": {r"blk\.0\.": "CPU"}, "n_cpu_moe": -1, "tensor_split": [1.0], "split_mode": "layer"}
    async with running({"main": CacheInfo(256)}, path=str(exact_model()), mlock=True, **moved) as engine:
        assert_alike(await read(engine.generate(id_prompt(run))), expected)
    async with running({"main": CacheInfo(256)}, path=str(exact_model()), direct_io=True) as engine:
        assert_alike(await read(engine.generate(id_prompt(run))), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["CUDA7"]}, "there is no device 'CUDA7'; devices: none"),
        ({"tensor_overrides": {"attn": "CUDA7"}}, "tensor_overrides: there is no device 'CUDA7'; devices: CPU"),
    ],
)
async def test_an_unknown_device_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        async with running({"main": CacheInfo(256)}, path=str(exact_model()), **options):
            pass
    assert refused.value.code == "device_unknown"


# --- several GPUs: what llama.cpp is told ---------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, int]:
    """As if the library had found them."""
    handles = {b"CUDA0": 0x1000, b"CUDA1": 0x2000}
    gpus = [GpuDevice("CUDA0", "", 8 * GIB, 8 * GIB), GpuDevice("CUDA1", "", 24 * GIB, 24 * GIB)]
    monkeypatch.setattr(lib, "gpu_devices", lambda: gpus)
    monkeypatch.setattr(lib, "ggml_backend_dev_by_name", handles.get)
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    return handles


def told(**options: Any) -> Any:
    """The parameters, and what their pointers lead to."""
    params = lib.llama_model_default_params()
    placement = loading.TensorPlacement(Options(path="", **options))
    placement.apply(params)
    devices = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p)) if params.devices else None
    named = [devices[at] for at in range(3)] if devices is not None else None
    split = [params.tensor_split[at] for at in range(3)] if params.tensor_split else None
    return params.split_mode, params.main_gpu, named, split


@pytest.mark.usefixtures("two_gpus")
def test_llama_cpp_is_told_how_gpus_share_a_model() -> None:
    assert told() == (1, 0, None, None)
    assert told(split_mode="none", main_gpu=1) == (0, 1, None, None)
    assert told(split_mode="layer", tensor_split=[3, 1]) == (1, 0, None, [3, 1, 0])
    assert told(split_mode="row")[0] == 2
    assert told(split_mode="tensor")[0] == 3
    assert told(devices=["CUDA1", "CUDA0"])[2] == [0x2000, 0x1000, None]
    assert told(devices=["CUDA1"], tensor_split=[1])[2:] == ([0x2000, None, None], [1, 0, 0])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_mode": "none", "main_gpu": 2}, "main_gpu = 2 counts from 0, and this model has 2 GPUs"),
        ({"split_mode": "none", "main_gpu": 1, "devices": ["CUDA1"]}, "this model has 1 GPU"),
        ({"tensor_split": [1, 1, 1]}, "tensor_split has 3 parts, and this model has 2 GPUs"),
        ({"devices": ["CUDA2"]}, "there is no device 'CUDA2'; devices: CUDA0, CUDA1"),
    ],
)
def test_gpus_that_are_not_there_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        told(**options)
    assert refused.value.code == "device_unknown"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        pytest.param({}, {"CUDA0": 8, "CUDA1": 24}, id="all of them"),
        pytest.param({"devices": ["CUDA1"]}, {"CUDA1": 24}, id="named"),
        pytest.param({"split_mode": "none", "main_gpu": 1}, {"CUDA1": 24}, id="one"),
        pytest.param(
            {"split_mode": "none", "main_gpu": 0, "devices": ["CUDA1", "CUDA0"]},
            {"CUDA1": 24},
            id="one, counted as named",
        ),
        pytest.param({"tensor_split": [1, 1]}, {"CUDA0": 8, "CUDA1": 8}, id="the smaller one limits equal parts"),
        pytest.param({"tensor_split": [1, 3]}, {"CUDA0": 8, "CUDA1": 24}, id="parts like the memory"),
        pytest.param({"tensor_split": [0, 1]}, {"CUDA1": 24}, id="no part, no memory"),
        pytest.param({"tensor_split": [1]}, {"CUDA0": 8}, id="no part named"),
        pytest.param({"gpu_memory_mb": 4096, "tensor_split": [1, 1]}, {"CUDA0": 4, "CUDA1": 4}, id="with a limit"),
    ],
)
def test_the_layers_are_chosen_by_the_memory_that_the_split_allows(
    options: dict[str, Any], gpus: dict[str, int]
) -> None:
    assert loading.free_memory(Options(path="", **options)).gpus == {name: size * GIB for name, size in gpus.items()}


@pytest.mark.parametrize("parts", [[0, 0], [1, -1]])
def test_a_split_without_parts_is_refused(parts: list[float]) -> None:
    with pytest.raises(ValidationError, match="tensor_split must be the parts of the GPUs"):
        Options(path="", tensor_split=parts)


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="direct_io excludes use_mmap and mlock"):
        Options(path="", direct_io=True, mlock=True)
    with pytest.raises(ValidationError, match="is not a regular expression"):
        Options(path="", tensor_overrides={"(": "CPU"})


async def test_a_choice_that_does_not_fit_after_all_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    prepare = loading.prepare_spec

    def prepared(configured: Any, shape: Any, share: float) -> Any:
        shares.append(share)
        return prepare(configured, shape, share)

    def measured(fitted: Any, before: Any) -> None:
        if len(shares) < 3:
            raise InvalidRequest("it takes 90.0 GiB of CUDA0: too much", code="model_too_large")

    monkeypatch.setattr(loading, "prepare_spec", prepared)
    monkeypatch.setattr(loading, "check_fit", measured)
    async with running({"main": CacheInfo(256)}, path=str(exact_model()), fit=True) as engine:
        assert isinstance(engine, LlamaCppEngine)
        assert len(engine._contexts) == 1
    assert shares == [1.0, 0.9, 0.75]


def test_a_fitted_window_is_the_one_that_clients_see() -> None:
    asked = spec({"main": CacheInfo(131_072)}, fit=True, path=str(exact_model()))
    fitted_spec = loading.fit_spec(asked, moe(experts=0, rest=GIB))
    assert fitted_spec.caches["main"].window < 131_072
