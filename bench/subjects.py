"""What is measured: our server with the fake engine, and what it is asked."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.load import NUMBER
from bench.servers import Server, free_port, running

TOKENS = 16
PLACES = 1200  # more than streams at a time: the queue is not what is measured

_SYSTEM = "You are a careful assistant. Answer in plain words, say what you are not sure of, and keep it short."
_USER = (
    f"My order {NUMBER} arrived this morning, but one of the two lamps does not work and the box was open on one side. "
    "I have tried another bulb and another socket without any luck. Could you tell me how to send it back, who pays "
    "for the parcel, and how long it usually takes until a new lamp arrives? Thank you very much for your help."
)


def body(model: str, *, stream: bool) -> str:
    """A short chat of ordinary size: a system message and about sixty words."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 64}
    return json.dumps(asked | ({"stream": True} if stream else {}))


@contextmanager
def modelyard(tokenizer: Path, token_delay: float) -> Iterator[Server]:
    """One gateway process as `modelyard serve` runs it, nothing switched off."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        config = Path(folder) / "modelyard.json"
        config.write_text(json.dumps(configuration(tokenizer, token_delay)))
        command = [sys.executable, "-m", "modelyard", "serve", "--config", str(config), "--port", str(port)]
        with running(command, port, "/health/ready") as server:
            yield server


def configuration(tokenizer: Path, token_delay: float) -> dict[str, Any]:
    model = {
        "backend": "fake",
        "tokenizer_path": str(tokenizer),
        "token_delay": token_delay,
        "script": [{"steps": [{"tokens": TOKENS}]}],
    }
    return {
        "models": {"bench": model},
        "caches": {"main": {"model": "bench", "n_ctx": 4096, "parallel": PLACES}},
        "routes": [{"match": "*", "cache": "main"}],
    }
