"""The page as a server of its own: it listens here alone, behind the same rules, and says what is no address."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.workbench.standalone import checked
from tests.commands import DEADLINE, MODELYARD, environment, run


@pytest.mark.parametrize("url", ["http://h:1/", "http://h:1/v1", "http://h:1"])
def test_the_address_is_the_servers_root(url: str) -> None:
    assert checked(url) == "http://h:1"


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", ""])
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match="looks like"):
        checked(url)


def test_the_command_says_what_is_wrong_with_its_address(tmp_path: Path) -> None:
    done = run("workbench", "--url", "nonsense", cwd=tmp_path)
    assert done.returncode == 2
    assert "not an address" in done.stderr


def test_it_serves_the_page_of_a_server_elsewhere_by_the_same_rules(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MODELYARD, "workbench", "--url", "http://127.0.0.1:9", "--port", "0"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
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
        assert process.stderr is not None
        process.stderr.close()
