"""The knobs of every engine that has some: they are its own fields, and what it holds now is known for each."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from modelyard import plugins
from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.knobs import Setting
from modelyard.router.settings import CacheSettings, ModelSettings
from tests.engines.ct2.helpers import model_folder
from tests.engines.llama_cpp.helpers import model_file

GPU = AvailableMemory(8 << 30, {"GPU-1": 8 << 30})
CPU = AvailableMemory(8 << 30)
CACHES = {"main": CacheInfo(4096, 4)}


def options(backend: str) -> Any:
    kind = plugins.load("engines", backend).Options
    path = {"llama_cpp": model_file, "llama_server": model_file, "ct2": model_folder}.get(backend)
    told: dict[str, Any] = {"path": str(path())} if path is not None else {}
    if backend in ("vllm", "vllm_serve", "exllamav3"):
        told = {"path": "/nowhere"}
    return kind(**told)


def with_knobs() -> list[str]:
    names = plugins.names("engines")
    return [name for name in names if importlib.util.find_spec(f"modelyard.engines.{name}.knobs") is not None]


ENGINES = with_knobs()


def test_the_engines_that_compute_here_have_knobs():
    assert {"ct2", "exllamav3", "fake", "llama_cpp", "llama_server", "vllm", "vllm_serve"} <= set(ENGINES)


@pytest.mark.parametrize("goal", ["chat", "agent", "batch", "memory"])
@pytest.mark.parametrize("here", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("backend", ENGINES)
def test_every_knob_is_a_field_with_a_current_value_and_values_that_are_allowed(backend, here, goal):
    module = importlib.import_module(f"modelyard.engines.{backend}.knobs")
    spec = EngineSpec("m", options(backend), CACHES)
    held = module.current(spec, "main")
    fields = type(spec.options).model_fields
    for knob in module.knobs(spec, here, goal):
        own = CacheSettings.model_fields if knob.place == "cache" else {**fields, **ModelSettings.model_fields}
        assert knob.name in own, knob.name
        assert knob.name in held
        assert len(set(knob.values)) == len(knob.values) > 0
        if knob.name in fields:
            for value in knob.values:
                spec.options.__class__.model_validate({**spec.options.model_dump(), knob.name: value})


@pytest.mark.parametrize("backend", ENGINES)
def test_what_holds_by_itself_is_allowed(backend):
    module = importlib.import_module(f"modelyard.engines.{backend}.knobs")
    assert module.forbids(Setting.of(module.current(EngineSpec("m", options(backend), CACHES), "main"))) is None


@pytest.mark.parametrize(
    ("backend", "values"),
    [
        ("llama_cpp", {"flash_attn": "off", "type_k": "f16", "type_v": "q8_0"}),
        ("llama_cpp", {"flash_attn": "on", "type_k": "q4_0", "type_v": "q8_0"}),
        ("llama_server", {"llama_server_flash_attn": "off", "type_v": "q4_0"}),
        ("llama_server", {"n_batch": 512, "n_ubatch": 1024}),
        ("ct2", {"inter_threads": 4096, "intra_threads": 2}),
        ("vllm", {"vllm_max_num_seqs": 256, "vllm_max_num_batched_tokens": 128}),
    ],
)
def test_what_cannot_run_together_is_forbidden_in_words(backend, values):
    module = importlib.import_module(f"modelyard.engines.{backend}.knobs")
    assert module.forbids(Setting.of(values))
