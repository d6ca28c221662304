"""The model that is optimized: its knobs on this machine, its baselines, and settings as configurations."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Knob
from modelyard.engines.llama_cpp import library
from modelyard.library import cores
from modelyard_optimize.tuned_model import (
    TunedModel,
    config_changes,
    knob_paths,
    single_model_config,
    with_changes,
    without_knobs,
)
from tests.engines.llama_cpp.helpers import model_file

THREADS = Knob(name="n_threads", values=(1, 2), stage=1)
FLASH = Knob(name="flash_attn", values=("on", "off"), stage=1)
PARALLEL = Knob(name="parallel", values=(1, 2), stage=1, place="cache")
BATCH = Knob(name="n_batch", values=(1, 2), stage=1, place="cache")
KNOBS = {knob.name: knob for knob in (THREADS, FLASH, PARALLEL)}


def config(model: dict[str, Any] | None = None, **caches: dict[str, Any]) -> Config:
    chosen = {"backend": "llama_cpp", "path": "/nowhere/x.gguf", **(model or {})}
    tables = {name: {"model": "m", "n_ctx": 512, **own} for name, own in caches.items()}
    return load_config(env={}, overrides={"models": {"m": chosen}, "caches": tables}).config


def test_a_knob_is_set_in_the_models_section():
    assert knob_paths(config(main={}), "m", THREADS) == [("models", "m", "n_threads")]
    assert knob_paths(config(), "m", THREADS) == [("models", "m", "n_threads")]


def test_a_cache_that_sets_it_itself_is_changed_too():
    both = config(main={"n_threads": 1}, fast={})
    assert knob_paths(both, "m", THREADS) == [("models", "m", "n_threads"), ("caches", "main", "n_threads")]


def test_the_model_is_not_changed_if_all_caches_set_the_knob():
    assert knob_paths(config(main={"n_threads": 1}), "m", THREADS) == [("caches", "main", "n_threads")]


def test_a_cache_knob_is_set_in_the_first_cache_or_in_the_model():
    assert knob_paths(config(main={}, fast={}), "m", PARALLEL) == [("caches", "main", "parallel")]
    assert knob_paths(config(), "m", PARALLEL) == [("models", "m", "parallel")]
    assert knob_paths(config(), "m", BATCH) == []


def test_a_changed_configuration_makes_another_engine():
    old = config(main={"flash_attn": True}, fast={})
    new = with_changes(old, config_changes(old, "m", KNOBS, {"n_threads": 2, "flash_attn": "off", "parallel": 3}))
    spec = engine_spec(new.router().catalog.models["m"])
    assert spec.options.n_threads == 2
    assert spec.options.flash_attn == "off"
    assert spec.caches["main"].flash_attn is False
    assert (spec.caches["main"].parallel, spec.caches["fast"].parallel) == (3, 1)
    assert old.models["m"].options == {}


def test_an_option_under_an_alias_is_replaced():
    old = config({"gguf_flash_attn": "off"})
    new = with_changes(old, config_changes(old, "m", KNOBS, {"flash_attn": "on"}))
    assert engine_spec(new.router().catalog.models["m"]).options.flash_attn == "on"


@pytest.mark.parametrize("model", [{"n_threads": 1, "gguf_flash_attn": "off"}, {"options": {"n_threads": 1}}, {}])
def test_a_configuration_without_knobs_has_engine_defaults(model):
    plain = without_knobs(config(model, main={"n_threads": 1, "parallel": 4, "flash_attn": False}), "m", KNOBS)
    spec = engine_spec(plain.router().catalog.models["m"])
    assert spec.options.n_threads is None
    assert spec.options.flash_attn is None
    assert spec.caches["main"].n_threads is None
    assert spec.caches["main"].parallel == 4  # the user's choice, not a setting of speed


def test_the_configuration_of_a_trial_has_one_model_and_no_keys():
    whole = load_config(
        env={},
        overrides={
            "models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}, "other": {"backend": "fake"}},
            "keys": [{"name": "me", "key": "secret"}],
        },
    ).config
    found = single_model_config(whole, "m")
    assert found["models"].keys() == {"m"}
    assert "secret" not in str(found)
    assert Config.model_validate(found).models["m"].path == "/x.gguf"


HERE = AvailableMemory(8 << 30)


def llama(goal: str = "chat", caches: dict[str, Any] | None = None, **model: Any) -> TunedModel:
    chosen = {"backend": "llama_cpp", "path": str(model_file()), **model}
    config = load_config(env={}, overrides={"models": {"m": chosen}, "caches": caches or {}}).config
    return TunedModel(config, "m", goal, HERE)  # type: ignore[arg-type]


def test_the_current_setting_and_the_default_are_read_from_the_engine():
    model = llama(n_threads=1, n_ubatch=32, flash_attn="off")
    assert model.current.values["n_threads"] == 1
    assert model.current.values["n_ubatch"] == 32
    assert model.current.values["flash_attn"] == "off"
    assert model.default.values["n_threads"] == cores.physical()
    assert model.default.values["n_ubatch"] == 512
    assert model.default.values["flash_attn"] == "on"


def test_the_current_value_is_always_tried():
    assert 32 in llama(n_ubatch=32).knobs["n_ubatch"].values
    assert list(llama(n_ubatch=32).knobs["n_ubatch"].values) == sorted(llama(n_ubatch=32).knobs["n_ubatch"].values)


def test_only_changes_from_the_current_setting_are_written():
    model = llama(n_threads=1)
    assert model.changes(model.current) == {}
    assert model.changes(model.current.but({"n_ubatch": 256})) == {("models", "m", "n_ubatch"): 256}


def test_a_derived_value_is_written_only_if_it_would_be_wrong():
    model = llama(n_threads=1)
    together = model.current.but({"n_threads": 2, "n_threads_batch": 2})
    assert model.changes(together) == {("models", "m", "n_threads"): 2}
    apart = model.current.but({"n_threads": 2})
    assert apart["n_threads_batch"] == 1
    assert model.changes(apart) == {("models", "m", "n_threads"): 2, ("models", "m", "n_threads_batch"): 1}


def test_a_setting_becomes_the_configuration_of_a_trial():
    model = llama(n_threads=1, caches={"main": {"model": "m", "n_ctx": 512, "flash_attn": False}})
    found = Config.model_validate(model.trial_config(model.current.but({"flash_attn": "on", "type_v": "q8_0"})))
    spec = engine_spec(found.router().catalog.models["m"])
    assert spec.caches["main"].flash_attn is True
    assert spec.caches["main"].type_v == "q8_0"


def test_the_quality_reference_has_exact_numbers():
    model = llama(type_k="q4_0", type_v="q4_0")
    found = Config.model_validate(model.exact_config())
    info = found.router().catalog.models["m"].caches["m"].info
    assert (info.type_k, info.type_v) == ("f16", "f16")


def test_parallel_is_a_knob_for_batch_only():
    assert "parallel" not in llama().knobs
    assert "parallel" in llama("batch").knobs


def test_for_memory_the_knobs_that_use_memory_come_first():
    def stage(goal: str, name: str) -> int:
        return llama(goal).knobs[name].stage

    assert stage("memory", "flash_attn") < stage("memory", "type_v") < stage("memory", "n_threads")
    assert stage("chat", "n_threads") < stage("chat", "flash_attn") < stage("chat", "type_v")


def test_parallel_is_only_raised():
    assert llama("batch", parallel=4).knobs["parallel"].values == (4, 8, 16)
    assert llama("batch", parallel=3).knobs["parallel"].values == (3, 4, 8, 16)


def test_rounded_values_need_flash_attention():
    model = llama()
    assert not model.space.allows(model.current.but({"flash_attn": "off", "type_v": "q8_0"}))
    assert not model.space.allows(model.current.but({"type_k": "q4_0", "type_v": "f16"}))


def test_gpu_layers_are_a_knob_if_there_are_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "visible_memory", lambda memory: memory)
    config = load_config(
        env={}, overrides={"models": {"m": {"backend": "llama_cpp", "path": str(model_file())}}}
    ).config
    model = TunedModel(config, "m", "chat", AvailableMemory(8 << 30, {"GPU-1": 8 << 30}))
    assert model.knobs["n_gpu_layers"].values == ("auto", 22, 15, 7, 0)


def test_an_engine_without_knobs_is_refused():
    remote = {"backend": "openai_remote", "remote_base_url": "https://example.com/v1", "remote_model": "x"}
    config = load_config(env={}, overrides={"models": {"m": remote}}).config
    with pytest.raises(InvalidRequest, match="no settings that could be optimized"):
        TunedModel(config, "m", "chat", HERE)


def test_a_knob_without_a_place_in_the_file_is_left_out_and_named():
    chosen = {"backend": "llama_server", "path": str(model_file())}
    config = load_config(env={}, overrides={"models": {"m": chosen}}).config
    model = TunedModel(config, "m", "chat", HERE)
    assert "n_batch" not in model.knobs
    assert any(found.startswith("n_batch") for found in model.left_out)


@pytest.mark.parametrize("backend", ["vllm", "vllm_serve"])
def test_the_kv_cache_dtype_of_vllm_is_checked_against_the_models_own(backend):
    model = {"backend": backend, "path": "/nowhere", "n_ctx": 512, "vllm_kv_cache_dtype": "fp8"}
    model = TunedModel(load_config(env={}, overrides={"models": {"m": model}}).config, "m", "chat", HERE)
    assert model.knobs["vllm_kv_cache_dtype"].values == ("auto", "fp8")
    assert not model.left_out
    assert model.exact_config()["models"]["m"]["options"]["vllm_kv_cache_dtype"] == "auto"
