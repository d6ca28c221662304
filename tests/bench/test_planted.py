"""The planted settings: their files are valid, there are twenty of every kind, and a bad write-back is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planted import CASES, Case, Result, file_text, write_back_faults
from modelyard.config.load import load_config
from modelyard_bench.statistics import Interval


def test_there_are_twenty_cases_of_every_kind_that_the_optimizer_is_to_mend() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 20
    planted = {key.removeprefix("llama_server_") for case in CASES for key in (*case.model, *case.cache)}
    assert planted >= {"n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn", "type_k", "type_v"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_file_of_a_case_has_its_settings(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.planted.fetch_binary", lambda: Path("/opt/llama-server"))
    (tmp_path / "modelyard.toml").write_text(file_text(case, tmp_path / "model.gguf"))
    entry = load_config(tmp_path / "modelyard.toml", env={}).config.router().catalog.models["planted"]
    assert entry.default_cache.info.window == 8192


def test_what_a_write_back_does_wrong_is_named(tmp_path: Path) -> None:
    file, before = tmp_path / "modelyard.toml", file_text(CASES[5], tmp_path / "model.gguf")
    file.write_text(before)
    assert list(write_back_faults(before, file, 1)) == ["exit code 1", "nothing was written"]
    file.write_text(before.replace("n_ubatch = 1", "n_ubatch = 512"))
    assert list(write_back_faults(before, file, 0)) == ["there is no backup of the file before"]
    (tmp_path / "modelyard.bak.toml").write_text(before)
    assert not list(write_back_faults(before, file, 0))
    file.write_text(before.replace("n_ubatch = 1", "").replace("8123  # the reason", "8124  #"))
    assert list(write_back_faults(before, file, 0)) == ["a comment is lost", "another section has changed"]


def test_a_case_holds_if_the_gain_is_beyond_the_noise() -> None:
    result = Result(case="x", goal="chat", exit_code=0, seconds=1.0, load=0.0, gain=Interval(1.5, 1.1, 2.0))
    assert result.holds
    assert not Result(case="x", goal="chat", exit_code=0, seconds=1.0, load=0.0, gain=Interval(1.5, 0.9, 2.0)).holds
