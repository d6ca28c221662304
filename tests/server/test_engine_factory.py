"""Engine specs made from a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.engines import llama_cpp
from modelyard.library.progress import ProgressReporter
from modelyard.router.settings import CacheSettings
from modelyard.server.engine_factory import (
    allowed_overrides,
    create_engine,
    model_spec,
    override_schemas,
    overriding,
    prepare_engines,
    with_overrides,
)
from modelyard.server.memory_estimate import estimate_engine
from modelyard.workers.process_engine import ProcessTextEngine
from modelyard_fake.engine import FakeTextEngine
from tests.live_server import demo_config
from tests.server.test_admin_service import config_with_reply, reloadable_server


def engine_spec(config: dict[str, Any] | None = None, **model: Any) -> EngineSpec:
    overrides = (config or {}) | {"models": {"m": {"backend": "fake", **model}}}
    config = load_config(env={}, overrides=overrides).config
    return model_spec(config, config.router().catalog.models["m"])


def test_a_spec_describes_how_the_model_is_run():
    blueprint = engine_spec(
        replicas=2, replica_max=3, target_inflight=4, autoload=True, idle_ttl_s=60, n_ctx=512, parallel=5
    )
    assert (blueprint.replicas, blueprint.replica_max, blueprint.target_inflight) == (2, 3, 4)
    assert (blueprint.autoload, blueprint.idle_ttl_s) == (True, 60.0)
    assert (blueprint.caches["m"].window, blueprint.caches["m"].parallel) == (512, 5)
    assert estimate_engine(blueprint, AvailableMemory(0)).total > 0


@pytest.mark.parametrize(
    ("general", "own", "ttl"), [(0, None, None), (60, None, 60.0), (60, 0, None), (60, 5, 5.0), (0, 5, 5.0)]
)
def test_the_ttl_of_a_model_overrides_the_default(general: float, own: float | None, ttl: float | None):
    more = {} if own is None else {"idle_ttl_s": own}
    assert engine_spec({"scheduler": {"idle_ttl_s": general}}, **more).idle_ttl_s == ttl


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"description": "other words", "replicas": 3, "aliases": ["x"], "autoload": True}, True),
        ({"n_ctx": 99}, False),
        ({"echo": True}, False),
        ({"placement": "process"}, False),
        ({"placement": "process", "python": sys.executable}, False),
        ({"placement": "inline"}, True),
    ],
)
def test_the_identity_changes_with_engine_settings(change: dict[str, Any], same: bool):
    assert (engine_spec(**change).identity == engine_spec().identity) is same


@pytest.mark.parametrize(
    ("placement", "kind"), [("auto", FakeTextEngine), ("inline", FakeTextEngine), ("process", ProcessTextEngine)]
)
async def test_placement_decides_the_process_of_the_engine(placement: str, kind: type):
    assert isinstance(create_engine(engine_spec(placement=placement)), kind)


async def test_an_engine_with_its_own_interpreter_has_its_own_process():
    engine = create_engine(engine_spec(python=sys.executable))
    assert isinstance(engine, ProcessTextEngine)
    assert engine._spec.python == sys.executable


async def test_a_model_with_a_fault_fails_on_creation():
    config = load_config(env={}, overrides=demo_config()).config
    blueprint = model_spec(config, config.router().catalog.models["demo"], InvalidRequest("no tokenizer"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        create_engine(blueprint)


async def test_overrides_act_like_settings_of_the_model():
    blueprint = engine_spec(n_ctx=512)
    before = load_config(env={}, overrides={"models": {"m": {"backend": "fake", "n_ctx": 512}}}).config
    changed = overriding(before, {})("m", {"n_ctx": 64, "echo": True})
    assert changed.caches["m"].window == 64
    assert create_engine(changed).options.echo  # type: ignore[union-attr]
    assert changed.identity != blueprint.identity
    assert blueprint.caches["m"].window == 512


@pytest.mark.parametrize("overrides", [{"n_ctx": -1}, {"colour": "red"}, {"embedding_size": "large"}])
def test_bad_overrides_are_refused_with_their_field(overrides: dict[str, Any]):
    override = overriding(load_config(env={}, overrides={"models": {"m": {"backend": "fake"}}}).config, {})
    with pytest.raises(InvalidRequest) as refused:
        override("m", overrides)
    assert refused.value.param == next(iter(overrides))


# What one load of a model may set for itself, and what not.

MODEL = {
    "backend": "llama_server",
    "path": "/models/m.gguf",
    "llama_server_n_ctx": 4096,
    "llama_server_host": "127.0.0.1",
}


def config(**more: Any) -> Config:
    return load_config(env={}, overrides={"models": {"m": MODEL, "plain": {"backend": "fake"}}, **more}).config


def test_a_managed_llama_server_has_five_overridable_fields() -> None:
    fields = allowed_overrides(config().models["m"])
    assert list(fields) == [
        "llama_server_n_ctx",
        "llama_server_image_max_tokens",
        "llama_server_spec_type",
        "llama_server_spec_draft_n_max",
        "llama_server_spec_draft_p_min",
    ]


def test_overridable_fields_have_types_and_ranges() -> None:
    shown = override_schemas(config(), "m")
    assert (shown["llama_server_spec_draft_n_max"]["minimum"], shown["llama_server_spec_draft_n_max"]["maximum"]) == (
        1,
        6,
    )
    assert (shown["llama_server_spec_draft_p_min"]["minimum"], shown["llama_server_spec_draft_p_min"]["maximum"]) == (
        0,
        1,
    )
    assert shown["llama_server_n_ctx"]["type"] == "integer"
    assert all(schema["description"] for schema in shown.values())


def test_a_window_that_a_cache_sets_is_not_offered() -> None:
    with_cache = config()
    with_cache.caches["c"] = CacheSettings(model="m", n_ctx=4096)
    assert "llama_server_n_ctx" not in override_schemas(with_cache, "m")


def test_an_override_changes_only_its_field() -> None:
    before = config()
    after = with_overrides(before, "m", {"llama_server_n_ctx": 8192, "llama_server_spec_draft_n_max": 3})
    assert after.models["m"].n_ctx == 8192
    assert after.models["m"].options["llama_server_spec_draft_n_max"] == 3
    assert after.models["m"].options["llama_server_host"] == "127.0.0.1"
    assert before.models["m"].n_ctx == 4096
    assert after.models["plain"] is before.models["plain"]


@pytest.mark.parametrize(
    "field",
    ["path", "model_path", "llama_server_binary", "llama_server_host", "llama_server_port", "llama_server_extra_args"],
)
def test_other_fields_are_refused_with_the_allowed_names(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_overrides(config(), "m", {field: "x"})
    assert caught.value.param == field
    assert caught.value.code == "override_not_allowed"
    assert "llama_server_n_ctx" in caught.value.message


def test_an_engine_without_overridable_fields_reports_that() -> None:
    far = {"backend": "openai_remote", "remote_base_url": "https://api.example.com/v1", "remote_model": "large"}
    remote = load_config(env={}, overrides={"models": {"far": far}}).config
    with pytest.raises(InvalidRequest, match="allows no overrides"):
        with_overrides(remote, "far", {"remote_base_url": "https://elsewhere.example"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama_server_spec_draft_n_max", 7),
        ("llama_server_spec_draft_n_max", 0),
        ("llama_server_spec_draft_p_min", 1.1),
        ("llama_server_n_ctx", "many"),
        ("llama_server_image_max_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_overrides(config(), "m", {field: value})
    assert caught.value.param == field
    assert repr(value) in caught.value.message


def test_a_window_set_by_caches_cannot_be_overridden() -> None:
    with pytest.raises(InvalidRequest, match="caches"):
        with_overrides(config(caches={"c": {"model": "m", "n_ctx": 1024}}), "m", {"llama_server_n_ctx": 8192})


@pytest.mark.parametrize(
    ("sent", "field", "value"),
    [
        ("gguf_n_ctx", "n_ctx", 2048),
        ("gguf_type_k", "type_k", "q8_0"),
        ("cache_type_v", "type_v", "q8_0"),
        ("gguf_n_gpu_layers", "n_gpu_layers", 7),
        ("gguf_flash_attn", "flash_attn", "off"),
    ],
)
def test_an_override_may_have_each_name_that_the_configuration_knows(sent: str, field: str, value: Any) -> None:
    model = {"backend": "llama_cpp", "path": "/models/m.gguf", "gguf_flash_attn": "auto", "gguf_n_gpu_layers": 1}
    before = load_config(env={}, overrides={"models": {"m": model}}).config
    after = with_overrides(before, "m", {sent: value}).models["m"]
    found = after.options[field] if field in after.options else getattr(after, field)
    assert found == value
    assert sent == field or sent not in after.options
    for bad in ({sent: []}, {sent: value, field: value}):
        with pytest.raises(InvalidRequest) as refused:
            with_overrides(before, "m", bad)
        assert refused.value.param == list(bad)[-1]


class EngineSetup:
    """Counts how often llama.cpp is set up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fault = 0, ""
        monkeypatch.setattr(llama_cpp, "ENGINE", replace(llama_cpp.ENGINE, prepare=self._prepare))

    def _prepare(self, _: ProgressReporter) -> None:
        self.count += 1
        if self.fault:
            raise Unavailable(self.fault)


