"""The stand-in has the shapes of the real vLLM, and of nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.engines.vllm.options import VllmOptions, engine_arguments
from tests.engines.vllm import real_vllm

HERE = Path(__file__).parent


@cache
def shapes(python: str, *paths: Path) -> dict[str, Any]:
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([python, str(HERE / "shapes.py")], env=env, capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def standin() -> dict[str, Any]:
    return shapes(sys.executable, HERE / "standin", HERE.parents[2])


def test_standin_tells_its_shapes() -> None:
    """Else the comparison with the real one, which is seldom run, would compare nothing."""
    told = standin()
    assert told["generators"] == ["generate"]
    assert set(told["coroutines"]) == {"abort", "remove_lora"}
    assert told["calls"]["generate"]["lora_request"] == "KEYWORD_ONLY"
    assert "temperature" in told["fields"]["SamplingParams"]


@pytest.mark.vllm
def test_real_vllm_takes_every_call_that_the_standin_takes() -> None:
    ours, theirs = standin(), shapes(real_vllm.python())
    for name, parameters in ours["calls"].items():
        assert parameters.items() <= theirs["calls"][name].items(), name
    for name, fields in ours["fields"].items():
        assert set(fields) <= set(theirs["fields"][name]), name
    for name in ("deltas", "is_dict", "refusals", "death", "coroutines", "generators"):
        assert ours[name] == theirs[name], name


@pytest.mark.vllm
def test_real_vllm_knows_every_argument_that_our_fields_become() -> None:
    settings = VllmOptions(
        vllm_model="m",
        vllm_tokenizer="t",
        vllm_revision="main",
        vllm_trust_remote_code=True,
        vllm_quantization="awq",
        vllm_gpu_memory_utilization=0.5,
        vllm_kv_cache_memory_bytes=1 << 30,
        vllm_kv_cache_dtype="fp8",
        vllm_tensor_parallel_size=2,
        vllm_pipeline_parallel_size=2,
        vllm_max_num_seqs=4,
        vllm_max_num_batched_tokens=2048,
        vllm_enable_prefix_caching=True,
        vllm_enforce_eager=True,
        vllm_seed=1,
        vllm_limit_mm_per_prompt={"image": 1},
        vllm_max_pixels=1000,
        vllm_speculative_method="ngram",
        vllm_num_speculative_tokens=2,
        lora={"a": "b"},
        vllm_max_lora_rank=8,
    )
    told = engine_arguments(settings, {"main": CacheInfo(512)})
    assert len(told) > 20
    assert told.keys() <= set(shapes(real_vllm.python())["fields"]["AsyncEngineArgs"])
