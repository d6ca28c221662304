"""The interpreter of another environment, in which an engine's process runs: what it lacks, and how it finds us.

Some engines pin libraries that nobody else can live with. Token ids are all that travels between processes, so such an
engine may have an environment of its own: it needs three small packages, and this one is lent to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from pathlib import Path

import msgspec

import modelyard
from modelyard.core.errors import InvalidRequest
from modelyard.processes.child_process import describe_exit

NEEDS = {"msgspec": "msgspec", "pydantic": "pydantic", "zmq": "pyzmq"}  # module → the package that holds it
_OLDEST = (3, 11)
_ASK_S = 60.0  # Python, on a machine that is busy with loading something else
_QUESTION = (
    "import json, sys; from importlib.util import find_spec; "
    f"print(json.dumps([sys.version_info[:2], [n for n in {list(NEEDS)!r} if find_spec(n) is None]]))"
)


def interpreter_path(python: str | None) -> str:
    """The program to run; this very one where none is named."""
    if not python:
        return sys.executable
    if not interpreter_exists(python):
        raise _unfit(python, "there is no such program")
    return os.path.abspath(_which(python) or "")  # its links stay: by them an environment is known


def interpreter_exists(python: str) -> bool:
    return _which(python) is not None


def _which(python: str) -> str | None:
    return shutil.which(os.path.expanduser(python))


async def check_interpreter(python: str) -> None:
    """Raises where a worker cannot run in that environment."""
    program = interpreter_path(python)
    version, missing = await _asked(python, program)
    if version < _OLDEST:
        told = ".".join(map(str, version))
        raise _unfit(
            python, f"it is Python {told}, and an engine's process needs {'.'.join(map(str, _OLDEST))} or newer"
        )
    if missing:
        packages = " ".join(NEEDS[name] for name in missing)
        raise _unfit(python, f"its environment lacks {packages}: {program} -m pip install {packages}")


async def _asked(python: str, program: str) -> tuple[tuple[int, int], list[str]]:
    try:
        asked = await asyncio.create_subprocess_exec(program, "-c", _QUESTION, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    except OSError as error:
        raise _unfit(python, f"it cannot be started: {error.strerror}") from error
    try:
        said, complained = await asyncio.wait_for(asked.communicate(), _ASK_S)
    except BaseException as error:
        if asked.returncode is None:
            asked.kill()
            await asked.wait()
        if isinstance(error, TimeoutError):
            raise _unfit(python, f"it did not answer within {_ASK_S:g} s") from None
        raise
    try:
        return msgspec.json.decode(said, type=tuple[tuple[int, int], list[str]])
    except msgspec.MsgspecError:
        last = complained.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise _unfit(python, f"it {describe_exit(asked.returncode or 0)}: {last or 'and said nothing'}") from None


def worker_environment(python: str | None, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker. Another environment gets a link to this package, and to nothing beside it: what else
    is installed here must not get in the way of what it has itself."""
    if not python:
        return dict(env)
    lent = folder / "lent"
    lent.mkdir(exist_ok=True)
    link = lent / modelyard.__name__
    if not link.is_symlink():
        link.symlink_to(Path(modelyard.__file__).parent, target_is_directory=True)
    older = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{lent}{os.pathsep}{older}" if older else str(lent)}


def _unfit(python: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"python = {python!r} cannot run an engine: {why}", code="bad_interpreter", param="python")
