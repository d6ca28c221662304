"""Checks of the Python interpreters that a configuration names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelyard.cli.config import engine_problems
from modelyard.config.load import load_config
from tests.live_server import demo_config


@pytest.fixture
def lacking(tmp_path: Path) -> str:
    """An interpreter whose environment lacks something."""
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\necho '[[3, 12], [\"zmq\"]]'\n")
    file.chmod(0o755)
    return str(file)


def problems(python: str) -> list[tuple[str, str]]:
    found = engine_problems(load_config(env={}, overrides=demo_config(python=python)).config)
    return [(problem.path, problem.message) for problem in found]


def test_an_interpreter_that_cannot_run_an_engine_is_a_problem(lacking: str) -> None:
    ((path, message),) = problems(lacking)
    assert path == "models.demo.python"
    assert "pip install pyzmq" in message


def test_a_suitable_interpreter_is_no_problem() -> None:
    assert problems(sys.executable) == []


def test_a_missing_interpreter_is_left_to_the_configuration_checks() -> None:
    assert problems("/nowhere/python") == []
