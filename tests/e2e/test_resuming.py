"""What is resumed at a start cannot stop the start: after two deaths it is set aside and reported."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import tomlkit

from modelyard.gateway import batches
from tests.cli_process import ROOT, ServerProcess, run, serve
from tests.e2e.helpers import SCRIPT, wait_until
from tests.library.convert.tiny_models import write_model
from tests.live_server import demo_config

ADMIN = {"authorization": "Bearer sk-boss"}


def settings(tmp_path: Path, **more: Any) -> str:
    keys = [{"name": "boss", "key": "sk-boss", "admin": True}, {"name": "ada", "key": "sk-ada"}]
    store = {"objects": str(tmp_path / "objects.sqlite")}
    return tomlkit.dumps(demo_config(SCRIPT) | {"keys": keys, "store": store} | more)


def data_of(tmp_path: Path) -> dict[str, str]:
    return {"XDG_DATA_HOME": str(tmp_path / "data")}


# A plug-in that ends its process while its model is loaded, as a fault of a native library does.
DYING = """
import os
from msgspec.structs import replace
import modelyard_fake as fake

def create(spec):
    if os.path.exists(os.environ["DEADLY"]):
        os.abort()
    return fake.create(spec)

ENGINE = replace(fake.ENGINE, create=create)
"""
PLUG_IN = "import sys, os, modelyard.engines; modelyard.engines.__path__.append(os.path.dirname(__file__) + '/engines')"


def test_a_model_that_kills_the_server_at_two_starts_is_left_out_of_the_third(tmp_path: Path) -> None:
    path, deadly = tmp_path / "path", tmp_path / "deadly"
    (path / "engines").mkdir(parents=True)
    deadly.touch()
    (path / "sitecustomize.py").write_text(PLUG_IN)
    (path / "engines" / "dying.py").write_text(DYING)
    env = data_of(tmp_path) | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "DEADLY": str(deadly)}
    both = demo_config(SCRIPT)
    both["models"]["dying"] = {**both["models"]["demo"], "backend": "dying", "placement": "inline"}
    config = tomlkit.dumps(both | {"keys": [{"name": "boss", "key": "sk-boss", "admin": True}]})
    (tmp_path / "modelyard.toml").write_text(config)
    for _ in range(2):
        died = run("serve", "--port", "0", cwd=tmp_path, **env)
        assert died.returncode == -signal.SIGABRT, died.stderr[-2000:]
    with serve(tmp_path, config=config, **env) as server:
        wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 200, "the server is ready")
        found = httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()
        assert found["data"] == ["model dying"]
        shown = run("status", "--url", server.url, "--key", "sk-boss", cwd=tmp_path, **env).stdout
        assert "model dying: the server died twice with it" in shown
        assert "modelyard run NAME" in shown
        chat = {"model": "demo", "messages": [{"role": "user", "content": "text"}]}
        assert httpx.post(server.url + "/v1/chat/completions", json=chat, headers=ADMIN).status_code == 200
        deadly.unlink()
        again = run("run", "dying", "text", "--url", server.url, "--key", "sk-boss", cwd=tmp_path, **env)
        assert again.returncode == 0, again.stderr
        wait_until(
            lambda: httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()["data"] == [],
            "a model that was loaded is tried again at the next start",
        )


# Ends the process of the server while it reads saved KV, as a fault of llama.cpp does.
DEADLY_KV = """
import os, sys
if "serve" in sys.orig_argv:
    from modelyard.engines.llama_cpp.kv_store import KvStore
    restore = KvStore._restore
    def restore_or_die(self, *args):
        if os.path.exists(os.environ["DEADLY"]):
            os.abort()
        restore(self, *args)
    KvStore._restore = restore_or_die
