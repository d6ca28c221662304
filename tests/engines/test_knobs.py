"""The knobs of every engine that has some: each is an option or a cache setting, with a current value."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import pytest

from modelyard import plugins
from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.knobs import Setting, Value
from modelyard.router.settings import CacheSettings, ModelSettings
from tests.engines.ct2.helpers import model_folder
from tests.engines.llama_cpp.helpers import model_file

GPU = AvailableMemory(8 << 30, {"GPU-1": 8 << 30})
CPU = AvailableMemory(8 << 30)
CACHES = {"main": CacheInfo(4096, 4)}
GOALS = ("chat", "agent", "batch", "memory")


def knobs_name(backend: str) -> str:
    return f"{plugins.engine(backend).tuning}.knobs"


def knobs_module(backend: str) -> Any:
    return importlib.import_module(knobs_name(backend))


ENGINES = [e for e in plugins.names("engines") if plugins.engine(e).tuning and importlib.util.find_spec(knobs_name(e))]


@cache
def engine_spec(backend: str) -> EngineSpec:
    files = {"llama_cpp": model_file, "llama_server": model_file, "ct2": model_folder}
    fields: dict[str, Any] = {"path": str(files[backend]())} if backend in files else {}
    if backend in ("vllm", "vllm_serve", "exllamav3"):
        fields = {"path": "/nowhere"}
    return EngineSpec("m", plugins.load("engines", backend).Options(**fields), CACHES)


def test_engines_that_run_on_this_machine_have_knobs() -> None:
    assert {"ct2", "exllamav3", "fake", "llama_cpp", "llama_server", "vllm", "vllm_serve"} <= set(ENGINES)


@pytest.mark.parametrize("backend", ENGINES)
def test_every_knob_is_a_field_with_a_current_value_and_valid_values(backend: str) -> None:
    spec, module = engine_spec(backend), knobs_module(backend)
    current, fields = module.current(spec, "main"), type(spec.options).model_fields
    known = {"cache": CacheSettings.model_fields, "model": {**fields, **ModelSettings.model_fields}}
    for here in (CPU, GPU):
        for goal in GOALS:
            for knob in module.knobs(spec, here, goal):
                assert knob.name in known[knob.place], knob.name
                assert knob.name in current
                assert len(set(knob.values)) == len(knob.values) > 0
                for value in knob.values if knob.name in fields else ():
                    type(spec.options).model_validate({**spec.options.model_dump(), knob.name: value})


@pytest.mark.parametrize("backend", ENGINES)
def test_current_values_are_allowed_together(backend: str) -> None:
    module = knobs_module(backend)
    assert module.forbids(Setting.of(module.current(engine_spec(backend), "main"))) is None


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
def test_values_that_exclude_each_other_are_forbidden_with_a_reason(backend: str, values: dict[str, Value]) -> None:
    assert knobs_module(backend).forbids(Setting.of(values))
