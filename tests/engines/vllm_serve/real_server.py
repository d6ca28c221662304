"""A real `vllm serve` for tests with the marker `vllm`: SmolLM2 on the CPU, in the environment of `make vllm-env`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard_convert import convert
from modelyard_vllm import env as vllm_env
from modelyard_vllm import serve as vllm_serve
from modelyard_vllm.serve.engine import VllmServeEngine

# In the style of Hermes; the template of SmolLM2 has no tools.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call functions: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fields(**chosen: Any) -> dict[str, Any]:
    """Fields of a model: float32, because bfloat16 crashes on some CPUs; a small cache."""
    if not vllm_env.is_ready():
        pytest.skip("there is no vLLM for the CPU: make vllm-env builds it")
    base = {
        "vllm_model": convert("smollm2", "hf").path,
        "vllm_dtype": "float32",
        "vllm_enforce_eager": True,
        "vllm_kv_cache_memory_bytes": 1 << 29,
        "vllm_serve_binary": str(vllm_env.program()),
    }
    return base | chosen


def engine(caches: Mapping[str, CacheInfo] | None = None, **chosen: Any) -> VllmServeEngine:
    spec = EngineSpec("smollm2", vllm_serve.Options(**fields(**chosen)), caches or {"main": CacheInfo(2048, 8)})
    made = vllm_serve.create(spec)
    assert isinstance(made, VllmServeEngine)
    return made


@asynccontextmanager
async def running_engine(
    caches: Mapping[str, CacheInfo] | None = None, **chosen: Any
) -> AsyncIterator[VllmServeEngine]:
    made = engine(caches, **chosen)
    try:
        await made.open(lambda *_: None)
        yield made
    finally:
        await made.close()
