"""What is resumed at a start cannot stop the start: after two deaths it is set aside and reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import tomlkit

from modelyard.gateway import batches
from tests.cli_process import DEADLINE, ServerProcess, environment, run, serve
from tests.e2e.helpers import SCRIPT, wait_until
from tests.live_server import demo_config

ADMIN = {"authorization": "Bearer sk-boss"}


def settings(tmp_path: Path, **more: Any) -> str:
    keys = [{"name": "boss", "key": "sk-boss", "admin": True}, {"name": "ada", "key": "sk-ada"}]
    store = {"objects": str(tmp_path / "objects.sqlite")}
    return tomlkit.dumps(demo_config(SCRIPT) | {"keys": keys, "store": store} | more)


def data_of(tmp_path: Path) -> dict[str, str]:
    return {"XDG_DATA_HOME": str(tmp_path / "data")}


def test_a_model_with_which_the_server_died_twice_is_left_to_a_request(tmp_path: Path) -> None:
    config, file = settings(tmp_path), tmp_path / "modelyard.toml"
    file.write_text(config)
    die = (
        "import os; from pathlib import Path; from modelyard.config.load import load_config; "
        f"model = load_config(Path({str(file)!r})).config.models['demo']; "
        "from modelyard.library.attempts import Attempts; "
        "Attempts().begin('model demo', model.model_dump_json()); os._exit(9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", die], env=environment(**data_of(tmp_path)), timeout=DEADLINE, check=False)
    with serve(tmp_path, config=config, **data_of(tmp_path)) as server:
        found = httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()
        assert found["data"] == ["model demo"]
        status = run("status", "--url", server.url, "--key", "sk-boss", cwd=tmp_path, **data_of(tmp_path))
        assert "model demo: the server died twice with it" in status.stdout
        assert httpx.post(server.url + "/v1/admin/models/demo/load", headers=ADMIN, timeout=60).status_code == 200
        wait_until(
            lambda: httpx.get(server.url + "/v1/admin/set-aside", headers=ADMIN).json()["data"] == [],
            "a model that was loaded is tried again at the next start",
        )


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
    id = ""
    for _ in range(3):
        with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
            id = id or start_batch(server, "endless stream")
            wait_until(lambda: running(server) == 1, "it runs")
            assert server.stop() == 0
    with serve(tmp_path, config=settings(tmp_path), **data_of(tmp_path)) as server:
        wait_until(lambda: running(server) == 1, "it runs again")
        assert batch(server, id)["status"] == "in_progress"