"""


def test_saved_kv_that_kills_the_server_at_two_starts_is_left_out_of_the_third(tmp_path: Path) -> None:
    path, deadly = tmp_path / "path", tmp_path / "deadly"
    path.mkdir()
    (path / "sitecustomize.py").write_text(DEADLY_KV)
    env = data_of(tmp_path) | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "DEADLY": str(deadly)}
    model = {"backend": "llama_cpp", "path": str(write_model(tmp_path / "tiny.gguf")), "placement": "inline"}
    model |= {"n_gpu_layers": 0, "n_ctx": 256, "kv_store": str(tmp_path / "kv")}
    config = tomlkit.dumps({"models": {"tiny": model}, "keys": [{"name": "boss", "key": "sk-boss", "admin": True}]})
    body = {"model": "tiny", "prompt": "Hello there, this is a text of some length", "max_tokens": 3}

    def answers(server: ServerProcess) -> bool:
        reply = httpx.post(server.url + "/v1/completions", json=body, headers=ADMIN, timeout=60)
        return reply.status_code == 200

    with serve(tmp_path, config=config, **env) as server:
        assert answers(server)
        assert server.stop() == 0
    deadly.touch()
    for _ in range(2):
        died = run("serve", "--port", "0", cwd=tmp_path, **env)
        assert died.returncode == -signal.SIGABRT, died.stderr[-2000:]
    with serve(tmp_path, config=config, **env) as server:
        wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 200, "the server is ready")
        (aside,) = httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()["data"]
        assert aside.startswith(f"kv {tmp_path}")
        assert answers(server)


def test_conversations_continue_after_a_swap_and_after_a_restart(tmp_path: Path) -> None:
    """By default, without a setting for it. Another key reuses nothing."""
    env = data_of(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MODELYARD_KV_STORE": "auto"}
    model = {"backend": "llama_cpp", "path": str(write_model(tmp_path / "tiny.gguf")), "n_ctx": 4096, "n_gpu_layers": 0}
    keys = [{"name": "boss", "key": "sk-boss", "admin": True}, {"name": "ada", "key": "sk-ada"}]
    config = tomlkit.dumps({"models": {"tiny": model | {"placement": "inline"}}, "keys": keys})
    text = " ".join(f"word {n} of a long text" for n in range(100))

    def cached(server: ServerProcess, key: str = "sk-boss") -> int:
        body = {"model": "tiny", "prompt": text, "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        usage = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).json()["usage"]
        assert usage["prompt_tokens"] >= 256, "the text is too short to be saved"
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])

    with serve(tmp_path, config=config, **env) as server:
        assert cached(server) > 1
        for order in ("unload", "load"):
            httpx.post(f"{server.url}/v1/admin/models/tiny/{order}", headers=ADMIN, timeout=60).raise_for_status()
        assert cached(server) == 1, "only the last token is read after a swap"
        assert server.stop() == 0
    with serve(tmp_path, config=config, **env) as server:
        assert cached(server, "sk-ada") > 1
        assert cached(server) == 1, "only the last token is read after a restart"


def start_batch(server: ServerProcess, text: str) -> str:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": "demo", "messages": [{"role": "user", "content": text}]}  # type: ignore[assignment]
    data, headers = json.dumps(line).encode(), {"authorization": "Bearer sk-ada"}
    file = httpx.post(
        server.url + "/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"}, headers=headers
    ).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(httpx.post(server.url + "/v1/batches", json=body, headers=headers).json()["id"])


def batch(server: ServerProcess, id: str) -> Any:
    return httpx.get(f"{server.url}/v1/batches/{id}", headers={"authorization": "Bearer sk-ada"}).json()


def test_a_batch_with_which_the_server_died_twice_is_set_aside(tmp_path: Path) -> None:
    id = ""
    for death in range(batches.MAX_DEATHS):
        with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
            id = id or start_batch(server, "endless stream")
            wait_until(lambda: running(server) == 1, f"it runs after {death} deaths")
            assert batch(server, id)["status"] == "in_progress"
            os.kill(server.process.pid, signal.SIGKILL)
            server.wait()
    with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
        wait_until(lambda: batch(server, id)["status"] == "failed", "the batch is set aside")
        assert "died 2 times" in batch(server, id)["errors"]["data"][0]["message"]
        assert httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()["data"] == [f"batch {id}"]
        other = start_batch(server, "text")
        wait_until(lambda: batch(server, other)["status"] == "completed", "another batch runs")


def running(server: ServerProcess) -> int:
    models = httpx.get(server.url + "/health", headers=ADMIN).json()["models"]
    return int(models["demo"]["running"])


def test_a_server_that_stops_is_no_death(tmp_path: Path) -> None:
    """Nor is one that is killed as soon as it is ready: a loaded model's mark is gone by then."""
    id, marks = "", tmp_path / "data" / "modelyard" / "attempts"
    for _ in range(3):
        with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
            wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 200, "the server is ready")
            assert marks.is_dir()
            assert not [file for file in marks.iterdir() if file.read_text().startswith("model ")]
            id = id or start_batch(server, "endless stream")
            wait_until(lambda: running(server) == 1, "it runs")
            assert server.stop() == 0
    with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
        wait_until(lambda: running(server) == 1, "it runs again")
        assert batch(server, id)["status"] == "in_progress"
