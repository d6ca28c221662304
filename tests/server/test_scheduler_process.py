"""The configuration of a worker that registers itself with a scheduler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelyard.config.load import load_config
from modelyard.core.engine import EngineSpec
from modelyard.core.errors import NotFound
from modelyard.server.scheduler_process import ConfiguredDefinitions

MODEL = '[models.demo]\nbackend = "fake"\necho = true\n'


def write(file: Path, text: str, time: int) -> None:
    file.write_text(text)
    os.utime(file, (time, time))


def test_a_worker_can_run_the_models_of_its_own_file(tmp_path: Path) -> None:
    write(tmp_path / "c.toml", MODEL, 1)
    definitions = ConfiguredDefinitions(lambda: load_config(tmp_path / "c.toml"))
    assert definitions.models() == ("demo",)
    assert definitions.find("demo") == EngineSpec("demo", {"echo": True}, backend="fake")
    with pytest.raises(NotFound, match="no model 'other'"):
        definitions.find("other")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    write(file, MODEL, 1)
    definitions = ConfiguredDefinitions(lambda: load_config(file))
    write(file, MODEL.replace("demo", "new"), 2)
    assert definitions.models() == ("new",)
    write(file, "[models", 3)
    assert definitions.models() == ("new",)
    file.unlink()
    assert definitions.find("new").backend == "fake"
