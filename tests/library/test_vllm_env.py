from __future__ import annotations

from pathlib import Path

import pytest

from modelyard_vllm import env as vllm_env


def test_the_environment_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    assert vllm_env.program() == tmp_path / "vllm-env" / "bin" / "vllm"
    assert vllm_env.python() == tmp_path / "vllm-env" / "bin" / "python"


def test_it_is_ready_if_its_stamp_has_the_current_recipe(tmp_path: Path) -> None:
    assert not vllm_env.is_ready(tmp_path)
    vllm_env.program(tmp_path).parent.mkdir()
    vllm_env.program(tmp_path).touch()
    assert not vllm_env.is_ready(tmp_path), "an incomplete installation"
    vllm_env.write_stamp(tmp_path)
    assert vllm_env.is_ready(tmp_path)
    (tmp_path / ".installed").write_text("another version")
    assert not vllm_env.is_ready(tmp_path)