@pytest.mark.parametrize(("use", "count"), [({"enabled": True}, 1), ({"autoload": True}, 1), ({}, 0)])
def test_an_engine_is_set_up_for_every_model_that_the_start_or_a_request_loads(
    use: dict[str, bool], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = EngineSetup(monkeypatch)
    model = {"backend": "llama_cpp", "path": "/models/m.gguf", "enabled": False} | use
    loaded = load_config(env={}, overrides={"models": {"m": model, "plain": {"backend": "fake"}}}).config
    prepare_engines(loaded, ProgressReporter(write_line=print))
    assert setup.count == count
    prepare_engines(loaded, ProgressReporter(write_line=print), loaded)  # a change of something else
    assert setup.count == count


def test_a_failed_set_up_ends_the_start_only_if_every_enabled_model_needs_that_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = EngineSetup(monkeypatch)
    setup.fault = "no network"
    progress = ProgressReporter(write_line=print)
    file = {"backend": "llama_cpp", "path": "/models/m.gguf"}
    by_request = load_config(env={}, overrides={"models": {"m": file | {"enabled": False, "autoload": True}}}).config
    prepare_engines(by_request, progress)
    assert "llama_cpp cannot be used: no network" in caplog.text
    enabled = load_config(env={}, overrides={"models": {"m": file | {"enabled": True}}}).config
    prepare_engines(enabled, progress, by_request.model_copy(update={"models": {}}))  # at a reload
    with pytest.raises(Unavailable, match="no network"):
        prepare_engines(enabled, progress)


async def test_a_reload_sets_up_the_engine_of_a_new_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = EngineSetup(monkeypatch)
    async with reloadable_server(tmp_path / "a.json", config_with_reply("Hi.")) as (server, client):
        more = config_with_reply("Hi.")
        more["models"]["new"] = {"backend": "llama_cpp", "path": "/models/m.gguf", "enabled": False, "autoload": True}
        server.write(more)
        assert (await client.post("/v1/admin/reload")).json()["added"] == ["new"]
        assert setup.count == 1
        assert (await client.post("/v1/admin/reload")).status_code == 200
        assert setup.count == 1
