"""`uvicorn modelyard.app:create_app --factory`, as users of llm-pool start their server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.cli_process import DEADLINE, environment
from tests.live_server import demo_config


def test_uvicorn_runs_the_app_with_the_files_that_serve_finds(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    model = demo_config()["models"]["demo"] | {"enabled": True}
    (tmp_path / "config" / "settings.json").write_text(json.dumps({"engine": {"models": {"demo": model}}}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        command = [sys.executable, "-m", "uvicorn", "modelyard.app:create_app", "--factory"]
        command += ["--fd", str(listener.fileno())]
        env, pass_fds = environment(HOME=str(tmp_path)), (listener.fileno(),)
        with subprocess.Popen(command, cwd=tmp_path, env=env, pass_fds=pass_fds) as process:
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/responses"
                reply = httpx.post(url, json={"model": "demo", "input": "Hello"}, timeout=DEADLINE)
                assert reply.json()["output_text"] == "Hello there."
            finally:
                process.terminate()
            assert process.wait(60) in (0, -15)
