"""A real vLLM for the marked tests: SmolLM2 on the CPU, in the environment of `make vllm-env`."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import modelyard_vllm as vllm
from modelyard.core.engine import CacheInfo, Control, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import cache_dir
from modelyard.processes.parent_death import die_with_parent
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.definitions import define, message_spec, write_definition
from modelyard.workers.messages import OpenEngine
from modelyard.workers.process_engine import ProcessTextEngine, create_process_engine
from modelyard.workers.transport import HeartbeatConfig
from modelyard_convert import convert
from modelyard_vllm import env as vllm_env

PATIENT = HeartbeatConfig(worker_misses=1000)
BLOCK = 32  # the CPU build takes multiples of 32 only
_ROOT = Path(__file__).parents[3]
_START_S = 120.0


def python() -> str:
    if not vllm_env.is_ready():
        pytest.skip("no environment with vLLM for the CPU: build it with make vllm-env")
    return str(vllm_env.python())


@cache
def model_folder() -> Path:
    return Path(convert("smollm2", "hf").path)


@cache
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(model_folder())


@cache
def vision_folder() -> Path:
    """The tiny vision model, created once with vLLM's interpreter."""
    folder = cache_dir() / "models" / "tiny-vision"
    if not folder.is_dir():
        script = Path(__file__).parent / "tiny_vision.py"
        argv = [python(), str(script), str(model_folder()), str(folder)]
        subprocess.run(argv, check=True, capture_output=True, env=dict(os.environ) | {"HF_HUB_OFFLINE": "1"})
    return folder


def fields(**values: Any) -> dict[str, Any]:
    """A model's options: float32, because bfloat16 kills vLLM on some CPUs, and a small cache."""
    base = {
        "vllm_model": str(model_folder()),
        "vllm_dtype": "float32",
        "vllm_enforce_eager": True,
        "vllm_kv_cache_memory_bytes": 1 << 29,
        "vllm_engine_args": {"block_size": BLOCK},
    }
    return base | values


def spec(caches: Mapping[str, CacheInfo] | None = None, **values: Any) -> EngineSpec:
    options = vllm.Options(**fields(**values))
    return EngineSpec("smollm2", options, caches or {"main": CacheInfo(2048, 8)}, python=python(), backend="vllm")


@asynccontextmanager
async def running(caches: Mapping[str, CacheInfo] | None = None, **values: Any) -> AsyncIterator[ProcessTextEngine]:
    """In a process with vLLM's interpreter, like a user's model."""
    engine = create_process_engine(spec(caches, **values), PATIENT)
    assert isinstance(engine, ProcessTextEngine)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


@cache
def _worker() -> str:
    """The endpoint of the persistent worker; it ends with the tests."""
    folder = tempfile.mkdtemp(prefix="my-vllm-")
    endpoint, log = f"ipc://{folder}/w", Path(folder) / "log"
    (Path(folder) / "engines").mkdir()
    env = dict(os.environ) | {"PYTHONPATH": str(_ROOT)}
    with log.open("wb") as out:
        argv = die_with_parent([python(), "-m", "tests.engines.vllm.persistent_worker", endpoint, f"{folder}/engines"])
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=_ROOT)
    atexit.register(_end, process)
    return endpoint


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


class SharedVllmEngine:
    """An engine in the persistent worker."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._id = spec, uuid4().hex[:16]
        self.info = EngineInfo("vllm", dict(spec.caches))
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._session: WorkerSession | None = None
        self._engine: Any = None
        self._over = False

    async def open(self, progress: OnProgress) -> None:
        self._session = session = WorkerSession(_worker(), f"gateway-{self._id}", heartbeat=PATIENT)
        async with asyncio.timeout(_START_S):
            await session.connect()
        definition = Path(_worker().removeprefix("ipc://")).parent / "engines" / self._spec.model
        definition.unlink(missing_ok=True)
        write_definition(definition, define(self._spec))
        opened = await session.open(OpenEngine(self._id, message_spec(self._spec)), progress)
        self.info = opened.info
        self._engine = remote_engine(session, opened, self.lost)

    def generate(self, prompt: Prompt) -> Any:
        return self._engine.generate(prompt)

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    async def control(self, op: Control) -> None:
        await self._engine.control(op)

    async def close(self) -> None:
        session, over, self._over = self._session, self._over, True
        if session is not None and not over:
            await session.close_engine(self._id)
            session.end(Unavailable("the engine was closed"))
            await session.close()


# --- a LoRA adapter -------------------------------------------------------------------------------------------------


def write_adapter(folder: Path, *, seed: int = 1, strength: float = 0.1, rank: int = 4) -> Path:
    """A random adapter for SmolLM2-135M, strong enough to change every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "smollm2"}))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.normal(0, strength, (rank, 576)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(0, strength, (576, rank)).astype(np.float32)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    return folder


def safetensors(tensors: Mapping[str, Any]) -> bytes:
    head, at = {}, 0
    for name, tensor in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    header = json.dumps(head).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(tensor.tobytes() for tensor in tensors.values())
