"""How much of the package one plain chat request visits: files, functions and classes that a reader has to open.

    python -m bench.walk [CONFIG] [--model NAME] [--path PATH] [--agent] [--list]

With `--agent` it is a streamed Messages request with tools.
Runs `modelyard serve` in this process with a profile function, sends requests until it is warm, and counts what each of
the next three calls, from the socket to the reply. What also runs without a request, such as timers, does not count.
`--list` prints every function in the order of its first call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bench.servers import ROOT, free_port

_PACKAGE = f"{ROOT / 'modelyard'}{os.sep}"
_WARM_UP, _COUNTED, _SETTLE_S = 2, 3, 0.5  # requests; what they leave behind runs in the background
_IDLE_S = 3.0


Call = tuple[str, str]  # file, qualified name


class CallRecorder:
    """Every call of a function of the package while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[Call] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(_PACKAGE):
            self.calls.append((code.co_filename.removeprefix(_PACKAGE), code.co_qualname))

    def take(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls


def counts(calls: Sequence[Call]) -> dict[str, int]:
    functions = set(calls)
    methods = [(file, name) for file, name in functions if "." in name and "<locals>" not in name]
    return {
        "files": len({file for file, _ in functions}),
        "functions": len(functions),
        "classes": len({(file, name.partition(".")[0]) for file, name in methods}),
        "calls": len(calls),
    }


_TOOLS = [
    {
        "name": name,
        "description": f"{name} a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("Read", "Write")
]


def send(url: str, model: str, *, agent: bool = False) -> None:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "Say something."}],
    }
    if agent:
        body |= {"stream": True, "tools": _TOOLS, "system": "You are an agent."}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()


def wait_until_ready(base: str, within_s: float = 120.0) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{base}/health/ready", timeout=5)
            return
        except OSError:  # also an HTTP error: it is not ready
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {within_s:.0f} s")


def measure(recorder: CallRecorder, base: str, options: argparse.Namespace) -> None:
    path = options.path or ("/v1/messages" if options.agent else "/v1/chat/completions")
    try:
        wait_until_ready(base)
        for _ in range(_WARM_UP):
            send(base + path, options.model, agent=options.agent)
        time.sleep(_SETTLE_S)
        recorder.is_on = True
        time.sleep(_IDLE_S)
        recorder.is_on = False
        idle = set(recorder.take())
        walks: list[list[Call]] = []
        for _ in range(_COUNTED):
            time.sleep(_SETTLE_S)
            recorder.is_on = True
            send(base + path, options.model, agent=options.agent)
            time.sleep(_SETTLE_S)
            recorder.is_on = False
            walks.append(recorder.take())
        common = set.intersection(*map(set, walks)) - idle
        calls = [call for call in walks[-1] if call in common]
        if options.list:
            print("\n".join(f"{file}: {name}" for file, name in dict.fromkeys(calls)))
        print(json.dumps(counts(calls)))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what one plain chat request visits.")
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--path", default="")
    parser.add_argument("--agent", action="store_true", help="a streamed Messages request with tools")
    parser.add_argument("--list", action="store_true", help="print every function, in the order of its first call")
    options = parser.parse_args()
    recorder, port = CallRecorder(), free_port()
    threading.Thread(target=measure, args=(recorder, f"http://127.0.0.1:{port}", options), daemon=True).start()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    sys.argv = ["modelyard", "serve", "--config", str(options.config), "--port", str(port)]
    from modelyard.cli import main as modelyard

    modelyard()


if __name__ == "__main__":
    main()
