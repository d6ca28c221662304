"""Whether the llama.cpp library works on this machine: asked of a child process once, and remembered.

A library that was built for another CPU, or by a faulty compiler, kills its process at the first decode. The child
(`selftest.py`) dies in the server's place, and what happened becomes one sentence that says what to do. A pass is kept
in the user's cache folder under the library's files and the CPU; a failure is not, since it may have been the machine's
bad hour, and finding it again costs little.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.engines.llama_cpp.release import RELEASE
from modelyard.library.cache_dir import cache_dir
from modelyard.plugins import MissingLibrary

CHILD = (sys.executable, "-m", "modelyard.engines.llama_cpp.selftest")
_TIMEOUT_S = 120.0  # it takes one second; a GPU's first use takes longer
_REBUILD = "`make rebuild-engine` builds it anew for this machine"
_PORTABLE = "with CMAKE_ARGS=-DGGML_NATIVE=OFF it is built for any CPU of this kind"


class Ending(Struct, frozen=True):
    """How the child ended: `code` as subprocess has it (minus the signal), None where it had to be stopped."""

    code: int | None
    output: str = ""
    errors: str = ""


class Broken(Unavailable):
    """The library does not work on this machine."""

    default_code = "engine_broken"


def require(env: Mapping[str, str] = os.environ, examine: Callable[[], str | None] | None = None) -> None:
    """Raise where the library is missing or broken; the child is started only where no pass is remembered."""
    mark = cache_dir(env) / "selftest" / fingerprint(library_folder(env))
    if mark.exists():
        return
    fault = (examine or run)()
    if fault is not None:
        raise Broken(fault)
    _remember(mark)


def run(child: Sequence[str] = CHILD, timeout: float = _TIMEOUT_S) -> str | None:
    """What is wrong, in one sentence, or None."""
    try:
        done = subprocess.run(child, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        return explain(Ending(None, _text(error.stdout)), timeout)
    return explain(Ending(done.returncode, done.stdout, done.stderr), timeout)


def explain(ending: Ending, timeout: float) -> str | None:
    if ending.code == 0:
        return None
    fault, stage = _last(ending.output, "fault "), _last(ending.output, "stage ") or "starting"
    if fault is not None:
        return f"the llama.cpp library does not fit this program: {fault}; {_REBUILD}."
    if ending.code is None:
        return f"the llama.cpp library hung for {timeout:.0f} s while {stage}; {_REBUILD}."
    if ending.code < 0:
        return f"the llama.cpp library died while {stage}: {_of_signal(-ending.code)}; {_REBUILD}, and {_PORTABLE}."
    words = (ending.errors.strip().splitlines() or [f"exit code {ending.code}"])[-1]
    return f"the llama.cpp library failed while {stage}: {words}; {_REBUILD}."


def _of_signal(number: int) -> str:
    known = {
        "SIGILL": "SIGILL, an instruction that this CPU does not have or that the compiler got wrong",
        "SIGKILL": "SIGKILL, which is how the system ends a process when memory runs out",
    }
    names = {int(one): one.name for one in signal.Signals}
    name = names.get(number, f"signal {number}")
    return known.get(name, name)


def _last(output: str, prefix: str) -> str | None:
    found = [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
    return found[-1] if found else None


def _text(raw: bytes | str | None) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw or ""


# --- remembering ------------------------------------------------------------------------------------------------------


def library_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where the shared libraries lie, found without loading them."""
    if override := env.get("LLAMA_CPP_LIB_PATH"):  # llama-cpp-python's own
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise MissingLibrary("llama.cpp is not built here: `make install` builds it for this machine.")
    return Path(spec.origin).parent / "lib"


def fingerprint(folder: Path) -> str:
    """Other library files, another CPU or a program for another release: another name."""
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.glob("*") if p.is_file())
    told = json.dumps([RELEASE, str(folder), files, cpu()])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and its instruction sets."""
    try:
        lines = info.read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _remember(mark: Path) -> None:
    """A folder that cannot be written costs a second at each start, nothing more."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        return
