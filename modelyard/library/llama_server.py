"""A native llama-server with no compiler and no root: Debian's own build, unpacked into the user's cache folder once.

The packages bring their own C library and are started through its loader, so the system is neither changed nor asked
how old it is. `binary()` is all that a caller needs; a machine that is no Debian is told so in one sentence.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.progress import OnBytes, ProgressReporter

SUITE = "forky"
PROGRAM = "llama-server"
WANTED = (
    *("llama.cpp-tools", "llama.cpp-tools-extra", "libllama0", "libggml0"),
    *("libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libssl3t64", "libzstd1", "zlib1g"),
)
_PLUGINS = ("gconv", "engines-3", "ossl-modules")  # libraries that are loaded by name, never from the search path


def binary_path(folder: Path | None = None) -> Path:
    """Where the program is once it was fetched: it may not be there yet."""
    return (folder or cache_dir() / "llama-server") / "bin" / PROGRAM


def fetch_binary(meter: ProgressReporter | None = None, folder: Path | None = None) -> Path:
    """The program, fetched where it is not here yet. A second process that wants it too waits for the first."""
    program = binary_path(folder)
    if program.is_file():
        return program
    meter = meter or ProgressReporter()
    home = program.parent.parent
    wait = f"another process is fetching {PROGRAM}: waiting for it"
    try:
        with file_lock(home / ".lock", lambda: meter.say(wait)):
            if not program.is_file():
                _fetch(home, meter)
    except (OSError, subprocess.SubprocessError) as error:  # no space, no permission
        raise Unavailable(f"{PROGRAM} cannot be put into {home}: {error}") from error
    return program


def _fetch(home: Path, meter: ProgressReporter) -> None:
    for left in (home / "root", *home.glob(".fetch-*")):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    kind, address = debian_architecture(), debian_mirror()
    packages = package_index(address, SUITE, kind, WANTED)
    with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as name:
        root = Path(name) / "root"
        root.mkdir()
        with meter.watch(f"{PROGRAM} ({packages[0].version})") as on_bytes:
            unpack_packages(address, packages, root, on_bytes)
        programs = Path(name) / "bin"
        write_wrapper_scripts(root, home / "root", programs)
        root.rename(home / "root")
        programs.rename(home / "bin")  # last: its being there says that all of it is


def write_wrapper_scripts(root: Path, final: Path, programs: Path) -> None:
    """One script a program, for when `root` has become `final`: the unpacked loader with the unpacked libraries."""
    loader = next(root.rglob("ld-linux-*.so.*"), None)
    if loader is None:
        raise unavailable("Debian's C library has no loader where it is expected")
    _link_backends(root, loader.resolve().parent)
    path = ":".join(str(final / folder) for folder in sorted(set(_library_folders(root))))
    programs.mkdir()
    for program in sorted((root / "usr" / "bin").glob("llama*")):
        start = [str(final / loader.relative_to(root)), "--argv0"]
        rest = shlex.join(["--library-path", path, str(final / program.relative_to(root))])
        script = programs / program.name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$0" {rest} "$@"\n')
        script.chmod(0o755)


def _library_folders(root: Path) -> Iterator[Path]:
    for library in root.rglob("*.so*"):
        folder = library.parent.relative_to(root)
        if not any(part.startswith(_PLUGINS) for part in folder.parts):
            yield folder


def _link_backends(root: Path, beside: Path) -> None:
    """ggml looks for its backends beside the running program, and to the system that program is the loader."""
    for backend in root.rglob("libggml-*.so"):
        link = beside / backend.name
        if not link.exists():
            link.symlink_to(os.path.relpath(backend.resolve(), beside))


# Debian packages without root: the mirror that this machine's apt uses, its index, and unpacking into a folder.

_TIMEOUT_S = 60
_BLOCK = 1 << 16
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class DebianPackage(Struct, frozen=True):
    name: str
    version: str
    path: str
    size: int
    sha256: str


def debian_architecture(machine: str = "") -> str:
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise unavailable(f"there is none for the processor {machine}")
    return _MACHINES[machine]


def debian_mirror() -> str:
    """Its address with a slash at the end."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise unavailable("this is no Debian: apt-get and dpkg-deb are not here")
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
    return choose_mirror(done.stdout.splitlines())


def choose_mirror(addresses: Iterable[str]) -> str:
    """Others may stand beside it: security updates, Ubuntu's, vendors'."""
    found = (address.rstrip("/") for address in addresses)
    address = next((one for one in found if one.endswith("/debian") and one.startswith(("http://", "https://"))), None)
    if address is None:
        raise unavailable("this machine's apt knows no Debian mirror")
    return address + "/"


def package_index(address: str, suite: str, kind: str, wanted: Collection[str]) -> list[DebianPackage]:
    """The wanted packages, as the mirror has them now."""
    raw = b"".join(_blocks(f"{address}dists/{suite}/main/binary-{kind}/Packages.xz"))
    found = {package.name: package for package in parse_index(lzma.decompress(raw).decode(), wanted)}
    if missing := [name for name in wanted if name not in found]:
        raise unavailable(f"Debian {suite} has no {', '.join(missing)}")
    return [found[name] for name in wanted]


def parse_index(text: str, wanted: Collection[str]) -> Iterator[DebianPackage]:
    for stanza in text.split("\n\n"):
        name = stanza.partition("\n")[0].removeprefix("Package: ")
        if name in wanted:
            fields = dict(
                line.split(": ", 1) for line in stanza.split("\n") if not line.startswith(" ") and ": " in line
            )
            yield DebianPackage(name, fields["Version"], fields["Filename"], int(fields["Size"]), fields["SHA256"])


def unpack_packages(address: str, packages: Iterable[DebianPackage], root: Path, on_bytes: OnBytes) -> None:
    """All of them into one folder, as if it were the root of a system."""
    packages = list(packages)
    total, before = sum(package.size for package in packages), 0
    for package in packages:
        with tempfile.NamedTemporaryFile(suffix=".deb", dir=root) as file:
            digest = hashlib.sha256()
            for block in _blocks(address + package.path):
                file.write(block)
                digest.update(block)
                before += len(block)
                on_bytes(before, total)
            file.flush()
            if digest.hexdigest() != package.sha256:
                raise unavailable(f"the checksum of {package.name} is not the one in the index; try again")
            subprocess.run(["dpkg-deb", "-x", file.name, str(root)], check=True, timeout=_TIMEOUT_S)  # noqa: S603, S607


def _blocks(address: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            while block := answer.read(_BLOCK):
                yield block
    except OSError as error:
        raise unavailable(f"{address} could not be read: {error}") from error


def unavailable(why: str) -> Unavailable:
    return Unavailable(f"no prebuilt package can be fetched: {why}", code="fetch_failed")
