"""`uvicorn modelyard.server.serve:create_app --factory`, as users of llm-pool start their server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx

from tests.cli_process import environment
from tests.live_server import demo_config


def test_uvicorn_runs_the_app_with_the_files_that_serve_finds(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    settings = {"engine": {"models": demo_config()["models"]}}
    (tmp_path / "config" / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "uvicorn", "modelyard.server.serve:create_app", "--factory", "--port", "0"]
    env = environment(HOME=str(tmp_path))
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            port = next(
                found[1] for line in lines if (found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line))
            )
            body = {"model": "demo", "input": "Hello"}
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/responses", json=body, timeout=60)
            assert reply.json()["output_text"] == "Hello there."
        finally:
            process.terminate()
        assert process.wait(60) in (0, -15)
