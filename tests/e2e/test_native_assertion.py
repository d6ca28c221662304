"""A failed assertion of llama.cpp ends the process of its model only: the client reads the assertion in one sentence,
other models go on, and the model is loaded again.

No request is known that fails one, so the process that runs the model calls the library's own
`ggml_abort` when a file appears.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cli_process import serve
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.architectures import model
from tests.library.convert.tiny_models import write_model
from tests.live_server import demo_config, live_server

# Runs at the start of every Python process that finds it on its path.
ABORT_ON_SIGHT = """
import ctypes, gc, os, re, sys, threading, time

def runs_the_model():
    module = sys.modules.get("modelyard.engines.llama_cpp.engine")
    engines = [one for one in gc.get_objects() if module is not None and type(one) is module.LlamaCppEngine]
    return os.environ["ABORT_MODEL"] in [one.spec.model for one in engines]

def watch(trigger):
    while not os.path.exists(trigger):
        time.sleep(0.01)
    while not runs_the_model():  # in another process of this server
        time.sleep(0.5)
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\\S*libggml-base\\.so\\S*", maps.read())
    os.unlink(trigger)
    abort = ctypes.CDLL(found[0]).ggml_abort
    abort(b"/build/ggml/src/ggml-cpu/ops.cpp", 4711, b"GGML_ASSERT(%s) failed", b"i01 >= 0 && i01 < ne01")

if "ABORT_TRIGGER" in os.environ:
    threading.Thread(target=watch, args=(os.environ["ABORT_TRIGGER"],), daemon=True).start()
"""


def _abort_on_sight(tmp_path: Path, trigger: Path, model: str) -> dict[str, str]:
    """The environment of a server whose process with this model aborts when the file `trigger` appears."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(ABORT_ON_SIGHT)
    return {"PYTHONPATH": str(tmp_path / "path"), "ABORT_TRIGGER": str(trigger), "ABORT_MODEL": model}


def _answers_until_it_dies(client: httpx.Client, body: dict[str, Any], trigger: Path) -> Iterator[str]:
    """One after another. If the process dies between two of them, none tells of it: then it dies again."""
    for _ in range(10):
        trigger.touch()
        while trigger.exists():
            yield client.post("/v1/completions", json=body).text
        yield client.post("/v1/completions", json=body).text


def test_a_failed_assertion_ends_its_model_only_and_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = tmp_path / "abort"
    for name, value in _abort_on_sight(tmp_path, trigger, "tiny").items():
        monkeypatch.setenv(name, value)
    config = demo_config()
    config["models"]["tiny"] = {
        "backend": "llama_cpp",
        "path": str(write_model(tmp_path / "tiny.gguf")),
        "placement": "process",
        "n_gpu_layers": 0,
        "n_ctx": 256,
    }
    config["routes"] = []
    with live_server(config) as server, httpx.Client(base_url=server.url, timeout=180) as client:
        wait_until(lambda: server.status("tiny").state == "ready", "the model is loaded")
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        text = next(text for text in _answers_until_it_dies(client, body, trigger) if "error" in text)
        assert "ops.cpp:4711: GGML_ASSERT(i01 >= 0 && i01 < ne01) failed" in text
        assert "/build/" not in text
        assert "Traceback" not in text
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        wait_until(lambda: server.status("tiny").state == "ready", "the model is loaded again")
        again = client.post("/v1/completions", json=body | {"stream": False, "max_tokens": 3})
        assert again.status_code == 200, again.text


def test_a_model_of_an_untested_architecture_that_fails_an_assertion_leaves_the_gateway_and_other_models_alive(
    tmp_path: Path,
) -> None:
    """With `placement = "auto"`, which is not set: the file decides."""
    config = f"""
[models.demo]
backend = "fake"
token_delay = 0
[models.tested]
backend = "llama_cpp"
path = "{model("llama")}"
n_ctx = 256
[models.untested]
backend = "llama_cpp"
path = "{model("plamo2")}"
n_ctx = 256
"""
    with serve(tmp_path, config=config) as server, httpx.Client(base_url=server.url, timeout=180) as client:

        def answers(name: str) -> bool:
            body = {"model": name, "prompt": "Hello", "max_tokens": 5}
            return client.post("/v1/completions", json=body).status_code == 200

        assert all(answers(name) for name in ("demo", "tested", "untested"))
        children = psutil.Process(server.process.pid).children(recursive=True)
        command = ["-m", "modelyard.workers.worker_process"]
        (worker,) = [child for child in children if child.cmdline()[1:3] == command]
        worker.send_signal(signal.SIGABRT)  # as ggml_abort ends it
        worker.wait(60)
        assert server.process.poll() is None
        assert all(answers(name) for name in ("demo", "tested"))
        wait_until(lambda: answers("untested"), "the model is loaded again")
