"""A LiteLLM proxy to measure beside ours: its own virtual environment, as its makers advise for production, one worker.

It answers from its own `mock_response` (no upstream at all) or passes requests on to `bench/bare.py`, whose CPU time is
not counted. A mocked stream cannot be paced, so the many concurrent streams always come from the upstream.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.bare import WORDS
from bench.cache import pip, venv
from bench.servers import Server, free_port, running
from modelyard.library.cache_dir import cache_dir

VERSION = "1.102.4"
_CHUNK = 3  # a mocked stream says three characters an event
_MOCK = "".join(WORDS)[: _CHUNK * len(WORDS)]
_ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the table it brings, not one from the network
    "NO_DOCS": "True",
}


def install() -> Path:
    """The environment's folder; installing shows pip's own progress, and happens once a version."""
    folder = cache_dir() / "bench-litellm"
    stamp = folder / f"litellm-{VERSION}"
    if not stamp.exists():
        pip(["install", f"litellm[proxy]=={VERSION}"], venv(folder), f"LiteLLM {VERSION}")
        stamp.touch()
    return folder


@contextmanager
def litellm(folder: Path, upstream: Server | None) -> Iterator[Server]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as place:
        config = Path(place) / "litellm.yaml"
        config.write_text(json.dumps(configuration(upstream)))  # JSON is YAML
        command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
        with running(command, port, "/health/liveliness", _ENVIRONMENT, within_s=180) as server:
            yield server


def configuration(upstream: Server | None) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "openai/bench", "api_key": "bench"}
    asked |= {"mock_response": _MOCK} if upstream is None else {"api_base": f"http://127.0.0.1:{upstream.port}/v1"}
    return {
        "model_list": [{"model_name": "bench", "litellm_params": asked}],
        "litellm_settings": {"set_verbose": False, "num_retries": 0, "request_timeout": 120},
        "general_settings": {"disable_spend_logs": True},
    }
