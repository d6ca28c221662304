"""MCP's own suite for clients (@modelcontextprotocol/conformance), in both of its newest specifications: every scenario
but those of extensions. The client under test is the gateway's (`tests/mcp/conformance_client.py`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from setup import compliance

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
CLIENT = f"{sys.executable} {ROOT / 'tests' / 'mcp' / 'conformance_client.py'}"
_SCENARIO = re.compile(r"^\s+- (\S+) \[(.*)\]$", re.MULTILINE)
_PASSED = re.compile(r"Passed: (\d+)/(\d+), (\d+) failed")


def suite(*arguments: str) -> str:
    command = [str(compliance.node()), str(compliance.mcp_suite()), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    return done.stdout + done.stderr


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
def test_the_suite_of_mcp_passes(version: str, tmp_path: Path) -> None:
    """One scenario after the other: all at once are too slow for the suite's own limits."""
    scenarios = [name for name, versions in _SCENARIO.findall(suite("list", "--client")) if version in versions]
    assert len(scenarios) > 15
    failed, checks = dict[str, str](), 0
    for name in scenarios:
        options = ("--scenario", name, "--spec-version", version, "--timeout", "100000", "-o", str(tmp_path))
        output = suite("client", "--command", CLIENT, *options)
        counts = _PASSED.search(output)
        if counts is None or int(counts[3]) or "OVERALL: PASSED" not in output:
            failed[name] = output[-1500:]
        else:
            checks += int(counts[1])
    print(f"\nMCP conformance {version}: {len(scenarios) - len(failed)} of {len(scenarios)} scenarios, {checks} checks")
    assert not failed
