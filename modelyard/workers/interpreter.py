"""The Python interpreter of another environment that runs an engine's process.

Some engines pin libraries that conflict with all others. Only token ids travel between processes, so such an engine may
have an environment of its own: it needs three small packages, and a link to this package.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

import modelyard
from modelyard import plugins
from modelyard.core.errors import InvalidRequest
from modelyard.processes.child_process import describe_exit

NEEDS = {"msgspec": "msgspec", "pydantic": "pydantic", "zmq": "pyzmq"}  # module → package
_MIN_VERSION = (3, 11)
_PROBE_S = 60.0  # starting Python on a machine that is busy with loading a model
_PROBE = (
    "import json, sys; from importlib.util import find_spec; "
    f"print(json.dumps([sys.version_info[:2], [n for n in {list(NEEDS)!r} if find_spec(n) is None]]))"
)


def interpreter_path(python: str | None) -> str:
    """The program to run; None means this interpreter."""
    if not python:
        return sys.executable
    found = _which(python)
    if found is None:
        raise _unusable(python, "there is no such program")
    return os.path.abspath(found)  # symlinks are kept: a virtual environment is found through them


def worker_command(endpoint: str, definition: Path, python: str | None = None) -> list[str]:
    """`definition` is the file with the definition of its engine."""
    return [interpreter_path(python), "-m", "modelyard.workers.worker_process", endpoint, str(definition)]


def interpreter_exists(python: str) -> bool:
    return _which(python) is not None


def _which(python: str) -> str | None:
    return shutil.which(os.path.expanduser(python))


async def check_interpreter(python: str) -> None:
    """Raise if a worker cannot run in that environment."""
    program = interpreter_path(python)
    version, missing = await _probe(python, program)
    if version < _MIN_VERSION:
        found, needed = (".".join(map(str, each)) for each in (version, _MIN_VERSION))
        raise _unusable(python, f"it is Python {found}, and an engine's process needs {needed} or newer")
    if missing:
        packages = " ".join(NEEDS[name] for name in missing)
        raise _unusable(python, f"its environment lacks {packages}: {program} -m pip install {packages}")


async def _probe(python: str, program: str) -> tuple[tuple[int, int], list[str]]:
    try:
        process = await asyncio.create_subprocess_exec(program, "-c", _PROBE, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    except OSError as error:
        raise _unusable(python, f"it cannot be started: {error.strerror}") from error
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _PROBE_S)
    except BaseException as error:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if isinstance(error, TimeoutError):
            raise _unusable(python, f"it did not answer within {_PROBE_S:g} s") from None
        raise
    try:
        return msgspec.json.decode(output, type=tuple[tuple[int, int], list[str]])
    except msgspec.MsgspecError:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise _unusable(python, f"it {describe_exit(process.returncode or 0)}: {last or 'no output'}") from None


def worker_environment(python: str | None, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker process. Another interpreter gets links to this package and to those of engines only:
    other packages installed here must not shadow its own."""
    if not python:
        return dict(env)
    path = folder / "packages"
    path.mkdir(exist_ok=True)
    _link(path / modelyard.__name__, Path(modelyard.__file__))
    lines = ["[modelyard.engines]"]
    for name, (point, *_) in plugins.outside("engines").items():
        package = point.module.partition(".")[0]
        if (found := find_spec(package)) is not None and found.origin is not None:
            _link(path / package, Path(found.origin))
            lines.append(f"{name} = {point.value}")
    # As installed: the other interpreter finds engines by their entry points, too.
    info = path / "modelyard-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: modelyard\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    inherited = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{path}{os.pathsep}{inherited}" if inherited else str(path)}


def _link(link: Path, module: Path) -> None:
    """To a package, whose file is `__init__.py`, or to a module. It may be there from an earlier start."""
    is_package = module.name == "__init__.py"
    link = link if is_package else link.with_name(module.name)
    if not link.is_symlink():
        link.symlink_to(module.parent if is_package else module, target_is_directory=is_package)


def _unusable(python: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"python = {python!r} cannot run an engine: {reason}", code="bad_interpreter", param="python")
