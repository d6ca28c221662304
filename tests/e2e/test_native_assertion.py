"""A failed assertion of llama.cpp ends the process of its model only: the client reads the assertion in one sentence,
other models go on, and the model is loaded again.

Of a tested architecture no request is known that fails one, so the model's process calls the library's own
`ggml_abort` when a file appears. Of plamo2, which is not tested, three sequences in micro-batches of 64 do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli_process import serve
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.architectures import model
from tests.library.convert.tiny_models import write_model
from tests.live_server import demo_config, live_server

# Runs at the start of every Python process that finds it on its path.
ABORT_ON_SIGHT = """
import ctypes, os, re, threading, time

def watch(trigger):
    while not os.path.exists(trigger):
        time.sleep(0.01)
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\\S*libggml-base\\.so\\S*", maps.read())
    if found is None:  # another process of this server
        return
    os.unlink(trigger)
    abort = ctypes.CDLL(found[0]).ggml_abort
    abort(b"/build/ggml/src/ggml-cpu/ops.cpp", 4711, b"GGML_ASSERT(%s) failed", b"i01 >= 0 && i01 < ne01")

threading.Thread(target=watch, args=(os.environ["ABORT_TRIGGER"],), daemon=True).start()
"""


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
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(ABORT_ON_SIGHT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("ABORT_TRIGGER", str(trigger))
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
parallel = 3
n_batch = 256
n_ubatch = 64
"""
    with serve(tmp_path, config=config) as server, httpx.Client(base_url=server.url, timeout=180) as client:

        def complete(prompt: str) -> httpx.Response:
            body = {"model": "untested", "prompt": prompt, "max_tokens": 50, "ignore_eos": True}
            return client.post("/v1/completions", json=body)

        with ThreadPoolExecutor(3) as threads:
            rounds = (threads.map(complete, [f"{number} Hello " * 20 for number in range(3)]) for _ in range(20))
            failed = next(reply for replies in rounds for reply in replies if reply.status_code != 200)
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "engine_died"
        assert "was killed by SIGABRT: ggml.c" in failed.json()["error"]["message"]
        assert server.process.poll() is None
        for name in ("demo", "tested"):
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert complete("alone").status_code == 200
