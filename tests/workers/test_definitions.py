"""What a message to a worker may and may not decide."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from modelyard import plugins
from modelyard.core.engine import CacheInfo, Control, EngineSpec
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.engines import fake, llama_server
from modelyard.workers.definitions import (
    EngineDefinition,
    FixedDefinitions,
    define,
    engine_spec,
    message_options,
    read_definition,
    write_definition,
)
from modelyard.workers.messages import ControlEngine, OpenEngine
from tests.workers.harness import DEFINITIONS, connected, open_fake, running_worker

CACHES = {"main": CacheInfo(512, 2)}
SERVER = EngineDefinition("llama_server", "m", {"path": "/models/m.gguf", "llama_server_binary": "/usr/bin/server"})


def opened(definition: EngineDefinition, **options: Any) -> EngineSpec:
    return engine_spec(definition, msgspec.json.encode(options), CACHES, ("text",))


def test_files_and_programs_come_from_the_definition() -> None:
    options = opened(SERVER, llama_server_n_ctx=1024).options
    assert (options.path, options.llama_server_binary) == ("/models/m.gguf", "/usr/bin/server")
    assert options.llama_server_n_ctx == 1024


@pytest.mark.parametrize("name", ["llama_server_binary", "path", "llama_server_extra_args", "nonsense"])
def test_a_message_cannot_name_a_program_a_file_or_an_argument(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        opened(SERVER, **{name: "/tmp/evil"})
    assert caught.value.code == "option_not_allowed"


def test_the_sender_leaves_files_and_programs_out() -> None:
    options = llama_server.Options(path="/m.gguf", llama_server_binary="/x", llama_server_n_ctx=512)
    definition = define("llama_server", EngineSpec("m", options, CACHES))
    assert msgspec.json.decode(message_options(definition)) == {"llama_server_n_ctx": 512}


def _engines() -> list[str]:
    return [name for name in plugins.names("engines") if hasattr(plugins.load("engines", name), "LIVE_OVERRIDES")]


def _is_free_text(kind: Any) -> bool:
    """Whether a value may be any text, such as a path. Names of kernels match a pattern without slashes."""
    if get_origin(kind) is None or get_args(kind) == ():
        return kind is str
    patterns = [getattr(each, "pattern", None) for meta in get_args(kind)[1:] for each in getattr(meta, "metadata", ())]
    if get_args(kind)[0] is str and any(pattern and "^[A-Za-z0-9_" in pattern for pattern in patterns):
        return False
    return any(_is_free_text(part) for part in get_args(kind))


@pytest.mark.parametrize("backend", _engines())
def test_no_option_that_a_message_may_set_is_free_text(backend: str) -> None:
    module = plugins.load("engines", backend)
    local = getattr(module, "LOCAL_OPTIONS", frozenset())
    assert [name for name, kind in module.LIVE_OVERRIDES.items() if _is_free_text(kind) and name not in local] == []


async def test_a_worker_opens_only_the_models_of_its_configuration() -> None:
    async with running_worker() as worker, connected(worker) as session:
        with pytest.raises(NotFound, match="no model 'unheard'"):
            await session.open(OpenEngine("e", "unheard", b"{}", {}), lambda *_: None)
        DEFINITIONS.add("fake", EngineSpec("known", fake.Options(), CACHES))
        evil = OpenEngine("e", "known", b'{"tokenizer_path": "/etc"}', CACHES)
        with pytest.raises(InvalidRequest, match="not by a message"):
            await session.open(evil, lambda *_: None)
        assert worker.engines == ()


async def test_a_message_cannot_load_an_adapter_file() -> None:
    async with running_worker() as worker, connected(worker) as session:
        engine = await open_fake(session)
        with pytest.raises(Unsupported, match="own configuration"):
            control = Control("load_adapter", argument="x=/tmp/evil.gguf")
            await session.call(lambda id: ControlEngine(id, engine.id, control))


def test_a_definition_travels_in_a_private_file(tmp_path: Path) -> None:
    write_definition(tmp_path / "engine", SERVER)
    assert read_definition(tmp_path / "engine") == SERVER
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o600
    assert FixedDefinitions(SERVER).models() == ("m",)
