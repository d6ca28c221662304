"""The fake library has the signatures of the real vLLM."""

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
from modelyard_vllm.options import VllmOptions, engine_arguments
from tests.engines.vllm import real_vllm
from tests.engines.vllm.helpers import FAKE_LIBRARY

HERE = Path(__file__).parent


@cache
def signatures(python: str, *paths: Path) -> dict[str, Any]:
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [python, str(HERE / "library_signatures.py")], env=env, capture_output=True, text=True, check=True
    )
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def fake_signatures() -> dict[str, Any]:
    return signatures(sys.executable, FAKE_LIBRARY, HERE.parents[2])


def test_fake_library_prints_its_signatures() -> None:
    """Otherwise the comparison with the real one, which seldom runs, would compare nothing."""
    printed = fake_signatures()
    assert printed["generators"] == ["generate"]
    assert set(printed["coroutines"]) == {"abort", "remove_lora"}
    assert printed["calls"]["generate"]["lora_request"] == "KEYWORD_ONLY"
    assert "temperature" in printed["fields"]["SamplingParams"]


@pytest.mark.vllm
def test_real_vllm_accepts_every_call_of_the_fake_library() -> None:
    ours, theirs = fake_signatures(), signatures(real_vllm.python())
    for name, parameters in ours["calls"].items():
        assert parameters.items() <= theirs["calls"][name].items(), name
    for name, fields in ours["fields"].items():
        assert set(fields) <= set(theirs["fields"][name]), name
    for name in ("delta", "is_dict", "request_errors", "dead_error", "coroutines", "generators"):
        assert ours[name] == theirs[name], name


@pytest.mark.vllm
def test_real_vllm_knows_every_argument_that_our_options_become() -> None:
    options = VllmOptions(
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
    arguments = engine_arguments(options, {"main": CacheInfo(512)})
    assert len(arguments) > 20
    assert arguments.keys() <= set(signatures(real_vllm.python())["fields"]["AsyncEngineArgs"])
