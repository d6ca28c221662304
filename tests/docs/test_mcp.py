"""docs/mcp.md: its configuration is served, and its commands are sent."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import httpx

from tests.docs.pages import blocks, calls
from tests.live_server import live_server


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    program = tmp_path / "weather.py"
    program.write_text(blocks("mcp.md", "python")[0])
    config = tomllib.loads(blocks("mcp.md", "toml")[0])
    config["mcp"]["servers"]["weather"] |= {"command": sys.executable, "args": [str(program)]}
    with live_server(config) as server:
        for call in calls("mcp.md"):
            reply = httpx.post(server.url + call.path, content=call.body, timeout=60)
            assert reply.status_code == 200
            assert "Rome: 21 °C and sunny" in reply.text
