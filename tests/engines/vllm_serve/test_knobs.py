"""The knobs of the vllm serve engine."""

from __future__ import annotations

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.telemetry.system import GpuMemory
from modelyard_vllm import knobs as in_process
from modelyard_vllm.serve import knobs
from tests.engines.vllm_serve.helpers import options

GIB = 2**30


def gpu(total: int, name: str = "NVIDIA H200") -> GpuMemory:
    return GpuMemory(uuid="GPU-1", name=name, total=total, used=0, free=total)


def current(*gpus: GpuMemory, monkeypatch: pytest.MonkeyPatch, **chosen: object) -> dict[str, object]:
    monkeypatch.setattr(knobs, "read_gpus", lambda: gpus)
    return dict(knobs.current(EngineSpec("m", options(**chosen), {"main": CacheInfo(32_768, 4)}), "main"))


def test_knobs_are_those_of_vllm_in_process() -> None:
    assert (knobs.knobs, knobs.forbids) == (in_process.knobs, in_process.forbids)


@pytest.mark.parametrize(
    ("one", "tokens"),
    [
        (gpu(24 * GIB), 2048),
        (gpu(80 * GIB, "NVIDIA A100-SXM4-80GB"), 2048),
        (gpu(141 * GIB), 8192),
        (gpu(180 * GIB), 16384),
    ],
    ids=["small", "large, but of an older family", "large", "very large"],
)
def test_default_step_is_larger_on_a_large_gpu(one: GpuMemory, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current(one, monkeypatch=monkeypatch)["vllm_max_num_batched_tokens"] == tokens


def test_without_a_gpu_every_rank_adds_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current(monkeypatch=monkeypatch)["vllm_max_num_batched_tokens"] == 2048
    assert current(monkeypatch=monkeypatch, vllm_tensor_parallel_size=2)["vllm_max_num_batched_tokens"] == 4096
