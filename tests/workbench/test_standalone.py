"""The workbench as a separate server: it listens on the loopback only, with the same rules for Host and Origin."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.cli.app import app
from modelyard.core.errors import InvalidRequest
from modelyard.workbench.standalone import check_url
from tests.cli_process import DEADLINE, MODELYARD, environment


def test_the_url_is_reduced_to_the_servers_root() -> None:
    for url in ("http://h:1/", "http://h:1/v1", "http://h:1"):
        assert check_url(url) == "http://h:1"


def test_an_invalid_url_is_refused_with_an_example() -> None:
    for url in ("h:1", "ftp://h", "http://", ""):
        with pytest.raises(InvalidRequest, match="an example is http://"):
            check_url(url)
    refused = CliRunner().invoke(app, ["workbench", "--url", "nonsense"])
    assert refused.exit_code == 2
    assert "is not the URL of a server" in " ".join(refused.stderr.split())


def test_it_serves_the_page_with_the_same_rules_as_the_server(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MODELYARD, "workbench", "--url", "http://127.0.0.1:9", "--port", "0"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = re.search(r"is at (http://127\.0\.0\.1:\d+)/workbench", process.stderr.readline())
        assert found is not None
        url = found.group(1)
        assert httpx.get(url, follow_redirects=True).status_code == 200
        assert httpx.get(url + "/workbench", headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(url + "/v1/models").status_code == 404
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
