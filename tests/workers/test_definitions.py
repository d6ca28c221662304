"""What a message to a worker may and may not decide."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import modelyard_fake as fake
from modelyard import plugins
from modelyard.core.engine import CacheInfo, Control, EngineSpec
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.engines import llama_server
from modelyard.workers.definitions import (
    FixedDefinitions,
    engine_spec,
    message_spec,
    read_definition,
    write_definition,
)
from modelyard.workers.messages import ControlEngine, OpenEngine
from tests.workers.harness import DEFINITIONS, connected, open_fake, running_worker

CACHES = {"main": CacheInfo(512, 2)}
SERVER = EngineSpec("m", {"path": "/models/m.gguf", "llama_server_binary": "/usr/bin/server"}, backend="llama_server")


def opened(definition: EngineSpec, **options: Any) -> EngineSpec:
    return engine_spec(definition, EngineSpec(definition.model, options, CACHES))


def test_files_and_programs_come_from_the_definition() -> None:
    options = opened(SERVER, llama_server_spec_draft_n_max=3).options
    assert (options.path, options.llama_server_binary) == ("/models/m.gguf", "/usr/bin/server")
    assert options.llama_server_spec_draft_n_max == 3


@pytest.mark.parametrize("name", ["llama_server_binary", "path", "llama_server_extra_args", "nonsense"])
def test_a_message_cannot_name_a_program_a_file_or_an_argument(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        opened(SERVER, **{name: "/tmp/evil"})
    assert caught.value.code == "option_not_allowed"


def test_the_sender_leaves_files_and_programs_out() -> None:
    options = llama_server.Options(path="/m.gguf", llama_server_binary="/x", llama_server_spec_draft_n_max=2)
    sent = message_spec(EngineSpec("m", options, CACHES, backend="llama_server"))
    assert sent.options == {"llama_server_spec_draft_n_max": 2}


def _engines() -> list[str]:
    return [name for name in plugins.names("engines") if plugins.engine(name).live_overrides]


def _accepts(kind: Any, value: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except (ValidationError, InvalidRequest):
        return False
    return True


@pytest.mark.parametrize("backend", _engines())
@pytest.mark.parametrize("value", ["/tmp/evil", "../evil", "evil/model", "--evil", "evil --arg"])
def test_no_option_that_a_message_may_set_takes_a_path_or_an_argument(backend: str, value: str) -> None:
    module = plugins.engine(backend)
    fields = {name: kind for name, kind in module.live_overrides.items() if name not in module.local_options}
    assert [name for name, kind in fields.items() if _accepts(kind, value)] == []


async def test_a_worker_opens_only_the_models_of_its_configuration() -> None:
    async with running_worker() as worker, connected(worker) as session:
        with pytest.raises(NotFound, match="no model 'unheard'"):
            await session.open(OpenEngine("e", EngineSpec("unheard", {})), lambda *_: None)
        DEFINITIONS.add("fake", EngineSpec("known", fake.Options(), CACHES))
        evil = OpenEngine("e", EngineSpec("known", {"tokenizer_path": "/etc"}, CACHES))
        with pytest.raises(InvalidRequest, match="not by a message"):
            await session.open(evil, lambda *_: None)
        assert worker.engines == ()


async def test_a_message_cannot_load_an_adapter_file() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session)
        control = Control("load_adapter", argument="x=/tmp/evil.gguf")
        with pytest.raises(Unsupported, match="own configuration"):
            await session.call(lambda id: ControlEngine(id, engine.id, control))


def test_a_definition_travels_in_a_private_file(tmp_path: Path) -> None:
    write_definition(tmp_path / "engine", SERVER)
    assert read_definition(tmp_path / "engine") == SERVER
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o600
    assert FixedDefinitions(SERVER).models() == ("m",)
