"""One answer to whether a model can run here: `check` passes exactly if the server becomes ready, and the lists, the
doctor and the load agree with it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from modelyard.cli import app as cli
from modelyard.config.library_models import read_library_models
from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.config.settings import engine_spec
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.model_files import LibraryEntry, put_entry
from modelyard.server.app import compose
from modelyard.server.can_run import require_runnable, unrunnable_models
from modelyard.server.doctor import engine_lines, server_lines
from modelyard.server.serve import prepare
from modelyard_vllm import env as vllm_env
from tests import cli_process
from tests.e2e.helpers import wait_until
from tests.engines.ct2.helpers import tiny_folder
from tests.engines.llama_cpp import tiny_models
from tests.engines.vllm.helpers import FAKE_LIBRARY
from tests.http.app_client import URL, app_client

HUB = "nobody/no-such-model"
FAKE: dict[str, Any] = {"backend": "fake"}


@pytest.fixture(autouse=True)
def _without_a_hub_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have used the library that stands in for vLLM."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(FAKE_LIBRARY)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def check(config: dict[str, Any], *options: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps({"library": False, **config}))
        return CliRunner().invoke(cli.app, ["check", str(file), *options])


async def becomes_ready(config: dict[str, Any]) -> bool:
    """What `modelyard serve` does until no model loads any more, without a socket."""
    try:
        loaded = load_config(env={}, overrides={"library": False, **config})
        prepare(loaded.config)
        built = compose(loaded.config, {})
    except (ConfigError, ModelyardError):
        return False
    try:
        for name, model in loaded.config.models.items():
            if model.enabled:
                built.scheduler.preload(name)
        async with asyncio.timeout(60):
            while any(one.state == "loading" for one in built.scheduler.status().values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(built.app), base_url=URL) as client:
            return (await client.get("/health/ready")).status_code == 200
    finally:
        await built.stop()
        await built.gateway.close()


# --- the property -----------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "fake": lambda: FAKE,
    "fake, as a process": lambda: FAKE | {"kind": "chat"},
    "fake, its tokenizer is missing": lambda: FAKE | {"tokenizer_path": "/no/such/tokenizer.json"},
    "fake, an unknown template": lambda: FAKE | {"chat_template": "no-such-file.jinja"},
    "fake, too large": lambda: FAKE | {"n_ctx": 1 << 24, "parallel": 1 << 12},
    "fake, an unknown option": lambda: FAKE | {"no_such_option": 1},
    "unknown engine": lambda: {"backend": "no_such_engine"},
    "llama_cpp": lambda: {"path": str(tiny_models.coder()), "n_ctx": 64},
    "llama_cpp, too large": lambda: {"path": str(tiny_models.coder()), "n_ctx": 1 << 24, "parallel": 1 << 10},
    "llama_cpp, its file is missing": lambda: {"path": "/no/such/file.gguf"},
    "llama_cpp, its draft is missing": lambda: {"path": str(tiny_models.coder()), "draft_model_path": "/no/such.gguf"},
    "llama_server, no program": lambda: {
        "backend": "llama_server",
        "path": str(tiny_models.coder()),
        "llama_server_binary": "/no/such/llama-server",
    },
    "ct2": lambda: {"backend": "ct2", "path": str(tiny_folder()), "device": "cpu", "n_ctx": 64},
    "ct2 on a GPU": lambda: {"backend": "ct2", "path": str(tiny_folder()), "device": "cuda", "n_ctx": 64},
    "ct2, its folder is missing": lambda: {"backend": "ct2", "path": "/no/such/folder"},
    "vllm, of the hub": lambda: {"backend": "vllm", "vllm_model": HUB},
    "vllm, its folder is missing": lambda: {"backend": "vllm", "path": "/no/such/folder"},
    "vllm_serve, no program": lambda: {
        "backend": "vllm_serve",
        "vllm_model": HUB,
        "vllm_serve_binary": "/no/such/vllm",
    },
    "exllamav3": lambda: {"backend": "exllamav3", "path": "/no/such/folder"},
    "openai_remote": lambda: {"backend": "openai_remote", "remote_base_url": "http://a/v1", "remote_model": "x"},
}
# A hub that does not answer is found out by a download only: such a model is not loaded at the start here.
ROLES: dict[str, dict[str, Any]] = {
    "at start": {"enabled": True},
    "on demand": {"enabled": False, "autoload": True},
    "by hand": {"enabled": False},
}
CONFIGS = st.fixed_dictionaries(
    {
        "models": st.lists(
            st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(ROLES))), min_size=1, max_size=3
        ),
        "limit": st.sampled_from([None, None, 1000]),
    }
)


def made(models: list[tuple[str, str]], limit: int | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "models": {f"m{at}": MODELS[kind]() | ROLES[role] for at, (kind, role) in enumerate(models)}
    }
    return config | ({"scheduler": {"memory_limit": limit}} if limit is not None else {})


@given(CONFIGS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30, derandomize=True)
@example({"models": [("vllm, of the hub", "at start")], "limit": None})
def test_check_passes_exactly_if_the_server_becomes_ready(drawn: dict[str, Any]) -> None:
    config = made(**drawn)
    shown = check(config)
    assert (shown.exit_code == 0) is asyncio.run(becomes_ready(config)), (drawn, shown.output)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_each_kind_of_model_alone(kind: str) -> None:
    config = made([(kind, "at start")])
    shown = check(config)
    assert (shown.exit_code == 0) is asyncio.run(becomes_ready(config)), shown.output


def test_a_model_of_the_hub_is_fetched_by_a_start_and_not_by_a_request() -> None:
    model = {"backend": "llama_cpp", "path": f"{HUB}-GGUF"}
    later, now = ({"models": {"m": model | ROLES[role]}} for role in ("on demand", "at start"))
    assert "modelyard serve fetches it from the hub" in check(now).output
    assert check(now).exit_code == 0
    assert check(later).exit_code == 1
    assert not asyncio.run(becomes_ready(later))


# --- real processes ---------------------------------------------------------------------------------------------------


def _has_loaded(url: str) -> bool:
    try:
        health = httpx.get(f"{url}/health", timeout=cli_process.DEADLINE).json()
    except httpx.TransportError:
        return False  # with several gateways the port is open before one listens
    states = [model["state"] for model in health["models"].values()]
    return health["scheduler_connected"] and bool(states) and "loading" not in states


def _status(url: str) -> int:
    return httpx.get(f"{url}/health/ready", timeout=cli_process.DEADLINE).status_code


@pytest.mark.parametrize(
    ("kind", "role", "options"),
    [
        ("llama_cpp", "at start", ()),
        ("ct2 on a GPU", "at start", ()),
        ("llama_cpp, its draft is missing", "on demand", ("--workers", "2")),
    ],
)
def test_a_server_process_is_ready_exactly_if_check_passed(
    kind: str, role: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "modelyard.json").write_text(json.dumps(made([(kind, role)])))
    checked = cli_process.run("check", "--config", "modelyard.json", cwd=tmp_path)
    assert (checked.returncode == 0) is (kind == "llama_cpp")
    with cli_process.serve(tmp_path, "--config", "modelyard.json", *options) as server:
        wait_until(lambda: _has_loaded(server.url), "nothing loads any more", cli_process.DEADLINE)
        assert _status(server.url) == (200 if checked.returncode == 0 else 503)


def test_a_gateway_without_weights_passes_check_and_is_ready_with_those_of_its_scheduler(tmp_path: Path) -> None:
    model, endpoint = json.dumps(str(tiny_models.coder())), f"ipc://{tmp_path}/scheduler"
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, path in ((here, '"/no/such/file.gguf"'), (there, model)):
        folder.mkdir()
        text = f'[models.m]\nbackend = "llama_cpp"\npath = {path}\nn_ctx = 64\n[scheduler]\nendpoint = "{endpoint}"\n'
        (folder / "modelyard.toml").write_text(text)
    checked = cli_process.run("check", cwd=here)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    command = [*cli_process.MODELYARD, "scheduler", "--listen", endpoint]
    scheduler = subprocess.Popen(command, cwd=there, env=cli_process.environment(), stderr=subprocess.DEVNULL)
    try:
        with cli_process.serve(here) as server:
            wait_until(lambda: _status(server.url) == 200, "the gateway is ready", cli_process.DEADLINE)
            body = {"model": "m", "prompt": "a", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    finally:
        scheduler.terminate()
        scheduler.wait(cli_process.DEADLINE)


# --- the other surfaces -----------------------------------------------------------------------------------------------


async def test_a_server_is_not_ready_while_a_configured_model_loads_whatever_else_could_be_loaded() -> None:
    loading, extra = FAKE | {"script": []}, FAKE | {"enabled": False, "autoload": True}
    async with app_client({"models": {"m": loading, "other": extra}, "routes": []}) as client:
        assert (await client.get("/health/ready")).status_code == 503  # m is not loaded yet
        assert (await client.post("/v1/admin/models/m/load")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.post("/v1/admin/models/m/unload")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200  # the other one answers


async def test_what_can_never_fit_is_not_listed_and_a_request_says_why() -> None:
    config = made([("fake", "on demand"), ("fake, too large", "on demand")])
    async with app_client(config) as client:
        for path, key, field in (("/v1/models", "data", "id"), ("/api/tags", "models", "name")):
            names = [card[field].removesuffix(":latest") for card in (await client.get(path)).json()[key]]
            assert names == ["m0"], path
        body = {"model": "m1", "messages": [{"role": "user", "content": "Hi"}]}
        refused = await client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, "needs about 512.0 GiB" in refused.text) == (503, True)


def test_the_library_does_not_serve_what_can_never_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    put_entry(LibraryEntry("large", str(tiny_models.coder())))
    assert read_library_models()[0].table is not None
    monkeypatch.setattr("modelyard.telemetry.system.total_ram", lambda: 1 << 20)
    (large,) = read_library_models()
    assert (large.table, "and this machine has" in large.reason) == (None, True)


def test_the_list_of_models_and_the_doctor_say_what_keeps_a_model_from_running(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(made([("fake", "at start"), ("ct2 on a GPU", "at start")]) | {"library": False}))
    listed = CliRunner().invoke(cli.app, ["models", "list", "--config", str(file)], env={"COLUMNS": "200"})
    assert "CTranslate2 finds no GPU" in listed.output
    lines = {line.name: line for line in server_lines(file, {})}
    assert (lines["model"].status, lines["model"].value.startswith("m1: CTranslate2 finds no GPU")) == ("error", True)
    assert lines["models"].value == "m0 can be loaded here"


def test_the_doctor_finds_the_vllm_that_vllm_serve_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\necho vllm version 1.2.3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(vllm_env, "program", lambda: program)
    found = next(line for line in engine_lines() if line.name == "vllm serve")
    assert found.value.startswith(f"{program}, vllm version 1.2.3")


def test_a_file_that_arrives_later_is_found_by_the_next_load(tmp_path: Path) -> None:
    file = tmp_path / "later.gguf"
    config = load_config(env={}, overrides={"library": False, "models": {"m": {"path": str(file), "n_ctx": 64}}}).config
    spec, limits = engine_spec(config.router().catalog.models["m"]), config.scheduler.memory_limits()
    assert unrunnable_models(config).keys() == {"m"}
    with pytest.raises(Unavailable, match="path: there is no model file"):
        require_runnable(spec, limits)
    file.symlink_to(tiny_models.coder())
    require_runnable(spec, limits)
