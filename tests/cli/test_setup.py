"""`modelyard setup`: which library it sets up, what it prints, and its errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from modelyard.cli.app import app
from modelyard.core.errors import Unavailable
from modelyard.engines.llama_cpp import setup as engine


class Engine:
    """Stands in for downloads and builds, and notes what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(engine, "set_up", lambda progress: self.note("prebuilt"))
        monkeypatch.setattr(engine, "set_up_variant", lambda variant, progress: self.note(variant))
        monkeypatch.setattr(engine, "set_up_build", lambda fresh: self.note("rebuild" if fresh else "build"))
        monkeypatch.setattr(engine, "build_in_background", lambda: self.note("background"))
        monkeypatch.setattr(engine, "build_hint", lambda folder: None)

    def note(self, what: str) -> Path:
        self.asked.append(what)
        return Path("/cache") / what


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["setup", *arguments])


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ((), "prebuilt"),
        (("--library", "vulkan"), "vulkan"),
        (("--build",), "build"),
        (("--rebuild",), "rebuild"),
        (("--build", "--rebuild"), "rebuild"),
    ],
)
def test_the_library_that_was_asked_for_is_set_up(fake: Engine, arguments: tuple[str, ...], asked: str) -> None:
    shown = invoke(*arguments)
    assert (shown.exit_code, shown.output) == (0, f"llama.cpp works on this machine: /cache/{asked}\n")
    assert fake.asked == [asked]


def test_a_build_in_the_background_returns_at_once(fake: Engine) -> None:
    shown = invoke("--build", "--background")
    assert shown.exit_code == 0
    assert "the log is /cache/background. The next start uses it." in shown.output
    assert fake.asked == ["background"]


def test_a_faster_build_is_offered(fake: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "build_hint", lambda folder: "a build is faster")
    assert invoke().output.splitlines()[-1] == "a build is faster"


def test_an_error_is_one_line(fake: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any) -> Path:
        raise Unavailable("llama.cpp could not be fetched: offline")

    monkeypatch.setattr(engine, "set_up", offline)
    shown = invoke()
    assert (shown.exit_code, shown.stderr) == (1, "error llama.cpp could not be fetched: offline\n")
