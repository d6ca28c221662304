"""Debian packages without root: the mirror that this machine's apt uses, its index, and unpacking into a folder."""

from __future__ import annotations

import hashlib
import lzma
import platform
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.library.progress import OnBytes

_TIMEOUT_S = 60
_BLOCK = 1 << 16
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Package(Struct, frozen=True):
    name: str
    version: str
    path: str
    size: int
    sha256: str


def architecture(machine: str = "") -> str:
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise unavailable(f"there is none for the processor {machine}")
    return _MACHINES[machine]


def mirror() -> str:
    """Its address with a slash at the end."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise unavailable("this is no Debian: apt-get and dpkg-deb are not here")
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
    return choose(done.stdout.splitlines())


def choose(addresses: Iterable[str]) -> str:
    """Others may stand beside it: security updates, Ubuntu's, vendors'."""
    found = (address.rstrip("/") for address in addresses)
    address = next((one for one in found if one.endswith("/debian") and one.startswith(("http://", "https://"))), None)
    if address is None:
        raise unavailable("this machine's apt knows no Debian mirror")
    return address + "/"


def index(address: str, suite: str, kind: str, wanted: Collection[str]) -> list[Package]:
    """The wanted packages, as the mirror has them now."""
    raw = b"".join(_blocks(f"{address}dists/{suite}/main/binary-{kind}/Packages.xz"))
    found = {package.name: package for package in parse(lzma.decompress(raw).decode(), wanted)}
    if missing := [name for name in wanted if name not in found]:
        raise unavailable(f"Debian {suite} has no {', '.join(missing)}")
    return [found[name] for name in wanted]


def parse(text: str, wanted: Collection[str]) -> Iterator[Package]:
    for stanza in text.split("\n\n"):
        name = stanza.partition("\n")[0].removeprefix("Package: ")
        if name in wanted:
            fields = dict(
                line.split(": ", 1) for line in stanza.split("\n") if not line.startswith(" ") and ": " in line
            )
            yield Package(name, fields["Version"], fields["Filename"], int(fields["Size"]), fields["SHA256"])


def unpack(address: str, packages: Iterable[Package], root: Path, on_bytes: OnBytes) -> None:
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
