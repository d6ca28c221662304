"""What is optimized: the knobs of a model on this machine, its baselines, and settings as configurations."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.config.engine_options import engine_spec
from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import InvalidRequest
from modelyard.engines import cores
from modelyard.engines.llama_cpp import library
from modelyard.tune.subject import Subject
from tests.engines.llama_cpp.stage import model_file

HERE = AvailableMemory(8 << 30)


def llama(goal: str = "chat", caches: dict[str, Any] | None = None, **model: Any) -> Subject:
    chosen = {"backend": "llama_cpp", "path": str(model_file()), **model}
    config = load_config(env={}, overrides={"models": {"m": chosen}, "caches": caches or {}}).config
    return Subject(config, "m", goal, HERE)  # type: ignore[arg-type]


def test_the_current_setting_and_the_engines_default_are_told_apart():
    subject = llama(n_threads=1, n_ubatch=32, flash_attn="off")
    assert subject.current.values["n_threads"] == 1
    assert subject.current.values["n_ubatch"] == 32
    assert subject.current.values["flash_attn"] == "off"
    assert subject.default.values["n_threads"] == cores.physical()
    assert subject.default.values["n_ubatch"] == 512
    assert subject.default.values["flash_attn"] == "on"


def test_the_current_value_is_always_among_those_tried():
    assert 32 in llama(n_ubatch=32).knobs["n_ubatch"].values
    assert list(llama(n_ubatch=32).knobs["n_ubatch"].values) == sorted(llama(n_ubatch=32).knobs["n_ubatch"].values)


def test_only_what_differs_from_the_current_setting_would_be_written():
    subject = llama(n_threads=1)
    assert subject.changes(subject.current) == {}
    assert subject.changes(subject.current.but({"n_ubatch": 256})) == {("models", "m", "n_ubatch"): 256}


def test_a_value_that_follows_from_another_is_written_only_where_it_would_be_wrong():
    subject = llama(n_threads=1)
    together = subject.current.but({"n_threads": 2, "n_threads_batch": 2})
    assert subject.changes(together) == {("models", "m", "n_threads"): 2}
    apart = subject.current.but({"n_threads": 2})
    assert apart["n_threads_batch"] == 1
    assert subject.changes(apart) == {("models", "m", "n_threads"): 2, ("models", "m", "n_threads_batch"): 1}


def test_a_setting_becomes_the_configuration_of_a_trial():
    subject = llama(n_threads=1, caches={"main": {"model": "m", "n_ctx": 512, "flash_attn": False}})
    told = Config.model_validate(subject.order(subject.current.but({"flash_attn": "on", "type_v": "q8_0"})))
    spec = engine_spec(told.router().catalog.models["m"], told.models["m"])
    assert spec.caches["main"].flash_attn is True
    assert spec.caches["main"].type_v == "q8_0"


def test_a_loss_is_held_against_exact_numbers_whatever_holds_now():
    subject = llama(type_k="q4_0", type_v="q4_0")
    told = Config.model_validate(subject.exact())
    info = told.router().catalog.models["m"].caches["m"].info
    assert (info.type_k, info.type_v) == ("f16", "f16")


def test_how_many_conversations_fit_is_turned_for_batches_only():
    assert "parallel" not in llama().knobs
    assert "parallel" in llama("batch").knobs


def test_what_takes_memory_is_tried_first_where_memory_is_the_goal():
    def stage(goal: str, name: str) -> int:
        return llama(goal).knobs[name].stage

    assert stage("memory", "flash_attn") < stage("memory", "type_v") < stage("memory", "n_threads")
    assert stage("chat", "n_threads") < stage("chat", "flash_attn") < stage("chat", "type_v")


def test_no_conversation_loses_its_place_for_speed():
    assert llama("batch", parallel=4).knobs["parallel"].values == (4, 8, 16)
    assert llama("batch", parallel=3).knobs["parallel"].values == (3, 4, 8, 16)


def test_rounded_values_need_flash_attention():
    subject = llama()
    assert not subject.space.allows(subject.current.but({"flash_attn": "off", "type_v": "q8_0"}))
    assert not subject.space.allows(subject.current.but({"type_k": "q4_0", "type_v": "f16"}))


def test_gpus_bring_their_layers_as_a_knob(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "uses_gpus", lambda _: True)
    config = load_config(
        env={}, overrides={"models": {"m": {"backend": "llama_cpp", "path": str(model_file())}}}
    ).config
    subject = Subject(config, "m", "chat", AvailableMemory(8 << 30, {"GPU-1": 8 << 30}))
    assert subject.knobs["n_gpu_layers"].values == (-1, 22, 15, 7, 0)


def test_an_engine_without_knobs_says_so():
    remote = {"backend": "openai_remote", "remote_base_url": "https://example.com/v1", "remote_model": "x"}
    config = load_config(env={}, overrides={"models": {"m": remote}}).config
    with pytest.raises(InvalidRequest, match="no settings that could be optimized"):
        Subject(config, "m", "chat", HERE)


def test_a_knob_with_no_place_in_the_file_is_left_out_and_named():
    chosen = {"backend": "llama_server", "path": str(model_file())}
    config = load_config(env={}, overrides={"models": {"m": chosen}}).config
    subject = Subject(config, "m", "chat", HERE)
    assert "n_batch" not in subject.knobs
    assert any(told.startswith("n_batch") for told in subject.left_out)


@pytest.mark.parametrize("backend", ["vllm", "vllm_serve"])
def test_vllms_number_format_of_the_cache_is_offered_and_held_against_the_models_own(backend):
    model = {"backend": backend, "path": "/nowhere", "n_ctx": 512, "vllm_kv_cache_dtype": "fp8"}
    subject = Subject(load_config(env={}, overrides={"models": {"m": model}}).config, "m", "chat", HERE)
    assert subject.knobs["vllm_kv_cache_dtype"].values == ("auto", "fp8")
    assert not subject.left_out
    assert subject.exact()["models"]["m"]["options"]["vllm_kv_cache_dtype"] == "auto"
